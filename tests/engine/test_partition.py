"""R-nodes that share the heads or tokens of every sequence, under the engine: tokens equal those of transformers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import shutil
import signal

import pytest
import torch
from engines.make_engine import make_engine
from engines.token_stream import greedy, submit, tokens_of
from models.checkpoints import make_checkpoint, reference
from models.greedy import is_greedy, prompts
from models.hf_models import save_model
from nodes.rnode_process import r_node_processes

from fastdecode.engine.state.request import GenerationFailed, NotReady
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.backend import choose_backend
from fastdecode.transports.partition import connect_team

ROWS = 128  # well below the longest prompts, so that they are chunked
LENGTHS = [1, 2, 63, 64, 65, 129, 300, 600, 17, 5]


@pytest.fixture(scope="module")
def shm_nodes(tmp_path_factory):
    urls = [f"shm://{tmp_path_factory.mktemp('r')}/r.sock" for _ in range(4)]
    with r_node_processes(*urls) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def tcp_nodes():
    with r_node_processes(*["tcp://127.0.0.1:0"] * 4) as nodes:
        yield nodes


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def loaded(path, backend="native"):
    chosen = choose_backend(backend, path)
    return chosen, chosen.load(torch.device("cpu"), torch.float32, weights="auto", adapters=[])


@functools.cache
def judge_of(path):
    return reference(path)


@contextlib.asynccontextmanager
async def serving(path, nodes, *, partition="heads", backend="native", kv_dtype="fp32", pages=120, **options):
    """A started engine on a team of `nodes`; at its end every member must hold nothing but prefix entries."""
    chosen, model = loaded(path, backend)
    hello = model.hello(2, ROWS, kv_dtype, None, 64)

    async def open_link():
        link = await connect_team([node.url for node in nodes], hello, None, partition=partition)
        assert link.lease.n_pages > pages
        return link

    links = [await open_link()]
    engine = make_engine(
        chosen.make_spart(model, links, None),
        links,
        mini_batches=2,
        max_batch_tokens=ROWS,
        max_batch_size=32,
        **options,
    )
    await engine.start()
    engine.open_link = open_link
    try:
        yield engine
        [node] = engine.cluster.nodes
        async with asyncio.timeout(30):
            while (
                engine.scheduler.waiting
                or engine.scheduler.running
                or node.free_pages + node.pages_evictable < node.n_pages
            ):
                await asyncio.sleep(0.01)
        members = [node.link] if partition == "tokens" else [member.link for member in node.link.members]
        for link in members:
            stats = await link.stats()
            assert (stats["seqs"], stats["pages_used"]) == (len(node.prefixes), node.pages_evictable)
    finally:
        await engine.stop()
        for link in engine.spart.links:
            await link.close()


async def generate(engine, given, n=32):
    return await asyncio.gather(*(tokens_of(submit(engine, prompt, greedy(n))) for prompt in given))


def assert_greedy(judge, given, results, n=32):
    """Every token is the one that transformers would have chosen after the tokens before it."""
    for prompt, tokens in zip(given, results, strict=True):
        assert len(tokens) == n
        assert is_greedy(judge, prompt, tokens)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_greedy_equals_transformers(scheme, n, shm_nodes, tcp_nodes):
    """Two mini-batches, and prompts in chunks beside sequences that decode."""
    path = make_checkpoint("llama-mha")
    nodes = {"shm": shm_nodes, "tcp": tcp_nodes}[scheme][:n]
    async with serving(path, nodes) as engine:
        given = prompts(LENGTHS)
        assert_greedy(judge_of(path), given, await generate(engine, given))
        await engine.r_nodes.refresh()
        stats = engine.stats.nodes
        assert [node.url for node in stats] == [node.url for node in nodes]
        assert [node.member for node in stats] == ([""] if n == 1 else [f"{i}/{n}" for i in range(1, n + 1)])
        assert all(node.attention_seconds > 0 for node in stats), "every R-node had work"
        assert len({node.kv_bytes_read for node in stats}) == 1, "each R-node read as much as the others"


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_shared_tokens_equal_transformers(scheme, n, shm_nodes, tcp_nodes):
    """One KV head, which no two R-nodes can share; prefixes, choices and guesses are forked and cut in parts."""
    path = make_checkpoint("llama-mqa")
    nodes = {"shm": shm_nodes, "tcp": tcp_nodes}[scheme][:n]
    async with serving(path, nodes, partition="tokens", prefix_cache=True, guesses=3) as engine:
        [shared] = prompts([2 * PAGE_TOKENS + 10], seed=4)
        given = [shared, *prompts(LENGTHS), *([*shared, *suffix] for suffix in prompts([5, 70, 150], seed=5))]
        [first] = await generate(engine, given[:1])
        assert_greedy(judge_of(path), given, [first, *await generate(engine, given[1:])])
        await engine.r_nodes.refresh()
        assert engine.stats.totals.prefix_hits >= 3 * 2 * PAGE_TOKENS
        assert [node.member for node in engine.stats.nodes] == [f"{i}/{n}" for i in range(1, n + 1)]


@pytest.mark.parametrize("n", [1, 2])
async def test_latent_attention_equals_transformers(n, tmp_path, tcp_nodes):
    """Pages that hold K alone, shared by forks, cut by wrong guesses, and with two R-nodes in parts."""
    path = save_model("deepseek_v3", tmp_path)
    options = {"backend": "transformers", "prefix_cache": True, "guesses": 3}
    async with serving(path, tcp_nodes[:n], partition="tokens", **options) as engine:
        [shared] = prompts([2 * PAGE_TOKENS + 10], seed=4, vocabulary=128)
        given = [shared, *([*shared, *suffix] for suffix in prompts([5, 150], seed=5, vocabulary=128))]
        [first] = await generate(engine, given[:1])
        assert_greedy(judge_of(path), given, [first, *await generate(engine, given[1:])])
        assert engine.stats.totals.prefix_hits >= 2 * 2 * PAGE_TOKENS


@pytest.mark.skipif("FASTDECODE_LONG_CONTEXT" not in os.environ, reason="takes minutes: FASTDECODE_LONG_CONTEXT")
@pytest.mark.timeout(1800)
async def test_a_long_context_over_two_r_nodes(tmp_path, shm_nodes):
    """The tokens of one R-node and of two, in a context of FASTDECODE_LONG_CONTEXT tokens."""
    length, n = int(os.environ["FASTDECODE_LONG_CONTEXT"]), 64
    path = shutil.copytree(make_checkpoint("llama-mqa"), tmp_path / "long")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length + n + 1}))
    [prompt] = prompts([length], seed=9)
    results = []
    for nodes in (shm_nodes[:1], shm_nodes[:2]):
        async with serving(path, nodes, partition="tokens", pages=0) as engine:
            results += await generate(engine, [prompt], n)
            await engine.r_nodes.refresh()
            read = [node.kv_bytes_read for node in engine.stats.nodes]
            print(f"{length} tokens, {len(nodes)} R-node(s): KV bytes read {read}, tokens {results[-1][:8]} ...")
            assert max(read) <= 1.01 * min(read)
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["gpt-oss", "mistral"])
async def test_grouped_queries_sinks_and_windows(name, shm_nodes):
    """gpt-oss has attention sinks and windows; in both, two query heads belong to each KV head."""
    path = make_checkpoint(name)
    async with serving(path, shm_nodes[:2]) as engine:
        given = prompts(LENGTHS, seed=1)
        assert_greedy(judge_of(path), given, await generate(engine, given))


async def test_prompts_that_r_nodes_attend_for(shm_nodes):
    path = make_checkpoint("llama-mha")
    async with serving(path, shm_nodes, max_staged_tokens=0, strict_staging=True) as engine:
        given = prompts([200, 300, 10], seed=2)
        assert_greedy(judge_of(path), given, await generate(engine, given))


async def test_layers_with_different_heads(tmp_path, tcp_nodes):
    """Gemma 4: the heads of its full attention are larger, and its last layers share K and V."""
    path = save_model("gemma4_text", tmp_path)
    async with serving(path, tcp_nodes[:2], backend="transformers") as engine:
        given = prompts([1, 40, 300], seed=3, vocabulary=128)
        assert_greedy(judge_of(path), given, await generate(engine, given, 12), 12)


async def test_prefixes_and_choices_are_shared_by_forks_at_every_member(shm_nodes):
    path = make_checkpoint("llama-mha")
    async with serving(path, shm_nodes[:2], prefix_cache=True) as engine:
        [shared] = prompts([2 * PAGE_TOKENS + 10], seed=4)
        given = [shared, *([*shared, *suffix] for suffix in prompts([5, 70, 150], seed=5))]
        [first] = await generate(engine, given[:1])
        results = [first, *await generate(engine, given[1:])]
        assert_greedy(judge_of(path), given, results)
        assert engine.stats.totals.prefix_hits >= 3 * 2 * PAGE_TOKENS
        [prompt] = prompts([PAGE_TOKENS + 60], seed=6)
        outputs = {str(i): asyncio.Queue() for i in range(4)}
        engine.submit_choices(prompt, greedy(20), {name: queue.put_nowait for name, queue in outputs.items()})
        choices = [[(await queue.get()).token for _ in range(20)] for queue in outputs.values()]
        assert_greedy(judge_of(path), [prompt] * 4, choices, 20)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
async def test_a_quantised_cache_gives_the_tokens_of_one_r_node(kv_dtype, shm_nodes):
    """A scale belongs to a token and head, so the heads of a member are rounded as one R-node would round them."""
    path, results = make_checkpoint("llama-mha"), []
    for nodes in (shm_nodes[:1], shm_nodes[:2], shm_nodes):
        async with serving(path, nodes, kv_dtype=kv_dtype) as engine:
            results.append(await generate(engine, prompts(LENGTHS, seed=7)))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_a_killed_member_ends_the_streams_and_the_team_serves_again_once_it_is_back(scheme, tmp_path):
    path = make_checkpoint("llama-mha")
    urls = ["tcp://127.0.0.1:0"] * 2 if scheme == "tcp" else [f"shm://{tmp_path}/r{i}.sock" for i in range(2)]
    with r_node_processes(*urls) as nodes:
        async with serving(path, nodes, prefix_cache=True) as engine:
            given = prompts([10, 200, 30], seed=8)
            leased = engine.spart.links[0].lease.n_pages
            streams = [submit(engine, prompt, greedy(800)) for prompt in given]
            await anext(streams[0])
            nodes[1].end(signal.SIGKILL)
            for stream in streams:
                with pytest.raises(GenerationFailed, match=re.escape(nodes[1].url)):
                    await tokens_of(stream)
            with pytest.raises(NotReady):
                submit(engine, [5], greedy(5))
            assert [node.alive for node in engine.stats.nodes] == [False, False]
            await engine.cluster.nodes[0].link.closed()
            nodes[1].start()
            again = await engine.open_link()
            assert again.lease.n_pages == leased, "the member that lived on had freed its lease"
            engine.replace_link(0, again)
            assert_greedy(judge_of(path), given, await generate(engine, given))
