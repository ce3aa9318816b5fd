"""Prompts that another S-node computes, over a toy model whose output shows every mistake in the cache."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from engines.make_engine import make_engine
from engines.token_stream import submit, tokens_of
from engines.toy import ToyLink, ToySPart, continuation, until
from engines.toy_engine import started

from fastdecode.engine.migration.prefill_worker import PrefillWorker
from fastdecode.engine.state.request import EngineError, InvalidPrompt, SamplingParams
from fastdecode.transports.base import LinkDown
from fastdecode.transports.server import MAX_PUSHES

pytestmark = pytest.mark.quick

OPTIONS = {"max_batch_tokens": 64, "max_batch_size": 16, "prefix_cache": True}


class Direct:
    """Prefill S-nodes without a wire between."""

    def __init__(self, worker):
        self.worker, self.orders = worker, []

    def ready(self):
        return True

    async def prefill(self, order):
        self.orders.append(order)
        try:
            await self.worker.prefill(order)
        except EngineError as error:
            raise LinkDown(str(error)) from None


@contextlib.asynccontextmanager
async def split(**options):
    """An engine that decodes on `taking`, one that prefills on `giving`; at the end nothing of a sequence is left."""
    giving, taking = ToyLink("tcp://giving"), ToyLink("tcp://taking")
    async with started(giving, **OPTIONS) as prefill:
        nodes = Direct(PrefillWorker(prefill))
        async with started(taking, **(OPTIONS | options), prefill_nodes=nodes) as decode:
            yield prefill, decode, nodes


def prompt(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, 900) for _ in range(n)]


def ask(engine, tokens, n=40, **params):
    return asyncio.create_task(tokens_of(submit(engine, tokens, SamplingParams(max_tokens=n, **params))))


async def test_long_prompts_are_computed_elsewhere_and_no_token_changes():
    lengths = [10, 256, 257, 258, 384, 385, 386, 1000, 2000]
    async with split() as (prefill, decode, nodes):
        work = [ask(decode, prompt(n, n), temperature=0.0) for n in lengths]
        assert await asyncio.gather(*work) == [continuation(prompt(n, n), 40) for n in lengths]
        assert decode.stats.totals.remote_prefills == nodes.worker.prefilled == sum(n > 256 for n in lengths)
        assert decode.stats.totals.recomputed == prefill.stats.totals.recomputed == 0
        [link] = prefill.spart.links
        assert any(length == 0 for _, length in link.pushes), "whole pages go while the rest is computed"


async def test_sampled_tokens_are_those_of_one_s_node():
    long = prompt(700)
    async with started(ToyLink(), **OPTIONS) as alone:
        expected = await ask(alone, long, seed=7)
    async with split() as (_, decode, _):
        assert await ask(decode, long, seed=7) == expected


async def test_two_s_nodes_that_prefill_for_each_other_do_not_pass_a_prompt_on():
    first, second = Direct(None), Direct(None)
    async with (
        started(ToyLink("tcp://first"), **OPTIONS, prefill_nodes=first) as one,
        started(ToyLink("tcp://second"), **OPTIONS, prefill_nodes=second) as other,
    ):
        first.worker, second.worker = PrefillWorker(other), PrefillWorker(one)
        work = [ask(engine, prompt(600, i), temperature=0.0) for i, engine in enumerate((one, other))]
        assert await asyncio.gather(*work) == [continuation(prompt(600, i), 40) for i in (0, 1)]
        assert len(first.orders) == len(second.orders) == 1


async def test_a_shared_beginning_is_computed_once():
    long = prompt(1000)
    async with split() as (prefill, decode, nodes):
        assert await ask(decode, long, 5, temperature=0.0) == continuation(long, 5)
        longer = [*long, *continuation(long, 5), 17]
        assert await ask(decode, longer, 5, temperature=0.0) == continuation(longer, 5)
        assert len(nodes.orders) == 1, "this S-node's prefix cache has the beginning"
        other = [*long[:900], *prompt(200, 5)]
        decode.cluster.nodes[0].drain()  # evicts what the prefix cache has
        decode.r_nodes.end_drain(0)
        assert await ask(decode, other, 5, temperature=0.0) == continuation(other, 5)
        assert len(nodes.orders) == 2 and prefill.spart.links[0].forks == 1


async def test_no_more_prompts_are_pushed_at_once_than_an_r_node_takes():
    async with split(max_batch_size=64) as (prefill, decode, nodes):
        [link] = prefill.spart.links
        link.pushing.clear()
        link.finishing.clear()
        work = [ask(decode, prompt(300, i), 3, temperature=0.0) for i in range(30)]
        await until(lambda: len(link.pushes) >= 8)
        await asyncio.sleep(0.1)
        assert len(link.pushes) <= MAX_PUSHES
        link.pushing.set()
        link.finishing.set()
        assert await asyncio.gather(*work) == [continuation(prompt(300, i), 3) for i in range(30)]
        assert nodes.worker.prefilled == 30


@pytest.mark.parametrize("fault", ["push", "giving", "taking", "shut"])
async def test_a_prompt_that_does_not_arrive_is_computed_here(fault):
    long = prompt(900)
    async with split() as (prefill, decode, nodes):
        spare = ToyLink("tcp://spare")
        decode.add_link(spare)
        [link], [target, _] = prefill.spart.links, decode.spart.links
        link.refuse_pushes = fault == "push"
        if fault == "shut":
            prefill._stopping = True
        link.pushing.clear()
        work = [ask(decode, long, temperature=0.0) for _ in range(2)]
        await until(lambda: nodes.orders)
        if fault != "shut":
            await link.pushed.wait()
        if fault in ("giving", "taking"):
            {"giving": link, "taking": target}[fault].kill()
        link.pushing.set()
        assert await asyncio.gather(*work) == [continuation(long, 40)] * 2


async def test_a_client_that_goes_away_withdraws_its_prompt_there():
    async with split() as (prefill, decode, _):
        [link] = prefill.spart.links
        link.pushing.clear()
        stream = submit(decode, prompt(900), SamplingParams(max_tokens=40, temperature=0.0))
        await link.pushed.wait()
        stream.cancel()
        await until(lambda: not prefill._live and not len(decode.scheduler.running))
        link.pushing.set()
        await until(lambda: not decode.spart.links[0].cache)


async def test_a_full_lease_waits_and_then_goes_on():
    """Each sequence takes half of the lease of either S-node."""
    giving, taking = ToyLink("tcp://giving", n_pages=12), ToyLink("tcp://taking", n_pages=12)
    async with started(giving, **OPTIONS) as prefill:
        nodes = Direct(PrefillWorker(prefill))
        async with started(taking, **OPTIONS, prefill_nodes=nodes) as decode:
            work = [ask(decode, prompt(600, i), temperature=0.0) for i in range(5)]
            assert await asyncio.gather(*work) == [continuation(prompt(600, i), 40) for i in range(5)]


async def test_a_sequence_goes_on_from_the_tokens_that_another_s_node_has_generated():
    beginning, whole = prompt(200), continuation(prompt(200), 30)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    async with started(ToyLink(), **OPTIONS) as engine:
        for n in (1, 29):
            tokens: list[int] = []
            ended = asyncio.Event()

            def output(event, tokens=tokens, ended=ended):
                tokens.append(event.token)
                if event.finish_reason:
                    ended.set()

            engine.submit_choices(beginning, params, {f"from {n}": output}, [whole[:n]])
            await ended.wait()
            assert tokens == whole[n:]
        for wrong in (whole, [-1], [10**6]):
            with pytest.raises(InvalidPrompt, match="continued"):
                engine.submit_choices(beginning, params, {"wrong": lambda event: None}, [wrong])


def test_an_engine_without_prefill_nodes_hands_nothing_over():
    async def run():
        engine = make_engine(ToySPart([ToyLink()]), [ToyLink()])
        assert engine.scheduler.wants_remote_prefill is None

    asyncio.run(run())
