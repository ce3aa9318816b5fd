"""Running sequences that move to another R-node, over a toy model whose output shows every mistake in the cache."""

from __future__ import annotations

import asyncio
import random

import pytest
from engines.token_stream import submit, tokens_of
from engines.toy import ToyLink, continuation, until
from engines.toy_engine import generate, started

from fastdecode.engine.migration import migrator
from fastdecode.engine.migration.rebalance import choose_migrations
from fastdecode.engine.state.request import SamplingParams
from fastdecode.spart.shape import LayerReads

pytestmark = pytest.mark.quick


def pair(**options):
    return ToyLink("tcp://first", **options), ToyLink("tcp://second", **options)


async def loaded(engine, second, n=40, tokens=250, seed=0):
    """Requests that run on both R-nodes."""
    work = asyncio.create_task(generate(engine, n, tokens, seed))
    await until(lambda: len(second.cache) > 4 and all(len(t) > 140 for _, t in second.cache.values()))
    return work


@pytest.mark.parametrize(
    "options", [{}, {"prefix_cache": True}, {"guesses": 3, "mini_batches": 1}, {"state_slots": 40}], ids=str
)
async def test_a_drain_moves_every_running_sequence_and_recomputes_none(options):
    first, second = pair()
    async with started(first, second, **options) as engine:
        work = await loaded(engine, second)
        running = engine.stats.nodes[1].sequences
        await engine.r_nodes.drain(1)
        totals = engine.stats.totals
        assert not work.done() and totals.migrated >= running / 2 > 1
        assert engine.stats.nodes[1].sequences == 0
        await until(lambda: not second.cache)
        await engine.r_nodes.retire(1)
        await work
        assert totals.recomputed == totals.preemptions == 0
        assert any(length == 0 for _, length in second.pushes), "whole pages go first"


async def test_pages_are_copied_while_the_sequence_goes_on():
    first, second = pair()
    async with started(first, second) as engine:
        work = await loaded(engine, second)
        second.pushing.clear()
        draining = asyncio.create_task(engine.r_nodes.drain(1))
        await second.pushed.wait()
        seq = next(s for s in engine.r_nodes.migrator._migrating if not s.frozen and s.cached > 128)
        before = len(seq.tokens)
        await until(lambda: len(seq.tokens) > before + 3)
        second.pushing.set()
        await asyncio.gather(draining, work)
        assert engine.stats.totals.recomputed == 0


async def copying(engine, second):
    """A drain of `second`, and the sequence that it moves first, five tokens after the copy of the rest has begun."""
    second.finishing.clear()
    draining = asyncio.create_task(engine.r_nodes.drain(1))
    await until(lambda: any(length for _, length in second.pushes))
    [seq] = engine.r_nodes.migrator._migrating
    goal = len(seq.tokens) + 5
    await until(lambda: len(seq.tokens) >= goal)
    return draining, seq


class Frozen:
    """Stands for a sequence that has been copied."""

    frozen, mini_batch = True, 1


async def test_a_step_waits_for_a_sequence_that_is_about_to_change_its_place():
    first, second = pair()
    async with started(first, second, mini_batches=2) as engine:
        work = await loaded(engine, second)
        mover = engine.r_nodes.migrator
        await work
        seq = Frozen()
        mover._migrating.add(seq)
        engine.scheduler.step_times.base = 1000.0  # seconds, of which a step waits a quarter
        waits = asyncio.create_task(mover.settle(1))
        async with asyncio.timeout(60):
            await mover.settle(0)  # the sequence is in the other mini-batch
            engine.scheduler.step_times.base = 0.01
            await mover.settle(1)  # it has not changed its place in a quarter of a step
            assert not waits.done()
            seq.frozen = False
            mover.notice()
            await waits
        mover._migrating.clear()


async def test_the_rest_is_copied_while_the_sequence_goes_on_and_no_step_misses_it():
    first, second = pair()
    async with started(first, second, mini_batches=2) as engine:
        work = await loaded(engine, second, tokens=350)
        draining, seq = await copying(engine, second)
        assert seq.mini_batch is not None and seq.node is engine.cluster.nodes[1]
        second.finishing.set()
        await asyncio.gather(draining, work)
        assert engine.stats.totals.migrated > 1 and engine.stats.totals.recomputed == 0


async def test_a_step_computes_only_the_tokens_that_it_has_rows_for():
    """A step of as many rows as sequences leaves none for the tokens that a moved sequence has missed."""
    first, second = pair()
    async with started(first, second, mini_batches=1, max_batch_tokens=16) as engine:
        work = await loaded(engine, second)
        assert len(engine.scheduler.running) == 16
        draining, _ = await copying(engine, second)
        second.finishing.set()
        await asyncio.gather(draining, work)
        assert engine.stats.totals.recomputed == 0


async def test_a_prefix_that_has_moved_is_found_at_its_new_place():
    first, second = pair()
    rng = random.Random(5)
    prompt = [rng.randrange(3, 900) for _ in range(300)]
    async with started(first, second, prefix_cache=True) as engine:
        run = asyncio.create_task(tokens_of(submit(engine, prompt, SamplingParams(temperature=0.0, max_tokens=300))))
        await until(lambda: any(len(tokens) > 310 for link in (first, second) for _, tokens in link.cache.values()))
        source = 0 if first.cache else 1
        await engine.r_nodes.drain(source)
        again = await tokens_of(submit(engine, prompt, SamplingParams(temperature=0.0, max_tokens=20)))
        assert again == continuation(prompt, 20) and (second, first)[source].forks == 1
        assert await run == continuation(prompt, 300)


async def test_a_sequence_that_fits_nowhere_goes_on_where_it_is(monkeypatch):
    monkeypatch.setattr(migrator, "_FAILED_SECONDS", 0.05)
    small, large = ToyLink("tcp://small", n_pages=3), ToyLink("tcp://large")
    async with started(small, large) as engine:
        work = asyncio.create_task(generate(engine, 20, 200))
        await until(lambda: len(large.cache) > 4)
        await engine.r_nodes.drain(1)
        await work
        assert engine.stats.totals.recomputed == 0


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("rest", [False, True], ids=["pages", "rest"])
async def test_an_r_node_that_dies_in_the_middle_costs_no_tokens(victim, rest):
    first, second = pair()
    third = ToyLink("tcp://third")
    async with started(first, second, third) as engine:
        work = await loaded(engine, second, n=60)
        gate = second.finishing if rest else second.pushing
        gate.clear()
        draining = asyncio.create_task(engine.r_nodes.drain(1))
        if rest:
            await until(lambda: any(length for _, length in second.pushes))
        else:
            await until(lambda: any(length == 0 for _, length in second.pushes))
        (second if victim == "source" else first).kill()
        gate.set()
        await draining
        await work


async def test_a_refused_move_leaves_the_sequence_in_place_and_is_tried_again(monkeypatch):
    monkeypatch.setattr(migrator, "_FAILED_SECONDS", 0.05)
    first, second = pair()
    async with started(first, second) as engine:
        work = await loaded(engine, second)
        second.refuse_pushes = True
        draining = asyncio.create_task(engine.r_nodes.drain(1))
        await until(lambda: len(second.pushes) > 1)
        assert engine.stats.totals.migrated == 0
        second.refuse_pushes = False
        await asyncio.gather(draining, work)
        assert engine.stats.totals.recomputed == 0


async def test_clients_that_go_away_during_a_move_leave_nothing():
    first, second = pair()
    async with started(first, second) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=400)
        streams = [submit(engine, [5, 7, i + 3] * 50, params) for i in range(12)]
        runs = [asyncio.create_task(tokens_of(stream)) for stream in streams]
        await until(lambda: len(second.cache) > 3)
        second.finishing.clear()
        draining = asyncio.create_task(engine.r_nodes.drain(1))
        await until(lambda: any(length for _, length in second.pushes))
        for seq in list(engine.r_nodes.migrator._migrating):
            engine.cancel(seq)
        second.finishing.set()
        await draining
        for run in runs:
            run.cancel()
        for seq in list(engine._live):
            engine.cancel(seq)
        await until(lambda: not first.cache and not second.cache)


async def beside_an_empty_r_node(engine, seconds_per_token):
    """Requests that began to run on one R-node before there was a second one."""
    engine.spart.s_seconds, engine.spart.seconds_per_token = 1e-3, seconds_per_token
    first = engine.cluster.nodes[0].link
    await engine.r_nodes.drain(1)
    work = asyncio.create_task(generate(engine, 16, 400))
    await until(lambda: len(first.cache) == 16 and all(len(t) > 160 for _, t in first.cache.values()))
    engine.r_nodes.end_drain(1)
    return work


async def test_running_sequences_move_to_an_r_node_that_joins(monkeypatch):
    monkeypatch.setattr(migrator, "_REBALANCE_SECONDS", 0.01)
    first, second = pair()
    async with started(first, second) as engine:
        work = await beside_an_empty_r_node(engine, seconds_per_token=1e-4)
        await until(lambda: len(second.cache) >= 6)
        await work
        totals = engine.stats.totals
        assert 6 <= totals.migrated <= 12 and totals.recomputed == totals.preemptions == 0


async def test_nothing_moves_where_the_s_part_covers_the_r_part(monkeypatch):
    monkeypatch.setattr(migrator, "_REBALANCE_SECONDS", 0.01)
    first, second = pair()
    async with started(first, second) as engine:
        work = await beside_an_empty_r_node(engine, seconds_per_token=1e-7)
        await work
        assert engine.stats.totals.migrated == 0


FULL = ((LayerReads(), 4),)  # four layers of full attention


def choose(placed, costs, *, groups=FULL, open_nodes=None, covered=0.0, excess=0.25):
    return choose_migrations(placed, groups, costs, open_nodes or range(len(costs)), covered, excess)


def test_a_move_evens_out_two_r_nodes_best():
    placed = [(0, 900), (0, 100), (0, 400), (0, 600), (1, 800)]  # 2000 and 800 tokens
    assert choose(placed, [1.0, 1.0])[0] == (3, 1)


def test_no_sequence_moves_where_even_loads_are_hardly_shorter():
    placed = [(0, 500), (0, 500), (1, 450), (1, 400)]
    assert choose(placed, [1.0, 1.0]) == []
    assert choose(placed, [1.0, 1.0], excess=0.05) == []  # a move would make it worse


def test_a_slow_r_node_has_less():
    placed = [(0, 300), (0, 300), (1, 300), (1, 300)]
    assert choose(placed, [1.0, 1.0]) == []
    assert choose(placed, [1.0, 4.0])[0] in ((2, 0), (3, 0))


def test_what_the_s_part_covers_does_not_move():
    placed = [(0, 500), (0, 500)]
    assert choose(placed, [1e-6, 1e-6])
    assert choose(placed, [1e-6, 1e-6], covered=5e-3) == []


def test_windows_bound_what_a_move_brings():
    placed = [(0, 10_000), (0, 200), (1, 300)]
    assert choose(placed, [1.0, 1.0])[0] == (1, 1)
    windows = ((LayerReads(128), 4),)
    assert choose(placed, [1.0, 1.0], groups=windows) == []  # 256 and 128 tokens: it would be 128 and 256
    assert choose([(0, 10_000), (1, 128)], [1.0, 1.0], groups=windows) == []


def test_an_r_node_that_is_drained_is_no_target():
    placed = [(0, 500), (0, 500), (1, 100)]
    assert choose(placed, [1.0] * 3, open_nodes=[0, 1])[0][1] == 1
    assert choose(placed, [1.0] * 3, open_nodes=[1, 2]) == []
