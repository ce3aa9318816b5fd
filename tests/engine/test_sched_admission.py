"""The load-stabilising schedule: what it knows of output lengths, and what it does to load and throughput.

Throughput is that of the engine's own code in virtual time (plan/simulation.py).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engines.token_stream import submit, tokens_of
from engines.toy import ToyLink, continuation
from engines.toy_engine import running
from engines.virtual import MODEL, serve, toy_system

from fastdecode.bench.serving import report
from fastdecode.bench.serving.workload import read_trace
from fastdecode.engine.scheduling.admission import Greedy, Stable
from fastdecode.engine.scheduling.lengths import OutputLengths
from fastdecode.engine.state.request import SamplingParams
from fastdecode.engine.state.sequence import Sequence
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.shape import LayerReads

TRACE = Path(__file__).parent / "traces" / "azure-conv-1024.csv"


@pytest.fixture(scope="module")
def trace():
    return read_trace(TRACE)


#: 10 ms whatever the rows, as where reading the weights takes all of the time.
FLAT = ((1, 0.010), (512, 0.0101))


def both(requests, system, **options):
    return [serve(requests, system, schedule=schedule, **options) for schedule in ("greedy", "stable")]


def test_known_lengths_at_once_are_faster_and_no_step_is_much_longer_than_another():
    """Two mini-batches; with mixed ages, the R-Part takes as long as the S-Part."""
    n, slots, length = 384, 12, 96
    system = toy_system(FLAT, 0.020 / (slots * length / 2))
    greedy, stable = both(
        [(0.0, 1, length)] * n, system, mini_batches=2, batch=slots // 2, bounds=[length] * n, target_tbt=None
    )
    assert stable.tokens_per_second >= 1.15 * greedy.tokens_per_second
    assert stable.longest_step <= 0.65 * greedy.longest_step


def test_unknown_lengths_that_fill_the_cache_are_not_paused_and_cost_little_throughput(trace):
    """The R-Part of a half full cache takes as long as the S-Part; a row of a prompt costs a 33rd of a step."""
    pages, drawn = 96, trace[-256:]
    system = toy_system(((1, 0.010), (33, 0.020)), 0.010 / (pages * 128 / 2))
    requests = [(0.0, 16, request.output_tokens) for request in drawn]
    history = [request.output_tokens for request in trace[:-256]]
    greedy, stable = both(requests, system, pages=pages, bounds=[1024] * 256, history=history)
    assert stable.preemptions < 0.2 * greedy.preemptions
    assert stable.tokens_per_second >= 0.97 * greedy.tokens_per_second
    good, best = (report.summary(done.run, None, 0.25)["goodput_per_s"] for done in (greedy, stable))
    assert best > 1.05 * good


@pytest.mark.parametrize(("fixed", "least"), [(0.2, 1.05), (0.9, 0.99)])
def test_pages_are_left_free_where_recomputing_costs_more_than_a_smaller_batch(trace, fixed, least):
    """A part `fixed` of a step's S-Part does not depend on its rows. Where it is small, the rows of sequences that were
    paused and recomputed cost most; where it is large, a larger batch makes up for them."""
    n, batch = 160, 12  # sequences, and how many of mixed ages fill the pages
    row = (1 - fixed) * 0.010 / (batch / 2)
    system = toy_system(((1, fixed * 0.010 + row), (401, fixed * 0.010 + 401 * row)), 1.1 * 0.020 / (batch * 205))
    requests = [(0.0, 16, request.output_tokens) for request in trace[-n:]]
    history = [request.output_tokens for request in trace[:-n]]
    options = {"pages": 2 * batch, "batch": n // 2, "mini_batches": 2, "bounds": [1024] * n, "target_tbt": None}
    greedy, stable = both(requests, system, history=history, **options)
    assert stable.tokens_per_second >= least * greedy.tokens_per_second


def test_tokens_beyond_windows_take_no_room():
    """Three of four layers see 64 tokens. The pages hold 20 sequences of 1024 tokens as a whole; all 40 run at once if
    pages beyond the windows are given back."""
    model = replace(MODEL, n_layers=4, reads=(*[LayerReads(window=64)] * 3, LayerReads()))
    load, bounds = [(0.0, 1, 1024)] * 40, [1024] * 40
    pages = 20 * (1024 // PAGE_TOKENS) * 4  # a layer of the toy model has PAGE_BYTES
    greedy, stable = both(load, toy_system(FLAT, 1e-9, model=model), pages=pages, batch=64, bounds=bounds)
    assert max(step.rows for step in stable.steps) >= 38
    assert stable.preemptions <= greedy.preemptions
    assert stable.tokens_per_second >= 0.98 * greedy.tokens_per_second


def test_load_that_the_s_part_covers_keeps_nobody_waiting():
    """Long prompts beside short ones exceed the load of mixed ages, but the R-Part takes a tenth of the S-Part."""
    requests = [(0.0, 2000 if i % 16 == 0 else 20, 60) for i in range(64)]
    system = toy_system(FLAT, 0.001 / (16 * 2000))
    greedy, stable = both(requests, system, mini_batches=2, batch=16, bounds=[60] * 64, target_tbt=None)
    assert stable.tokens_per_second >= 0.98 * greedy.tokens_per_second


def test_at_a_traces_own_arrivals_nothing_is_lost(trace):
    greedy, stable = both(trace[:100], toy_system(((1, 0.010), (101, 0.020)), 0.010 / 60_000), batch=64)
    assert stable.tokens_per_second >= 0.98 * greedy.tokens_per_second


def test_a_batch_that_fills_from_cold_does_not_lock_at_half():
    """The published algorithm settles at half the batch (here 16) when everything that fits starts at once."""
    n, length = 200, 100
    run = serve([(0.0, 1, length)] * n, toy_system(FLAT, 1e-6), batch=32, bounds=[length] * n, schedule="stable")
    third = len(run.steps) // 3
    middle = run.steps[third : 2 * third]
    assert np.mean([step.rows for step in middle]) > 29
    loads = [step.read_tokens for step in middle]
    assert max(loads) < 1.15 * np.mean(loads)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_every_request_ends_whatever_its_length(mini_batches):
    """Prompts longer than the target load, bounds that outputs do not reach, and outputs longer than all before."""
    rng = random.Random(1)
    requests = [(rng.uniform(0, 5), rng.choice([1, 50, 4000]), rng.choice([1, 2, 60, 400])) for _ in range(40)]
    bounds = [rng.choice([None, 400]) for _ in requests]
    requests.sort()
    run = serve(
        requests, toy_system(FLAT, 1e-7), batch=4, mini_batches=mini_batches, pages=80, bounds=bounds,
        schedule="stable",
    )  # fmt: skip
    assert [answer.output_tokens for answer in run.run.answers] == [n_output for _, _, n_output in requests]


# -- output lengths ---------------------------------------------------------------------------------------------------


def observed(lengths, bound=None):
    known = OutputLengths()
    for n in lengths:
        known.observe("", min(n, bound or n), ended=bound is None or n < bound)
    return known


def test_survival_is_that_of_the_observed_lengths(trace):
    lengths = np.array([request.output_tokens for request in trace])
    at = np.array([1.0, 20, 80, 120, 300, 400, 600])
    exact = (lengths[None, :] > at[:, None]).mean(1)
    assert observed(lengths).survival("", at, bounded=False) == pytest.approx(exact, abs=0.06)
    tokens, steps = observed(lengths).spread("", 5000, bounded=False)
    assert steps.sum() == pytest.approx(lengths.mean(), rel=0.1)
    assert (tokens * steps).sum() == pytest.approx((lengths * (lengths + 1) / 2).mean(), rel=0.15)


def test_cut_outputs_do_not_make_outputs_look_short():
    """Half of the requests are cut at 100 tokens; the estimate above 100 comes from the other half alone."""
    rng = random.Random(0)
    lengths = [round(rng.lognormvariate(5, 0.6)) + 1 for _ in range(1500)]
    known = OutputLengths()
    for i, n in enumerate(lengths):
        cut = i % 2 == 0 and n > 100
        known.observe("", 100 if cut else n, ended=not cut)
    at = np.array([50.0, 100, 150, 250, 400])
    exact = (np.array(lengths)[None, :] > at[:, None]).mean(1)
    assert known.survival("", at, bounded=False) == pytest.approx(exact, abs=0.06)


def test_running_outputs_do_not_make_outputs_look_short():
    """200 outputs of 10 or 1000 tokens start together: after 50 tokens only short ones have ended."""
    known = OutputLengths()
    for _ in range(100):
        known.observe("", 10, ended=True)
    known.set_running({"": [50] * 100})
    assert known.survival("", np.array([40.0]), bounded=False) == pytest.approx([0.5], abs=0.05)


def test_of_an_unknown_class_a_bound_is_what_counts():
    known = observed([10] * 5)
    assert known.survival("", np.array([1e6]), bounded=True) == 1
    assert 0 < known.survival("", np.array([1000.0]), bounded=False) < 0.5
    tokens, steps = known.spread("", 99, bounded=True)
    assert (steps.sum(), (tokens * steps).sum()) == (pytest.approx(99), pytest.approx(99 * 100 / 2))


def test_requests_cancelled_in_the_queue_do_not_make_outputs_look_short():
    """The estimate of their class is that of a class without outputs, and does not change beside outputs that ended."""
    at = np.array([1.0, 10, 100])
    stable, ended = Stable(), [200] * 20
    for order in range(20):
        stable.left(Sequence(str(order), order, [1], 1, 1000, SamplingParams(), 0, frozenset()), ended=False)
    assert stable.lengths.survival("", at, bounded=False) == pytest.approx(
        OutputLengths().survival("", at, bounded=False)
    )
    for n in ended:
        stable.lengths.observe("", n, ended=True)
    assert stable.lengths.survival("", at, bounded=False) == pytest.approx(
        observed(ended).survival("", at, bounded=False)
    )


def test_outputs_that_all_meet_their_bound_stay_unbounded():
    known = observed([200] * 1000, bound=200)
    assert known.survival("", np.array([199.0]), bounded=True) > 0.95


# -- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mini_batches", [1, 3])
@pytest.mark.parametrize("n_pages", [12, 1000])
async def test_tokens_are_the_same_under_the_stable_schedule(mini_batches, n_pages):
    rng = random.Random(mini_batches)
    link = ToyLink(n_pages=n_pages)
    prompts = [[rng.randrange(900) for _ in range(rng.randint(1, 300))] for _ in range(60)]

    async def client(engine, prompt):
        n = rng.randint(1, 90)
        stream = submit(engine, prompt, SamplingParams(temperature=0.0, max_tokens=n))
        if rng.random() < 0.1:
            await asyncio.sleep(0.01)
            stream.cancel()
            tokens = await tokens_of(stream)
            assert tokens == continuation(prompt, n)[: len(tokens)]
        else:
            assert await tokens_of(stream) == continuation(prompt, n)

    options = {"mini_batches": mini_batches, "max_batch_tokens": 64, "max_batch_size": 4, "schedule": "stable"}
    async with running(link, **options) as (engine, _):
        assert isinstance(engine.scheduler.admission, Stable)
        await asyncio.gather(*(client(engine, prompt) for prompt in prompts))


def test_greedy_lets_everybody_start():
    assert Greedy().may_start(None, [], [], None)
