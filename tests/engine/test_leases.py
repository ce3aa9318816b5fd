"""Leases that grow on demand, over a toy model whose output shows every mistake in what is cached (toy.py)."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from engines.make_engine import make_engine
from engines.token_stream import submit, tokens_of
from engines.toy import ToyLink, ToySPart, continuation, until
from engines.toy_engine import generate

from fastdecode.engine import rnode_control
from fastdecode.engine.state.request import PromptTooLong, SamplingParams

pytestmark = pytest.mark.quick


@contextlib.asynccontextmanager
async def growing(*links, **options):
    """A started engine whose leases grow; at its end its account must agree with every R-node's."""
    spart = ToySPart(links)
    engine = make_engine(spart, links, grow_leases=True, **({"max_batch_tokens": 64, "max_batch_size": 16} | options))
    await engine.start()
    try:
        yield engine
        await until(lambda: not engine._live)
        for node in engine.cluster.alive:
            await until(lambda node=node: node.pages_used == 0 and not node.resizing)
            assert node.n_pages == node.link.pages
    finally:
        await engine.stop()


async def test_a_lease_grows_ahead_of_need_so_nothing_is_preempted():
    link = ToyLink(n_pages=8, max_pages=400)
    async with growing(link) as engine:
        await generate(engine, 40, 150)
        assert engine.stats.totals.preemptions == 0
        assert 30 < link.pages < 400 and link.resizes == sorted(link.resizes)
        assert engine.stats.nodes[0].pages_total == link.pages
        assert engine.stats.nodes[0].pages_max == 400


async def test_a_lease_of_a_given_size_is_never_changed():
    link = ToyLink(n_pages=8, max_pages=400)
    spart = ToySPart([link])
    engine = make_engine(spart, [link], max_batch_tokens=64, max_batch_size=16)
    await engine.start()
    try:
        await generate(engine, 12, 150)
        assert not link.resizes and engine.stats.nodes[0].pages_max == 8 and engine.stats.totals.preemptions > 0
    finally:
        await engine.stop()


async def test_a_refused_growth_costs_time_not_tokens(monkeypatch):
    monkeypatch.setattr(rnode_control, "_REFUSED_SECONDS", 0.05)
    link = ToyLink(n_pages=9, max_pages=400)
    link.pool = 0
    async with growing(link) as engine:
        begun = time.monotonic()
        await generate(engine, 12, 150)
        assert engine.stats.totals.preemptions > 0
        assert 0 < len(link.resizes) <= 1 + (time.monotonic() - begun) / 0.05
        assert engine.stats.nodes[0].pages_max == 9


async def test_what_an_r_node_refuses_goes_to_another_one():
    full, roomy = ToyLink("tcp://full", n_pages=3, max_pages=400), ToyLink("tcp://roomy", n_pages=3, max_pages=400)
    full.pool = 0
    async with growing(full, roomy) as engine:
        await generate(engine, 30, 60)
        assert engine.stats.totals.preemptions == 0
    assert full.pages == 3 and roomy.pages > 20


async def test_a_prompt_that_needs_a_larger_lease_waits_until_there_is_one(monkeypatch):
    monkeypatch.setattr(rnode_control, "_REFUSED_SECONDS", 0.02)
    link = ToyLink(n_pages=2, max_pages=10)
    link.pool = 0
    prompt, params = [7] * 1000, SamplingParams(temperature=0.0, max_tokens=30)
    async with growing(link) as engine:
        with pytest.raises(PromptTooLong, match="at most 1280"):
            submit(engine, [7] * 1281, params)
        waiting = asyncio.create_task(tokens_of(submit(engine, prompt, params)))
        await until(lambda: len(link.resizes) > 2)
        assert not waiting.done()
        link.pool = 8  # another S-node has gone
        assert await waiting == continuation(prompt, 30)


async def test_one_sequence_alone_waits_for_its_next_page_in_place(monkeypatch):
    """Preempting it would need the same page again, and the prompt anew."""
    monkeypatch.setattr(rnode_control, "_REFUSED_SECONDS", 0.02)
    link = ToyLink(n_pages=2, max_pages=10)
    link.pool = 0
    async with growing(link) as engine:
        waiting = asyncio.create_task(
            tokens_of(submit(engine, [7] * 200, SamplingParams(temperature=0.0, max_tokens=99)))
        )
        await until(lambda: link.cache and len(link.cache[0][1]) == 256)
        asked = len(link.resizes)
        await until(lambda: len(link.resizes) > asked + 5)
        assert len(link.cache[0][1]) == 256 and engine.stats.totals.preemptions == 0
        link.pool = 1
        assert await waiting == continuation([7] * 200, 99)


async def test_the_last_page_is_waited_for_while_a_resize_is_under_way():
    """A RESIZE that takes long preempts nothing; the others of the mini-batch go on."""
    link = ToyLink(n_pages=4, max_pages=100)
    link.resizing.clear()
    async with growing(link) as engine:
        work = asyncio.create_task(generate(engine, 4, 200, longest=60))
        await until(lambda: engine.scheduler.running.starved)
        assert engine.stats.totals.preemptions == 0 and not work.done()
        link.resizing.set()
        await work
        assert engine.stats.totals.preemptions == 0


async def test_an_r_node_lost_during_a_resize_costs_no_tokens():
    first, second = ToyLink("tcp://r0", n_pages=3, max_pages=99), ToyLink("tcp://r1", n_pages=3, max_pages=99)
    first.resizing.clear()
    async with growing(first, second) as engine:
        work = asyncio.create_task(generate(engine, 10, 150))
        await until(lambda: first.resizes)
        first.kill()
        first.resizing.set()
        await work


async def test_prefixes_alone_take_no_more_than_half_of_what_could_be_had():
    """Ended sequences are kept while there is plenty, and make room before the lease takes more."""
    link = ToyLink(n_pages=4, max_pages=64)
    async with growing(link, prefix_cache=True) as engine:
        for seed in range(30):
            await generate(engine, 1, 3, seed, longest=800)
        assert 16 < link.pages <= 32
        link.pool = 0
        node = engine.cluster.nodes[0]
        await engine.r_nodes.refresh()
        assert node.obtainable == node.n_pages == link.pages
        asked = len(link.resizes)
        for seed in range(40, 50):
            await generate(engine, 1, 3, seed, longest=400)
        assert len(link.resizes) == asked and link.pages <= 32
