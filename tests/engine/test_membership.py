"""R-nodes that join and leave a running engine, over a toy model whose output shows every mistake in what is cached."""

from __future__ import annotations

import asyncio

import pytest
from engines.token_stream import submit, tokens_of
from engines.toy import ToyLink, until
from engines.toy_engine import generate, started

from fastdecode.engine.state.request import GenerationFailed, SamplingParams

pytestmark = pytest.mark.quick


async def test_an_r_node_that_joins_under_load_gets_load():
    first, second = ToyLink("tcp://first"), ToyLink("tcp://second")
    async with started(first, prefix_cache=True) as engine:
        work = asyncio.create_task(generate(engine, 60, 60))
        await until(lambda: len(engine.scheduler.running) > 4)
        assert engine.add_link(second) == 1
        await until(lambda: second.cache)
        await work
        assert [node.url for node in engine.stats.nodes] == ["tcp://first", "tcp://second"]


async def test_a_drained_r_node_is_emptied_and_its_position_goes_to_the_next():
    first, second, third = (ToyLink(f"tcp://{name}") for name in ("first", "second", "third"))
    async with started(first, second, prefix_cache=True) as engine:
        work = asyncio.create_task(generate(engine, 60, 60))
        await until(lambda: second.cache)
        draining = asyncio.create_task(engine.r_nodes.drain(1))
        await until(lambda: engine.stats.nodes[1].draining)
        before = engine.stats.nodes[1].sequences
        await draining
        node = engine.cluster.nodes[1]
        assert before and node.n_sequences == 0 and not node.prefixes
        await engine.r_nodes.retire(1)
        assert [node.url for node in engine.stats.nodes] == ["tcp://first"]
        assert engine.add_link(third) == 1
        await work
        assert not second.dead
        await generate(engine, 30, 30, seed=2)
        assert third.frames and engine.totals.preemptions == 0


async def test_an_r_node_that_is_lost_while_it_drains_costs_no_tokens():
    first, second = ToyLink("tcp://first"), ToyLink("tcp://second")
    async with started(first, second) as engine:
        work = asyncio.create_task(generate(engine, 40, 60))
        await until(lambda: second.cache)
        draining = asyncio.create_task(engine.r_nodes.drain(1))
        await until(lambda: engine.stats.nodes[1].draining)
        second.kill()
        await draining
        await engine.r_nodes.retire(1)
        await work


async def test_without_another_r_node_requests_wait_for_one():
    first, second = ToyLink("tcp://first"), ToyLink("tcp://second")
    async with started(first) as engine:
        work = asyncio.create_task(generate(engine, 20, 60))
        await until(lambda: first.cache)
        draining = asyncio.create_task(engine.r_nodes.drain(0))
        await until(lambda: engine.stats.nodes[0].draining)
        late = asyncio.create_task(generate(engine, 3, 10, seed=1))
        await draining
        assert not late.done()
        engine.add_link(second)
        await engine.r_nodes.retire(0)
        await asyncio.gather(work, late)
        assert not first.dead and second.frames


async def test_a_drain_that_is_called_off_leaves_the_r_node_in_use():
    first, second = ToyLink("tcp://first"), ToyLink("tcp://second")
    async with started(first, second) as engine:
        work = asyncio.create_task(generate(engine, 40, 60))
        await until(lambda: second.cache)
        draining = asyncio.create_task(engine.r_nodes.drain(1))
        await until(lambda: engine.stats.nodes[1].draining)
        draining.cancel()
        engine.r_nodes.end_drain(1)
        await work
        await generate(engine, 10, 10, seed=3)
        assert engine.stats.nodes[1].alive and not engine.stats.nodes[1].draining


async def test_requests_that_wait_for_an_r_node_fail_in_time_though_the_timer_is_early(monkeypatch):
    sleep = asyncio.sleep
    link = ToyLink("tcp://first")
    async with started(link, patience=0.1) as engine:
        work = asyncio.create_task(tokens_of(submit(engine, [3, 4, 5], SamplingParams(max_tokens=500))))
        await until(lambda: link.cache)
        monkeypatch.setattr(asyncio, "sleep", lambda seconds, result=None: sleep(0.9 * seconds, result))
        link.kill()
        async with asyncio.timeout(60):
            with pytest.raises(GenerationFailed, match="lost"):
                await work
