"""Streams that go on with the K and V that another S-node has left on an R-node, over a toy model whose output shows
every mistake in the cache."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from dataclasses import replace

import pytest
from engines.continued_stream import ContinuedStream, adopted
from engines.make_engine import make_engine
from engines.toy import KEYS, ToyLink, ToySPart, continuation, until
from engines.toy_engine import started

from fastdecode.engine.state.request import SamplingParams

pytestmark = pytest.mark.quick

DIGEST = "ab" * 32
OPTIONS = {"max_batch_tokens": 64, "max_batch_size": 16, "prefix_cache": True, "kv_digest": DIGEST}
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


@pytest.fixture(autouse=True)
def no_keys():
    KEYS.clear()


def prompt(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, 900) for _ in range(n)]


@contextlib.asynccontextmanager
async def mortal(*links, state_slots=None):
    """An engine that may be stopped at any time, whatever it leaves behind, and its S-Part."""
    spart = ToySPart(links, state_slots=state_slots)
    engine = make_engine(spart, links, **OPTIONS)
    await engine.start()
    try:
        yield engine, spart
    finally:
        spart.gate.set()
        await engine.stop()


@contextlib.asynccontextmanager
async def two_s_nodes(n_r_nodes=1, state_slots=None):
    """Two engines over the same R-nodes, of which the first one is mortal, and the S-Part of that one."""
    links = [[ToyLink(f"tcp://r{i}") for i in range(n_r_nodes)] for _ in range(2)]
    async with (
        started(*links[1], **OPTIONS, state_slots=state_slots) as second,
        mortal(*links[0], state_slots=state_slots) as (first, spart),
    ):
        yield first, second, spart


@pytest.mark.parametrize("n_r_nodes", [1, 3])
async def test_no_token_is_computed_again(n_r_nodes):
    async with two_s_nodes(n_r_nodes) as (first, second, _):
        streams = [ContinuedStream(first, prompt(n, n), GREEDY) for n in (1, 2, 127, 128, 129, 300)]
        for stream in streams:
            await stream.has(10)
        await first.stop()
        there = [await stream.goes_on(second, n) for n, stream in enumerate(streams, 1)]
        for stream, here in zip(there, streams, strict=True):
            assert await stream.end() == [continuation(here.ids, 60)]
        assert adopted(second) == (len(streams), 0)
        assert second.scheduler.recomputed_tokens == second.stats.totals.recomputed == 0


async def test_sampled_tokens_and_choices_go_on_as_they_would_have():
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=60)
    async with started(ToyLink(), **OPTIONS) as alone:
        expected = await ContinuedStream(alone, prompt(300), params, [()] * 3).end()
    async with two_s_nodes() as (first, second, _):
        stream = ContinuedStream(first, prompt(300), params, [()] * 3)
        await stream.has(20)
        assert await (await stream.goes_on(second, 13)).end() == expected
        assert adopted(second) == (3, 0)


async def test_a_stream_is_adopted_from_an_s_node_that_goes_on():
    """As in a drain: the first one computes the stream to its end meanwhile, for nobody."""
    async with two_s_nodes() as (first, second, _):
        stream = ContinuedStream(first, prompt(300), GREEDY)
        await stream.has(5)
        there = await stream.goes_on(second, 5)
        assert await there.end() == await stream.end() == [continuation(stream.ids, 60)]
        assert adopted(second) == (1, 0)


async def test_k_and_v_of_a_cancelled_stream_stay_as_long_as_asked():
    """As when its API process has died: it does not end before another S-node has found it."""
    async with two_s_nodes() as (first, second, _):
        stream, brief, other = (ContinuedStream(first, prompt(300, seed), GREEDY) for seed in range(3))
        for running in (stream, brief):
            await running.has(5)
        first.cancel(stream.sequences[0], 600)
        first.cancel(brief.sequences[0], 0.01)
        await other.end()
        assert len(stream.tokens[0]) < 60
        assert await (await stream.goes_on(second, 5)).end() == [continuation(stream.ids, 60)]
        assert adopted(second) == (1, 0)
        await until(lambda: len(KEYS) == 1)
        assert len(brief.tokens[0]) < 60


async def test_a_stream_is_adopted_again_and_again():
    async with two_s_nodes() as (first, second, _), started(ToyLink("tcp://r0"), **OPTIONS) as third:
        stream = ContinuedStream(first, prompt(300), GREEDY)
        for n, engine in ((5, second), (20, third), (35, second)):
            await stream.has(n + 5)
            stream = await stream.goes_on(engine, n)
        assert await stream.end() == [continuation(prompt(300), 60)]
        assert (adopted(second), adopted(third)) == ((2, 0), (1, 0))


@pytest.mark.parametrize("what", ["model", "adapter", "key", "choice"])
async def test_k_and_v_of_something_else_are_not_found(what):
    async with two_s_nodes() as (first, second, _):
        stream = ContinuedStream(first, prompt(300), GREEDY)
        await stream.has(5)
        if what == "model":
            second.r_nodes.adopter._digest = "cd" * 32
        if what == "key":
            stream.key = secrets.token_hex(32)
        params = replace(GREEDY, adapter="a") if what == "adapter" else GREEDY
        past = [None, stream.tokens[0]] if what == "choice" else stream.tokens
        assert set(await second.find_kv(stream.ids, params, past, stream.key)) == {None}
        there = await stream.goes_on(second, 5) if what != "adapter" else stream
        assert await there.end() == [continuation(stream.ids, 60)]


async def test_a_sequence_has_a_key_once_its_tokens_are_cached_and_until_it_ends():
    """While a step is under way that computes several of its tokens, layers may lack some of them: a step of its
    prompt, or one that computes the tokens a second time."""
    async with two_s_nodes(2) as (first, second, spart):

        def stop_behind_next_post(link):
            append = link.append

            def appended(chunk):
                spart.gate.clear()
                link.append = append
                append(chunk)

            link.append = appended

        for link in first.spart.links:
            stop_behind_next_post(link)
        stream = ContinuedStream(first, prompt(40), GREEDY)
        await until(lambda: stream.sequences[0].node and stream.sequences[0].placed_on.link.cache)
        await asyncio.sleep(0.05)
        assert not KEYS
        for link in first.spart.links:
            link.__dict__.pop("append", None)
        spart.gate.set()
        await stream.has(3)
        await until(lambda: KEYS)
        assert await second.find_kv(stream.ids, GREEDY, [stream.tokens[0][:3]], stream.key) != [None]
        node = stream.sequences[0].placed_on
        [other] = [link for link in first.spart.links if link is not node.link]
        stop_behind_next_post(other)
        node.link.kill()
        KEYS.clear()
        await until(lambda: other.cache)
        await asyncio.sleep(0.05)
        assert not KEYS
        spart.gate.set()
        await until(lambda: KEYS)
        assert await stream.end() == [continuation(stream.ids, 60)]
        await until(lambda: not KEYS)


async def test_choices_without_a_token_are_computed_and_ended_ones_are_not():
    async with two_s_nodes() as (first, second, _):
        stream = ContinuedStream(first, prompt(40), GREEDY, [()] * 3)
        await stream.has(5)
        past = [stream.tokens[0][:5], [], None]
        sources = await second.find_kv(stream.ids, GREEDY, past, stream.key)
        assert [source is None for source in sources] == [False, True, True]
        there = ContinuedStream(second, stream.ids, GREEDY, past, sources)
        assert await there.end() == [continuation(stream.ids, 60)] * 2 + [None]
        assert adopted(second) == (1, 0)


@pytest.mark.parametrize("fault", ["refused", "link", "freed", "silent"])
async def test_a_stream_whose_k_and_v_do_not_come_is_recomputed(fault):
    async with two_s_nodes(2) as (first, second, _):
        stream = ContinuedStream(first, prompt(300), GREEDY)
        await stream.has(5)
        links = second.spart.links
        for link in links:
            link.refuse_adoptions = fault == "refused"
            link.adopting.clear()
        if fault == "silent":

            async def never(*_):
                await asyncio.sleep(60)

            for link in links:
                link.find = never
        there = await stream.goes_on(second, 5)
        if fault == "freed":
            KEYS.clear()
        elif fault == "link":
            await until(lambda: there.sequences[0].node is not None)
            there.sequences[0].placed_on.link.kill()
        for link in links:
            link.adopting.set()
        assert await there.end() == [continuation(stream.ids, 60)]
        assert adopted(second) == (0, 1)


async def test_a_stream_waits_for_room_beside_its_k_and_v_only_if_there_will_be_some():
    """A lease that grows makes room; one that is full of running sequences does not."""
    source, spare = ToyLink("tcp://r0"), ToyLink("tcp://r1")
    async with mortal(source) as (first, _):
        for growing in (True, False):
            stream = ContinuedStream(first, prompt(500, growing), GREEDY)
            await stream.has(5)
            full = ToyLink("tcp://r0", n_pages=5, max_pages=50 if growing else 0)
            options = OPTIONS | {"watermark": 0.0, "grow_leases": True}
            async with started(full, spare, **options) as second:
                busy = ContinuedStream(second, prompt(250, 9), replace(GREEDY, max_tokens=300))
                await busy.has(1)
                there = await stream.goes_on(second, 5)
                assert await there.end() == [continuation(stream.ids, 60)]
                assert adopted(second) == ((1, 0) if growing else (0, 1))
                await busy.end()
            await stream.end()


async def test_a_client_that_goes_away_while_k_and_v_come_costs_nothing():
    async with two_s_nodes() as (first, second, _):
        stream = ContinuedStream(first, prompt(300), GREEDY)
        await stream.has(5)
        [link] = second.spart.links
        link.adopting.clear()
        there = await stream.goes_on(second, 5)
        await until(lambda: there.sequences[0].node is not None)
        second.cancel(there.sequences[0])
        link.adopting.set()
        await until(lambda: not link.cache)


async def test_a_model_with_states_adopts_nothing():
    async with two_s_nodes(state_slots=32) as (first, second, _):
        stream = ContinuedStream(first, prompt(300), GREEDY)
        await stream.has(5)
        there = await stream.goes_on(second, 5)
        assert await there.end() == [continuation(stream.ids, 60)]
        assert not KEYS and adopted(second) == (0, 0)
