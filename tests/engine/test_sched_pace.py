"""Decoding steps within a target time: the engine's own code in virtual time, and over the toy model."""

from __future__ import annotations

import asyncio

import pytest
from engines.toy import ToyLink, continuation
from engines.toy_engine import running
from engines.virtual import serve, toy_system

from fastdecode.bench.serving.report import gaps
from fastdecode.bench.serving.workload import MOONCAKE_BLOCK, LoadRequest
from fastdecode.engine.scheduling import queue
from fastdecode.engine.scheduling.spread import Spread
from fastdecode.engine.state.request import SamplingParams, TokenEvent

#: Two mini-batches' S-Parts take 20 ms, a cached token takes the R-node 2 us: 4096 tokens take 8 ms.
SYSTEM = toy_system(((1, 0.010), (516, 0.011)), 2e-6)
STREAMS = [(0.0, 20, 400)] * 8
BLOCKS = tuple(range(4096 // MOONCAKE_BLOCK))


def p99(run):
    """The 99th percentile of the time between tokens of the streams."""
    values = sorted(gap for answer in run.run.answers[: len(STREAMS)] for gap in gaps(answer))
    return values[int(0.99 * (len(values) - 1))]


def beside(*requests, target, system=SYSTEM):
    run = serve([*STREAMS, *requests], system, mini_batches=2, batch=64, target_tbt=target)
    assert all(answer.output_tokens == answer.request.output_tokens for answer in run.run.answers)
    return run


def test_many_choices_of_a_long_prompt_keep_the_target():
    costly = LoadRequest(1.0, 4096, 40, BLOCKS, choices=32)
    alone, bounded, unbounded = beside(target=0.024), beside(costly, target=0.024), beside(costly, target=None)
    assert p99(bounded) < 1.3 * p99(alone)
    assert p99(unbounded) > 5 * p99(alone)
    assert bounded.preemptions == 0 and bounded.recomputed_tokens == 0
    assert bounded.run.seconds < 1.15 * unbounded.run.seconds, "choices that wait cost next to no tokens/s"


def test_choices_leave_time_for_steps_that_are_slower_than_predicted(monkeypatch):
    """Slow steps are said to take 1.6 times the predicted time; the simulated ones take the predicted time."""
    costly = LoadRequest(1.0, 4096, 40, BLOCKS, choices=32)
    even = p99(beside(costly, target=0.040))
    monkeypatch.setattr(Spread, "observe", lambda spread, ratio: setattr(spread, "value", 1.6))
    uneven = p99(beside(costly, target=0.040))
    assert 1.1 * 0.040 / 1.6 < even < 1.1 * 0.040
    assert uneven < 1.1 * 0.040 / 1.6


def test_choices_that_grow_pause_and_lose_nothing():
    """At their start each choice takes the R-node 0.8 ms, at their end 6.8 ms."""
    system = toy_system(((1, 0.010), (516, 0.011)), 2e-5)
    costly = LoadRequest(1.0, 40, 300, choices=16)
    bounded, unbounded = (beside(costly, target=target, system=system) for target in (0.080, None))
    assert p99(unbounded) > 1.5 * 0.080
    assert p99(bounded) < 1.2 * 0.080
    assert bounded.preemptions > 0 and bounded.recomputed_tokens == 0


def test_a_request_too_long_for_the_target_does_not_wait_for_ever(monkeypatch):
    """Short requests never stop coming; a long one takes 40 ms a step by itself, against a target of 24 ms."""
    monkeypatch.setattr(queue, "MAX_PASSED", 8)
    short = [LoadRequest(0.02 * i, 20, 10) for i in range(400)]
    long = LoadRequest(1.0, 20_000, 20)
    run = serve(sorted([*short, long], key=lambda r: r.arrival), SYSTEM, mini_batches=2, target_tbt=0.024)
    answer = next(answer for answer in run.run.answers if answer.request == long)
    assert answer.output_tokens == 20
    assert answer.finished < 6.0 < run.run.seconds, "it ends while short ones still come"


def test_without_other_sequences_any_request_starts():
    run = serve([(0.0, 20_000, 5)] * 3, SYSTEM, target_tbt=1e-3)
    assert [answer.output_tokens for answer in run.run.answers] == [5] * 3


def test_choices_that_wait_do_not_hide_the_request_behind_them():
    costly, behind = LoadRequest(1.0, 4096, 200, BLOCKS, choices=64), LoadRequest(2.0, 20, 10)
    run = beside(costly, behind, target=0.024)
    assert run.run.answers[-1].finished - 2.0 < 1.0


@pytest.mark.parametrize("target", [None, 1e-5])
async def test_tokens_are_the_same_however_choices_wait_and_pause(target):
    """The steps of the toy model take far longer than the target."""
    prompt, params, got = list(range(3, 150)), SamplingParams(temperature=0.0, max_tokens=90), {}
    done = asyncio.Event()

    def output_of(name):
        def output(event):
            assert isinstance(event, TokenEvent)
            got.setdefault(name, []).append(event.token)
            if all(len(got.get(str(k), [])) == 90 for k in range(12)):
                done.set()

        return output

    options = {"mini_batches": 2, "max_batch_tokens": 64, "max_batch_size": 16, "target_tbt": target}
    async with running(ToyLink(), **options) as (engine, _):
        engine.submit_choices(prompt, params, {str(k): output_of(str(k)) for k in range(12)})
        await asyncio.wait_for(done.wait(), 60)
    assert all(tokens == continuation(prompt, 90) for tokens in got.values())
