"""The engine end to end: real S-Part, real links, R-nodes in processes of their own. transformers judges the output."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import mmap
import random
import re
import signal
from types import SimpleNamespace

import pytest
import torch
from engines.make_engine import make_engine
from engines.token_stream import greedy, submit, tokens_of
from engines.toy import until
from models.checkpoints import FAMILIES, make_checkpoint, reference
from models.greedy import is_greedy, prompts
from models.spart_steps import staged_bytes
from nodes.rnode_process import r_node_processes
from wire.cut_proxy import CutProxy

from fastdecode.engine.scheduling import deadline
from fastdecode.engine.state.request import GenerationFailed, NotReady, SamplingParams
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.region.geometry import region_layout
from fastdecode.spart import SPart, load_model
from fastdecode.spart.exchange import SlotViews
from fastdecode.transports.base import LinkDown
from fastdecode.transports.registry import connect

ROWS = 128  # well below the longest prompts, so that they are chunked


@pytest.fixture(scope="module")
def shm_nodes(tmp_path_factory):
    urls = [f"shm://{tmp_path_factory.mktemp('r')}/r.sock" for _ in range(3)]
    with r_node_processes(*urls) as nodes:
        yield nodes


@pytest.fixture
def shm_node(shm_nodes):
    return shm_nodes[0]


@pytest.fixture(scope="module")
def tcp_nodes():
    with r_node_processes(*["tcp://127.0.0.1:0"] * 3) as nodes:
        yield nodes


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def loaded(name):
    return load_model(make_checkpoint(name), device="cpu", dtype=torch.float32)


@functools.cache
def judge_of(name):
    return reference(make_checkpoint(name))


@pytest.fixture
def family():
    """The model's family in tests without a parameter of this name."""
    return "llama-gqa"


@pytest.fixture
def model(family):
    return loaded(family)


@contextlib.asynccontextmanager
async def serving(model, nodes, *, mini_batches=2, n_pages=None, max_seqs=64, **options):
    """A started engine; at its end, all living R-nodes must hold nothing but prefix entries."""

    async def link_to(url):
        page = PAGE_TOKENS * model.config.n_layers * 2 * model.config.n_kv_heads * model.config.head_size * 4
        kv_bytes = (n_pages or 500) * page * 5 // 4  # fp32, and some room for a page's padding
        return await connect(url, model.hello(mini_batches, ROWS, "fp32", kv_bytes, max_seqs), None)

    links = [await link_to(node.url) for node in nodes]
    engine = make_engine(
        SPart(model, links, state_slots=16),
        links,
        mini_batches=mini_batches,
        max_batch_tokens=ROWS,
        max_batch_size=32,
        **options,
    )
    await engine.start()
    engine.link_to = link_to
    try:
        yield engine
        await until(lambda: not (engine.scheduler.waiting or engine.scheduler.running))
        for node in engine.cluster.alive:
            kept = node.prefixes
            await until(lambda node=node: node.free_pages + node.pages_evictable == node.n_pages)
            stats = await node.link.stats()
            assert (stats["seqs"], stats["pages_used"]) == (len(kept), node.pages_evictable)
        assert staged_bytes(engine.spart._prompts) == 0
        assert engine.cluster.states.free == engine.cluster.states.total
    finally:
        await engine.stop()
        for link in engine.spart.links:
            await link.close()


@pytest.fixture
def judge(family):
    return judge_of(family)


LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 300, 600, 17, 5]


#: A scheme, R-nodes and mini-batches: every pair of values.
SPLITS = [("shm", 1, 1), ("shm", 3, 2), ("shm", 1, 3), ("tcp", 3, 1), ("tcp", 1, 2), ("tcp", 3, 3)]


def families_in_splits() -> list[tuple[str, str, int, int]]:
    """Each family over both transports, two of them in all splits."""
    families = [*FAMILIES, "llama-llama3", "qwen3.5", "qwen3-next"]
    whole = ("llama-gqa", "qwen3.5")
    return [
        (family, *split)
        for i, family in enumerate(families)
        for split in (SPLITS if family in whole else (SPLITS[i % 3], SPLITS[3 + i % 3]))
    ]


@pytest.mark.parametrize(
    ("family", "scheme", "n_nodes", "mini_batches"),
    [pytest.param(*case, marks=[pytest.mark.quick] * (case[0] == "llama-gqa")) for case in families_in_splits()],
)
async def test_greedy_equals_transformers(family, scheme, n_nodes, mini_batches, shm_nodes, tcp_nodes):
    model, judge = loaded(family), judge_of(family)
    nodes = {"shm": shm_nodes, "tcp": tcp_nodes}[scheme][:n_nodes]
    async with serving(model, nodes, mini_batches=mini_batches) as engine:
        given = prompts(LENGTHS)
        results = await asyncio.gather(*(tokens_of(submit(engine, p, greedy(64))) for p in given))
        for prompt, tokens in zip(given, results, strict=True):
            assert len(tokens) == 64
            assert is_greedy(judge, prompt, tokens)
        await engine.r_nodes.refresh()
        assert all(node.attention_seconds > 0 for node in engine.stats.nodes), "every R-node had work"
        assert all(node.bandwidth.bytes_per_second for node in engine.cluster.nodes)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_tbt": 1e-3, "max_staged_tokens": 0},
        {"max_staged_tokens": 0, "strict_staging": True},
        {"schedule": "stable"},
    ],
    ids=["", "small chunks", "prompts on R-nodes", "stable"],
)
async def test_48_mixed_requests_at_random_times_equal_each_alone(options, model, shm_node, tcp_nodes):
    rng = random.Random(48)
    given = prompts([rng.choice([rng.randint(1, 40), rng.randint(1, 400)]) for _ in range(48)], seed=1)
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 50),
            temperature=rng.choice([0.0, 0.8]),
            top_p=0.95,
            seed=i,
            frequency_penalty=rng.choice([0.0, 0.3]),
            repetition_penalty=rng.choice([1.0, 1.2]),
        )
        for i in range(48)
    ]

    async def client(engine, i):
        await asyncio.sleep(rng.random())
        return await tokens_of(submit(engine, given[i], params[i]))

    async with serving(model, tcp_nodes[:2], **options) as engine:
        together = await asyncio.gather(*(client(engine, i) for i in range(48)))
    async with serving(model, [shm_node], mini_batches=1) as engine:
        for i in range(48):
            assert together[i] == await tokens_of(submit(engine, given[i], params[i]))


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3.5-moe"])
async def test_choices_of_one_prompt(model, judge, tcp_nodes):
    (prompt,) = prompts([300])
    params = dataclasses.replace(greedy(60), temperature=0.9, seed=5)
    async with serving(model, tcp_nodes[:2]) as engine:
        alone = []
        for k in range(4):
            alone.append(await tokens_of(submit(engine, prompt, params.for_choice(k))))
        queues = {str(k): asyncio.Queue() for k in range(4)}
        engine.submit_choices(prompt, params, {name: queue.put_nowait for name, queue in queues.items()})
        together = [[(await queue.get()).token for _ in range(60)] for queue in queues.values()]
        assert together == alone and len(set(map(tuple, together))) > 1
        assert is_greedy(judge, prompt, await tokens_of(submit(engine, prompt, greedy(60))))


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3.5"])
@pytest.mark.parametrize("priorities", [[0], [2, 0, 1]], ids=["", "priorities"])
async def test_tiny_lease_preempts_and_changes_nothing(priorities, model, judge, shm_node):
    async with serving(model, [shm_node], n_pages=6) as engine:
        given = prompts([50, 100, 150, 200, 60, 3, 120, 10])
        params = [dataclasses.replace(greedy(150), priority=priorities[i % len(priorities)]) for i in range(len(given))]
        results = await asyncio.gather(*(tokens_of(submit(engine, p, q)) for p, q in zip(given, params, strict=True)))
        for prompt, tokens in zip(given, results, strict=True):
            assert is_greedy(judge, prompt, tokens)
        assert engine.stats.totals.preemptions > 0


@pytest.mark.parametrize("n_nodes", [1, 2])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3.5", "qwen3-next"])
async def test_prompts_that_share_prefixes_equal_transformers(family, n_nodes, tcp_nodes):
    """Conversations that continue, and a prefix that many prompts have."""
    model, judge = loaded(family), judge_of(family)
    common, *rest = prompts([300, 5, 1, 130, 40, 200])
    async with serving(model, tcp_nodes[:n_nodes], prefix_cache=True) as engine:
        histories = [common + end for end in rest]
        for turn in range(3):
            answers = await asyncio.gather(*(tokens_of(submit(engine, h, greedy(20))) for h in histories))
            for history, answer in zip(histories, answers, strict=True):
                assert is_greedy(judge, history, answer)
            histories = [h + a + [3 + turn] * 7 for h, a in zip(histories, answers, strict=True)]
        totals = engine.stats.totals
        shared = 256 if engine.spart.states is not None else 300  # whole pages of the common tokens
        assert totals.prefix_hits > 10 * shared and totals.preemptions == 0


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3.5-moe"])
async def test_a_prompt_submitted_many_times_at_once_is_computed_once(model, judge, tcp_nodes):
    (prompt,) = prompts([300])
    async with serving(model, tcp_nodes[:1], prefix_cache=True) as engine:
        for tokens in await asyncio.gather(*(tokens_of(submit(engine, prompt, greedy(40))) for _ in range(6))):
            assert is_greedy(judge, prompt, tokens)
        assert engine.stats.totals.prefix_hits == 5 * 256


async def test_preemption_forgets_no_penalty(model, shm_node):
    given = prompts([50, 100, 150, 200, 60, 3, 120, 10])
    params = SamplingParams(max_tokens=150, temperature=0.0, frequency_penalty=0.2, logit_bias=((9, 1.5),))
    async with serving(model, [shm_node], n_pages=6) as engine:
        together = await asyncio.gather(*(tokens_of(submit(engine, p, params)) for p in given))
        assert engine.stats.totals.preemptions > 0
    async with serving(model, [shm_node]) as engine:
        assert together == [await tokens_of(submit(engine, p, params)) for p in given]
    assert max(tokens.count(tokens[-1]) for tokens in together) < 100


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3.5"])
async def test_cancel_in_the_queue_in_prefill_and_in_decode_frees_pages(model, judge, shm_node):
    async with serving(model, [shm_node], mini_batches=1) as engine:
        decoding = submit(engine, [5] * 10, greedy(900))
        await anext(decoding)
        prefilling, queued = submit(engine, [6] * 1000, greedy(9)), submit(engine, [7], greedy(9))
        await until(lambda: staged_bytes(engine.spart._prompts) > 0)
        assert engine.stats.waiting == 1
        for stream in (decoding, prefilling, queued):
            stream.cancel()
        assert [len(await tokens_of(stream)) for stream in (prefilling, queued)] == [0, 0]
        await until(lambda: engine.stats.running == 0)  # `serving` looks at the pages


async def test_sigkill_of_the_only_r_node_ends_streams_and_a_new_one_serves_on(model, judge, tmp_path):
    url = f"shm://{tmp_path}/r.sock"
    with contextlib.ExitStack() as processes:
        (node,) = processes.enter_context(r_node_processes(url))
        async with serving(model, [node]) as engine:
            streams = [submit(engine, p, greedy(800)) for p in prompts([10, 200, 30])]
            await anext(streams[0])
            node.end(signal.SIGKILL)
            for stream in streams:
                with pytest.raises(GenerationFailed, match=re.escape(f"R-node {node.url} was lost")):
                    await tokens_of(stream)
            with pytest.raises(NotReady):
                submit(engine, [5], greedy(5))
            (again,) = processes.enter_context(r_node_processes(url))
            engine.replace_link(0, await engine.link_to(again.url))
            prompt = prompts([100])[0]
            assert is_greedy(judge, prompt, await tokens_of(submit(engine, prompt, greedy(20))))


@pytest.mark.quick
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3-next"])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_sigkill_of_one_of_two_r_nodes_costs_time_not_tokens(scheme, model, judge, tmp_path):
    urls = ["tcp://127.0.0.1:0"] * 2 if scheme == "tcp" else [f"shm://{tmp_path}/r{i}.sock" for i in range(2)]
    with r_node_processes(*urls) as nodes:
        async with serving(model, nodes) as engine:
            given = prompts([10, 200, 30, 77, 64, 3])
            streams = [submit(engine, p, greedy(200)) for p in given]
            firsts = [(await anext(stream)).token for stream in streams]
            assert all(node.n_sequences for node in engine.cluster.nodes)
            nodes[1].end(signal.SIGKILL)
            for prompt, first, stream in zip(given, firsts, streams, strict=True):
                tokens = [first, *await tokens_of(stream)]
                assert len(tokens) == 200
                assert is_greedy(judge, prompt, tokens)
            assert [node.alive for node in engine.stats.nodes] == [True, False]


@pytest.mark.parametrize("towards", ["S-node", "R-node", "both"])
@pytest.mark.parametrize("how", ["RST", "FIN"])
async def test_data_connection_that_ends_while_the_control_connection_lives(how, towards, model, judge, tcp_nodes):
    async with CutProxy(tcp_nodes[1].url) as proxy, serving(model, [tcp_nodes[0], proxy]) as engine:
        given = prompts([3 + 5 * i for i in range(32)])
        streams = [submit(engine, p, greedy(100)) for p in given]
        firsts = [(await anext(stream)).token for stream in streams]
        lost = engine.cluster.nodes[1]
        assert engine.cluster.nodes[0].n_sequences and lost.n_sequences
        proxy.cut_data(how, towards)
        results = await asyncio.gather(*map(tokens_of, streams))
        for prompt, first, tokens in zip(given, firsts, results, strict=True):
            assert len(tokens) == 99
            assert is_greedy(judge, prompt, [first, *tokens])
        assert [node.alive for node in engine.stats.nodes] == [True, False]
        assert isinstance(await lost.link.closed(), LinkDown)
        engine.replace_link(1, await engine.link_to(proxy.url))
        for prompt, tokens in zip(
            given, await asyncio.gather(*(tokens_of(submit(engine, p, greedy(5))) for p in given)), strict=True
        ):
            assert is_greedy(judge, prompt, tokens)
        assert (await engine.spart.links[1].stats())["calls"] > 0


async def test_data_connection_that_falls_silent_while_the_control_connection_lives(
    monkeypatch, model, judge, tcp_nodes
):
    monkeypatch.setattr(deadline, "SLACK_S", 5.0)
    async with CutProxy(tcp_nodes[1].url) as proxy, serving(model, [tcp_nodes[0], proxy]) as engine:
        given = prompts([3 + 5 * i for i in range(16)])
        streams = [submit(engine, p, greedy(60)) for p in given]
        firsts = [(await anext(stream)).token for stream in streams]
        assert all(node.n_sequences for node in engine.cluster.nodes)
        lost = engine.cluster.nodes[1].link
        proxy.silence_data()
        results = await asyncio.gather(*map(tokens_of, streams))
        for prompt, first, tokens in zip(given, firsts, results, strict=True):
            assert len(tokens) == 59
            assert is_greedy(judge, prompt, [first, *tokens])
        assert [node.alive for node in engine.stats.nodes] == [True, False]
        assert "has not come within" in str(await lost.closed())


@pytest.mark.parametrize("how", ["RST", "FIN"])
async def test_two_of_three_data_connections_end_at_once(how, model, judge, tcp_nodes):
    async with (
        CutProxy(tcp_nodes[1].url) as first_proxy,
        CutProxy(tcp_nodes[2].url) as second_proxy,
        serving(model, [tcp_nodes[0], first_proxy, second_proxy]) as engine,
    ):
        given = prompts([3 + 5 * i for i in range(32)])
        streams = [submit(engine, p, greedy(100)) for p in given]
        firsts = [(await anext(stream)).token for stream in streams]
        assert all(node.n_sequences for node in engine.cluster.nodes)
        first_proxy.cut_data(how, "S-node")
        second_proxy.cut_data(how, "S-node")
        results = await asyncio.gather(*map(tokens_of, streams))
        for prompt, first, tokens in zip(given, firsts, results, strict=True):
            assert len(tokens) == 99
            assert is_greedy(judge, prompt, [first, *tokens])
        assert [node.alive for node in engine.stats.nodes] == [True, False, False]


async def test_refused_call_fails_the_refusing_r_nodes_sequences_only(model, judge, tcp_nodes):
    async with serving(model, tcp_nodes[:2], mini_batches=1) as engine:
        given = prompts([3 + 20 * i for i in range(16)])
        streams = [submit(engine, p, greedy(100)) for p in given]
        firsts = [(await anext(stream)).token for stream in streams]
        placed = [{seq.order for seq in engine.scheduler.running.on_node(node)} for node in engine.cluster.nodes]
        assert placed[0] and placed[1] and len(placed[0] | placed[1]) == 16
        (victim, *_) = engine.scheduler.running.on_node(engine.cluster.nodes[1])
        await victim.node.link.free([victim.handle])  # behind the engine's back
        results = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
        assert engine.scheduler.recomputed_tokens == 0
        assert {i for i, result in enumerate(results) if isinstance(result, GenerationFailed)} == placed[1]
        assert all("refused" in str(results[i]) for i in placed[1])
        for i in placed[0]:
            assert len(results[i]) == 99
            assert is_greedy(judge, given[i], [firsts[i], *results[i]])
        assert all(node.alive for node in engine.stats.nodes)


async def test_step_an_r_node_refuses_fails_and_the_engine_goes_on(model, judge, shm_node):
    async with serving(model, [shm_node], mini_batches=1) as engine:
        stream = submit(engine, [5] * 10, greedy(900))
        await anext(stream)
        (seq,) = engine.scheduler.running.on_node(engine.cluster.nodes[0])
        await seq.node.link.free([seq.handle])  # behind the engine's back
        with pytest.raises(GenerationFailed, match="refused"):
            await tokens_of(stream)
        prompt = prompts([100])[0]
        assert is_greedy(judge, prompt, await tokens_of(submit(engine, prompt, greedy(20))))


def test_region_stays_mapped_while_the_s_part_looks_at_it(model):
    """Otherwise an R-node that dies during a step would crash the S-node."""
    geometry = model.hello(1, 8, "fp32", None, 1).geometry
    layout = region_layout(geometry)
    memory = mmap.mmap(-1, layout.region_bytes)
    region = memoryview(memory)
    views = SlotViews(SimpleNamespace(geometry=geometry, layout=layout, region=region, resident=False), 0)
    region.release()
    with pytest.raises(BufferError):
        memory.close()
    del views
    memory.close()
