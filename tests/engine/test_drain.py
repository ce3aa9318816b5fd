"""Streams whose K and V move between R-nodes in processes of their own. transformers judges every token."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal

import pytest
import torch
from engines.make_engine import make_engine
from engines.token_stream import greedy, submit, tokens_of
from engines.toy import until
from models.checkpoints import VOCAB_SIZE, make_checkpoint, reference
from models.greedy import is_greedy
from nodes.rnode_process import RNodeProcess, r_node_processes

from fastdecode.spart import SPart, load_model
from fastdecode.transports.registry import connect

ROWS, STREAMS, TOKENS = 256, 64, 300


@contextlib.asynccontextmanager
async def serving(checkpoint, *urls, **options):
    """A started engine over R-node processes, and these."""
    torch.set_num_threads(1)
    model = load_model(checkpoint, device="cpu", dtype=torch.float32)
    with r_node_processes(*urls) as nodes:
        hello = model.hello(2, ROWS, "fp32", 100 << 20, 2 * STREAMS)
        links = [await connect(node.url, hello, None) for node in nodes]
        spart = SPart(model, links, state_slots=STREAMS)
        engine = make_engine(spart, links, max_batch_tokens=ROWS, max_batch_size=STREAMS, **options)
        await engine.start()
        try:
            yield engine, nodes
        finally:
            await engine.stop()
            for link in engine.spart.links:
                await link.close()


def prompts(n, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((5, 30, 127, 129)))] for _ in range(n)]


def assert_greedy(judge, given, results):
    """Every token is the one that transformers would have chosen after the tokens before it."""
    for prompt, tokens in zip(given, results, strict=True):
        assert is_greedy(judge, prompt, tokens)


def start(engine, given):
    return asyncio.gather(*(tokens_of(submit(engine, prompt, greedy(TOKENS))) for prompt in given))


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama-gqa", {}), ("mistral", {"prefix_cache": True, "guesses": 4}), ("qwen3.5", {})],
    ids=["plain", "windows, prefixes and guesses", "states"],
)
async def test_an_r_node_with_64_streams_is_drained_and_none_is_recomputed(tmp_path, family, options):
    """From shared memory to TCP: all streams are on the R-node that is drained when its replacement joins."""
    checkpoint = make_checkpoint(family)
    async with serving(checkpoint, f"shm://{tmp_path}/a.sock", **options) as (engine, _):
        given = prompts(STREAMS)
        work = start(engine, given)
        await until(lambda: len(engine.scheduler.running) == STREAMS and not any(s.prefilling for s in engine._live))
        other = RNodeProcess("tcp://127.0.0.1:0", 256 << 20)
        try:
            hello = engine.spart.model.hello(2, ROWS, "fp32", 100 << 20, 2 * STREAMS)
            engine.add_link(await connect(other.url, hello, None))
            await engine.r_nodes.drain(0)
            totals = engine.stats.totals
            assert totals.migrated == STREAMS and not work.done()
            await until(lambda: not engine.cluster.nodes[0].pages.freeing)
            assert (await engine.spart.links[0].stats())["pages_used"] == 0
            await engine.r_nodes.retire(0)
            results = await work
            assert totals.recomputed == totals.preemptions == 0
            assert_greedy(reference(checkpoint), given, results)
        finally:
            for link in engine.spart.links:
                await link.close()
            other.end()


@pytest.mark.parametrize("victim", [0, 1], ids=["source", "target"])
async def test_an_r_node_killed_during_a_drain_costs_no_tokens(tmp_path, victim):
    checkpoint = make_checkpoint("llama-gqa")
    urls = [f"shm://{tmp_path}/{name}.sock" for name in "abc"]
    async with serving(checkpoint, *urls) as (engine, nodes):
        given = prompts(24)
        work = start(engine, given)
        await until(lambda: len(engine.scheduler.running) == 24 and not any(s.prefilling for s in engine._live))
        draining = asyncio.create_task(engine.r_nodes.drain(0))
        await until(lambda: engine.totals.migrated >= 1)
        nodes[victim].end(signal.SIGKILL)
        await draining
        assert_greedy(reference(checkpoint), given, await work)
