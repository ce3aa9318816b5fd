"""Chunks of prompts that keep a target time between tokens: the engine's own code in virtual time."""

from __future__ import annotations

import dataclasses
import random

import pytest
from engines.virtual import MODEL, gaps, serve, toy_system

from fastdecode.engine.scheduling.budgets import pairs
from fastdecode.engine.scheduling.step_time import PromptWork, StepTimes


def percentile(values, part):
    return sorted(values)[int(part * (len(values) - 1))]


#: 10 ms a step of 16 rows, 0.4 ms each further row, and attention that makes the last chunk of 8192 tokens cost twice
#: its rows: a pair is as much as 1 / 8192 rows.
MODEL = dataclasses.replace(MODEL, parameters=2 * 4 * 8 * 8192)


def costs(base):
    return toy_system(((1, base), (16, base + 1e-6), (516, base + 0.2)), 1e-7, model=MODEL)


def streams_beside_long_prompts(target, *, base=0.010, mini_batches=1, long_prompts=True):
    """Sixteen streams, and a prompt of 8192 tokens every 2 s."""
    requests = [(0.0, 20, 600)] * 16
    if long_prompts:
        requests += [(1.0 + 2.0 * i, 8192, 2) for i in range(4)]
    return serve(requests, costs(base), mini_batches=mini_batches, target_tbt=target)


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("target", [0.05, 0.1])
def test_long_prompts_keep_the_target(target, mini_batches):
    alone = streams_beside_long_prompts(target, mini_batches=mini_batches, long_prompts=False)
    run = streams_beside_long_prompts(target, mini_batches=mini_batches)
    unbounded = streams_beside_long_prompts(None, mini_batches=mini_batches)
    assert percentile(gaps(alone), 0.99) == pytest.approx(0.010 * mini_batches, rel=0.15)
    assert percentile(gaps(unbounded), 0.99) > 0.2
    assert percentile(gaps(run), 0.99) < 1.1 * target
    assert [a.output_tokens for a in run.run.answers] == [a.output_tokens for a in unbounded.run.answers]
    assert percentile(gaps(run), 0.99) > 0.7 * target, "the time that is allowed is used"


def test_where_decoding_takes_longer_than_the_target_prompts_add_less_than_half_of_it():
    run = streams_beside_long_prompts(0.02, base=0.1)
    assert percentile(gaps(run), 0.99) < 1.1 * 1.5 * 0.1


def test_a_prompt_that_no_stream_waits_for_takes_all_rows():
    run = serve([(0.0, 5120, 1)] * 3, costs(0.010), target_tbt=0.001)
    assert len(run.steps) == 30


def test_prompts_apart_add_to_the_steps_beside_them_what_the_target_leaves():
    """A step that decodes takes 10 ms, and 50 us more for each row of the prompts beside it; a step of prompts takes as
    long as seven that decode. Nothing is granted before a step has decoded without prompts."""
    times, rng, target = StepTimes(0.030, prompts_apart=True), random.Random(0), 0.030
    assert times.budget(1, 4096, sharers=1, streams=False).chunk(0, 8192) == 4096
    assert times.budget(1, 4096, sharers=1, streams=True).chunk(0, 8192) == 0
    seconds, rows = [], 0
    for i in range(400):
        if i % 7 == 1:
            rows = times.budget(1, 4096, sharers=1, streams=True).chunk(0, 8192)
            times.begin(1, PromptWork(rows, pairs(0, rows)), False)
        times.begin(0, PromptWork(0, 0.0), True)
        seconds.append((0.010 + 50e-6 * rows) * rng.uniform(0.95, 1.05))
        times.end(0, seconds[-1])
        if i % 7 == 0 and i:
            times.end(1, sum(seconds[-7:]))
            rows = 0
    assert 0.8 * target < percentile(seconds[100:], 0.99) < 1.1 * target
    assert percentile(seconds[100:], 0.5) > 0.7 * target, "the time that is allowed is used"


def test_an_idle_mini_batch_learns_the_time_that_the_others_prompts_take_from_it():
    """A decoding mini-batch beside one that prefills takes longer, and its base time is not blamed for it."""
    times = StepTimes(target=0.1)
    for _ in range(100):
        times.begin(0, PromptWork(0, 0.0), True)
        times.begin(1, PromptWork(100, pairs(0, 100)), True)
        times.end(0, 0.010 + 0.05 / 2)
        times.end(1, 0.010 + 0.05)
        times.begin(0, PromptWork(0, 0.0), True)
        times.end(0, 0.010)
    assert times.base == pytest.approx(0.010, rel=0.1)
    assert 150 <= times.budget(0, 10_000, sharers=1, streams=True).chunk(0, 10_000) <= 190


def test_costs_follow_the_machine():
    """The same step takes three times as long from some time on; random noise of 20 % on all times."""
    rng, times = random.Random(1), StepTimes(target=0.1)
    for slowness in (1, 3):
        for _ in range(60):
            work = PromptWork(n := rng.randint(16, 200), pairs(rng.randint(0, 4000), n))
            for one in (work, PromptWork(0, 0.0)):
                times.begin(0, one, True)
                times.end(0, slowness * (0.005 + 2e-4 * one.rows + 1e-8 * one.pairs) * rng.uniform(0.8, 1.2))
        n = times.budget(0, 10_000, sharers=1, streams=True).chunk(2000, 10_000)
        seconds = slowness * (0.005 + 2e-4 * n + 1e-8 * pairs(2000, n))
        assert 0.05 < seconds < 0.1, "slow steps keep the target"


def test_slow_steps_keep_the_target_too():
    """Every tenth step takes half as long again as the others: then prompts get what keeps those within the target."""

    def granted(slow: float) -> int:
        times = StepTimes(target=0.1)
        for i in range(1000):
            work = PromptWork(100, pairs(0, 100)) if i % 2 else PromptWork(0, 0.0)
            times.begin(0, work, True)
            times.end(0, (0.010 + 5e-4 * work.rows) * (slow if i % 10 == 0 else 1.0))
        return times.budget(0, 10_000, sharers=1, streams=True).chunk(0, 10_000)

    even, spread = granted(1.0), granted(1.5)
    assert 165 < even <= 180, "0.1 s less the base"
    assert 90 < spread < 125, "0.1 s / 1.5 less the base"


def test_steps_that_other_work_holds_up_do_not_move_the_base_time():
    times = StepTimes(target=0.1)
    for i in range(200):
        times.begin(0, PromptWork(0, 0.0), True)
        times.end(0, 0.100 if i % 20 in (10, 11) else 0.010)
        assert times.base == pytest.approx(0.010)


def where_attention_is_slow() -> StepTimes:
    """A step of 10 ms; the least chunk of 4 rows adds 4.8 ms behind 8,000 tokens, and prompts may add 3 ms."""
    times = StepTimes(target=0.012)
    for n in (16, 64) * 25:
        for work in (PromptWork(n, pairs(8000, n)), PromptWork(0, 0.0)):
            times.begin(0, work, True)
            times.end(0, 0.010 + 5e-8 * work.pairs)
    return times


def least_chunks(times: StepTimes, mini_batch: int) -> int:
    return times.budget(mini_batch, 10_000, sharers=2, streams=True).chunk(8000, 192)


def test_mini_batches_take_turns_where_the_least_chunk_of_one_takes_all_of_the_time():
    times = where_attention_is_slow()
    granted = []
    for _ in range(6):
        for mini_batch in (0, 1):
            times.end(mini_batch, None)
            n = least_chunks(times, mini_batch)
            granted.append(n)
            times.begin(mini_batch, PromptWork(n, pairs(8000, n)) if n else PromptWork(0, 0.0), True)
    assert set(granted) == {0, 4}
    both = list(zip(granted[::2], granted[1::2], strict=True))
    assert all(0 in pair for pair in both), "never two chunks at once"
    assert granted[::2].count(4) >= 2 and granted[1::2].count(4) >= 2, "neither waits for ever"


def test_a_mini_batch_does_not_wait_for_one_that_has_nothing_in_flight():
    times = where_attention_is_slow()
    times.begin(0, PromptWork(4, pairs(8000, 4)), True)
    assert least_chunks(times, 1) == 0  # mini-batch 1 is next, but its prompt is cancelled
    times.end(0, 0.015)
    assert least_chunks(times, 0) == 4


def test_a_failed_step_teaches_nothing():
    times = StepTimes(target=0.1)
    times.begin(0, PromptWork(100, 5050), True)
    times.end(0, None)
    assert times.base is None
    assert times.budget(0, 77, sharers=1, streams=True).chunk(0, 1000) == 77
