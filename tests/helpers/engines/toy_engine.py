"""An engine over the toy model (toy.py)."""

from __future__ import annotations

import asyncio
import contextlib
import random

from engines.make_engine import make_engine
from engines.token_stream import submit, tokens_of
from engines.toy import ToySPart, continuation, until
from fastdecode.engine.state.request import SamplingParams

ASK = SamplingParams(temperature=0.0, max_tokens=10)


@contextlib.asynccontextmanager
async def running(*links, max_positions=4096, eos=frozenset(), state_slots=None, **options):
    """A started engine over `links`; at its end every page must have come back."""
    spart = ToySPart(links, max_positions=max_positions, eos=eos, state_slots=state_slots)
    engine = make_engine(spart, links, **options)
    await engine.start()
    try:
        yield engine, spart
        spart.gate.set()
        if engine.ready:
            await until(lambda: not engine._live)
        await until(lambda: all(node.free_pages == node.n_pages for node in engine.cluster.alive))
        assert not spart.staged
        for node in engine.cluster.alive:
            assert not node.link.cache
    finally:
        spart.gate.set()
        await engine.stop()


@contextlib.asynccontextmanager
async def started(*links, state_slots=None, **options):
    """A started engine, whose R-nodes may change; at its end the live ones must be empty."""
    spart = ToySPart(links, state_slots=state_slots)
    engine = make_engine(spart, links, **({"max_batch_tokens": 64, "max_batch_size": 16} | options))
    await engine.start()
    try:
        yield engine
        await until(lambda: not engine._live)
        for node in engine.cluster.alive:
            await until(lambda node=node: node.pages_used == 0)
        assert engine.cluster.states.free == engine.cluster.states.total
    finally:
        await engine.stop()


@contextlib.asynccontextmanager
async def keeping(*links, state_slots=None, **options):
    """A started engine that keeps prefixes; at its end all pages are free or kept, and R-nodes have nothing else."""
    spart = ToySPart(links, max_positions=16384, state_slots=state_slots)
    engine = make_engine(spart, links, prefix_cache=True, **{"max_batch_tokens": 512, "max_batch_size": 64} | options)
    await engine.start()
    try:
        yield engine, spart
        spart.gate.set()
        await until(lambda: not engine._live)
        await until(lambda: not (engine.scheduler.waiting or engine.scheduler.running))  # those cancelled in flight
        await until(lambda: all(not node.pages_freeing for node in engine.cluster.alive))
        assert not spart.staged
        for node in engine.cluster.alive:
            assert node.free_pages + node.pages_evictable == node.n_pages
            assert len({page for held in node.link.held.values() for page in held}) == node.pages_evictable
            assert node.pages_used == 0
            assert len(node.link.cache) == len(node.prefixes)
            assert not any(entry.pins for entry in node.prefixes)
        assert engine.cluster.states.free == engine.cluster.states.total and not engine.cluster.states.expected
    finally:
        spart.gate.set()
        await engine.stop()


async def ask(engine, prompt, params=ASK):
    """Its tokens are right; returns how many of the prompt's were taken over."""
    events = [event async for event in submit(engine, prompt, params)]
    assert [event.token for event in events] == continuation(prompt, params.max_tokens)
    return events[-1].reused


async def generate(engine, n, tokens, seed=0, longest=150):
    """Run `n` requests of random prompts at once; every answer must be right."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 900) for _ in range(rng.randint(1, longest))] for _ in range(n)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    answers = await asyncio.gather(*(tokens_of(submit(engine, p, params)) for p in prompts))
    assert answers == [continuation(p, tokens) for p in prompts]
