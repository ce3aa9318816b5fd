"""Streams of real engines that go on with the K and V that another engine has left on an R-node. transformers judges
every token."""

from __future__ import annotations

import random

import pytest
from engines.continued_stream import ContinuedStream, adopted
from engines.real_engine import real_engine
from models.adapters_made import merged, save_adapter
from models.checkpoints import VOCAB_SIZE, make_checkpoint, reference
from models.greedy import is_greedy

from fastdecode.daemon.rnode import RNode
from fastdecode.engine.state.request import SamplingParams
from fastdecode.spart.lora.files import read_adapter

N_TOKENS = 40
LENGTHS = (5, 100, 128, 300)


def greedy(**options):
    return SamplingParams(temperature=0.0, max_tokens=N_TOKENS, ignore_eos=True, **options)


def prompt(n):
    rng = random.Random(n)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(n)]


@pytest.fixture
async def r_nodes(tmp_path):
    nodes = [RNode(threads=1, kv_bytes=1 << 26, orphan_seconds=60) for _ in range(2)]
    yield [url for i, node in enumerate(nodes) for url in await node.serve([f"shm://{tmp_path}/{i}.sock"], None)]
    for node in nodes:
        await node.close()


async def goes_on_at_another(checkpoint, tmp_path, r_nodes, judge, params, **options):
    """Streams of a first engine, which ends, are right and all adopted when a second engine has ended them."""
    common = {"r_nodes": r_nodes, "kv_digest": "ab" * 32, "max_batch_tokens": 64} | options
    async with real_engine(checkpoint, tmp_path, **common) as first:
        here = [ContinuedStream(first, prompt(n), params) for n in LENGTHS]
        for stream in here:
            await stream.has(12)
    async with real_engine(checkpoint, tmp_path, **common) as second:
        there = [await stream.goes_on(second, n) for n, stream in enumerate(here, 7)]
        for stream in there:
            [tokens] = await stream.end()
            assert len(tokens) == N_TOKENS and is_greedy(judge, stream.ids, tokens)
        assert adopted(second) == (len(LENGTHS), 0)
        assert second.scheduler.recomputed_tokens == 0


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama-gqa", {"prefix_cache": True}),
        ("llama-gqa", {"guesses": 4}),
        ("mistral", {}),
        ("gpt-oss", {"prefix_cache": True}),
    ],
    ids=["prefixes", "guesses", "windows", "sections"],
)
async def test_no_token_is_another_one(tmp_path, r_nodes, family, options):
    checkpoint = make_checkpoint(family)
    await goes_on_at_another(checkpoint, tmp_path, r_nodes[:1], reference(checkpoint), greedy(), **options)


@pytest.mark.parametrize("partition", ["heads", "tokens"])
async def test_a_team_adopts_what_a_team_has_left(tmp_path, r_nodes, partition):
    checkpoint, options = make_checkpoint("llama-gqa"), {"partition": partition, "prefix_cache": True}
    await goes_on_at_another(checkpoint, tmp_path, r_nodes, reference(checkpoint), greedy(), **options)


async def test_a_stream_of_an_adapter_goes_on_with_its_adapter(tmp_path, r_nodes):
    checkpoint = make_checkpoint("llama-gqa")
    directory = save_adapter(checkpoint, tmp_path / "adapter", 1, r=8, target_modules=["q_proj", "k_proj", "v_proj"])
    adapter = read_adapter("a", directory)
    judge = merged(checkpoint, directory)
    await goes_on_at_another(checkpoint, tmp_path, r_nodes[:1], judge, greedy(adapter="a"), adapters=[adapter])


async def test_a_sequence_that_has_given_back_pages_is_recomputed(tmp_path, r_nodes):
    """The first engine's lease is too small for the pages beyond windows."""
    checkpoint, options = make_checkpoint("mistral"), {"r_nodes": r_nodes[:1], "kv_digest": "ab" * 32}
    async with real_engine(checkpoint, tmp_path, kv_bytes=3 << 20, **options) as first:
        [node] = first.cluster.nodes
        ids = prompt(128 * (node.n_pages + 1))
        stream = ContinuedStream(first, ids, greedy())
        await stream.has(3)
        assert stream.sequences[0].pages.floor
    async with real_engine(checkpoint, tmp_path, **options) as second:
        [tokens] = await (await stream.goes_on(second, 3)).end()
        assert is_greedy(reference(checkpoint), ids, tokens)
        assert adopted(second) == (0, 1)
