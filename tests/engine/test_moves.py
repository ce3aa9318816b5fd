"""Running sequences that move to another R-node, over a toy model whose output shows every mistake in the cache."""

from __future__ import annotations

import asyncio
import random

import pytest
from toy import ToyLink, continuation, tokens_of, until
from toy_engine import generate, started

from fastdecode.engine import moves
from fastdecode.engine.request import SamplingParams

pytestmark = pytest.mark.quick


def pair(**options):
    return ToyLink("tcp://first", **options), ToyLink("tcp://second", **options)


async def loaded(engine, second, n=40, tokens=250, seed=0):
    """Requests that run on both R-nodes."""
    work = asyncio.create_task(generate(engine, n, tokens, seed))
    await until(lambda: len(second.cache) > 4 and all(len(t) > 140 for _, t in second.cache.values()))
    return work


@pytest.mark.parametrize("options", [{}, {"prefix_cache": True}, {"guesses": 3, "mini_batches": 1}], ids=str)
async def test_a_drain_moves_every_running_sequence_and_recomputes_none(options):
    first, second = pair()
    async with started(first, second, **options) as engine:
        work = await loaded(engine, second)
        running = engine.stats.nodes[1].sequences
        await engine.r_nodes.drain(1)
        totals = engine.stats.totals
        assert not work.done() and totals.moved >= running / 2 > 1
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
        seq = next(s for s in engine.r_nodes.moves._moving if not s.held and s.cached > 128)
        before = len(seq.tokens)
        await until(lambda: len(seq.tokens) > before + 3)
        second.pushing.set()
        await asyncio.gather(draining, work)
        assert engine.stats.totals.recomputed == 0


async def test_a_prefix_that_has_moved_is_found_at_its_new_place():
    first, second = pair()
    rng = random.Random(5)
    prompt = [rng.randrange(3, 900) for _ in range(300)]
    async with started(first, second, prefix_cache=True) as engine:
        run = asyncio.create_task(tokens_of(engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=300))))
        await until(lambda: any(len(tokens) > 310 for link in (first, second) for _, tokens in link.cache.values()))
        source = 0 if first.cache else 1
        await engine.r_nodes.drain(source)
        again = await tokens_of(engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=20)))
        assert again == continuation(prompt, 20) and (second, first)[source].forks == 1
        assert await run == continuation(prompt, 300)


async def test_a_sequence_that_fits_nowhere_goes_on_where_it_is(monkeypatch):
    monkeypatch.setattr(moves, "_FAILED_SECONDS", 0.05)
    small, large = ToyLink("tcp://small", n_pages=3), ToyLink("tcp://large")
    async with started(small, large) as engine:
        work = asyncio.create_task(generate(engine, 20, 200))
        await until(lambda: len(large.cache) > 4)
        await engine.r_nodes.drain(1)
        await work
        assert engine.stats.totals.recomputed == 0


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("held", [False, True], ids=["pages", "rest"])
async def test_an_r_node_that_dies_in_the_middle_costs_no_tokens(victim, held):
    first, second = pair()
    third = ToyLink("tcp://third")
    async with started(first, second, third) as engine:
        work = await loaded(engine, second, n=60)
        gate = second.finishing if held else second.pushing
        gate.clear()
        draining = asyncio.create_task(engine.r_nodes.drain(1))
        if held:
            await until(lambda: any(s.held and s.in_flight for s in engine.r_nodes.moves._moving))
        else:
            await until(lambda: any(length == 0 for _, length in second.pushes))
        (second if victim == "source" else first).kill()
        gate.set()
        await draining
        await work


async def test_a_refused_move_leaves_the_sequence_in_place_and_is_tried_again(monkeypatch):
    monkeypatch.setattr(moves, "_FAILED_SECONDS", 0.05)
    first, second = pair()
    async with started(first, second) as engine:
        work = await loaded(engine, second)
        second.refuse_pushes = True
        draining = asyncio.create_task(engine.r_nodes.drain(1))
        await until(lambda: len(second.pushes) > 1)
        assert engine.stats.totals.moved == 0
        second.refuse_pushes = False
        await asyncio.gather(draining, work)
        assert engine.stats.totals.recomputed == 0


async def test_clients_that_go_away_during_a_move_leave_nothing():
    first, second = pair()
    async with started(first, second) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=400)
        streams = [engine.submit([5, 7, i + 3] * 50, params) for i in range(12)]
        runs = [asyncio.create_task(tokens_of(stream)) for stream in streams]
        await until(lambda: len(second.cache) > 3)
        second.finishing.clear()
        draining = asyncio.create_task(engine.r_nodes.drain(1))
        await until(lambda: any(s.held and s.in_flight for s in engine.r_nodes.moves._moving))
        for seq in list(engine.r_nodes.moves._moving):
            engine.cancel(seq)
        second.finishing.set()
        await draining
        for run in runs:
            run.cancel()
        for seq in list(engine._live):
            engine.cancel(seq)
        await until(lambda: not first.cache and not second.cache)
