"""Prompts that one S-node computes for another: the connections between them, and nodes as processes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch
from engines.make_engine import make_engine
from engines.token_stream import greedy, submit, tokens_of
from models.checkpoints import make_checkpoint, reference
from models.greedy import is_greedy, prompts
from nodes.node_process import fetch
from nodes.rnode_process import r_node_processes

from fastdecode.daemon import prefill_nodes
from fastdecode.daemon.discovery import FileSet
from fastdecode.daemon.prefill_nodes import PrefillServer, RemotePrefillNodes, model_digest
from fastdecode.engine.migration.prefill_client import PrefillOrder
from fastdecode.engine.migration.prefill_worker import PrefillWorker
from fastdecode.engine.state.request import Overloaded, PromptTooLong
from fastdecode.region.geometry import Geometry
from fastdecode.spart import SPart, load_model
from fastdecode.transports import frames, messages, tcp
from fastdecode.transports.base import Hello, LinkDown, TransportError
from fastdecode.transports.messages import PromptMessage
from fastdecode.transports.registry import connect

SECRET, MODEL = b"0123456789abcdef", "ab" * 32
ORDER = PrefillOrder([1, 2**31, 3], "adapter", "salt", "client", -4, "tcp://r:1", "cd" * 32)


class ScriptedWorker:
    """Gives what it is told to."""

    def __init__(self, error=None):
        self.orders, self.error = [], error
        self.ready, self.withdrawn = asyncio.Event(), asyncio.Event()
        self.ready.set()

    async def prefill(self, order):
        self.orders.append(order)
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self.withdrawn.set()
            raise
        if self.error is not None:
            raise self.error


@pytest.fixture
async def serve():
    servers = []

    async def serve(worker, secret=SECRET):
        servers.append(await PrefillServer.listen("tcp://127.0.0.1:0", worker, MODEL, secret))
        return servers[-1].url

    yield serve
    for server in servers:
        await server.close()


@pytest.mark.quick
@pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "none"])
async def test_an_order_arrives_as_it_was_given(serve, secret):
    worker = ScriptedWorker()
    await RemotePrefillNodes([await serve(worker, secret)], MODEL, secret).prefill(ORDER)
    assert worker.orders == [ORDER]


@pytest.mark.quick
async def test_the_frame_of_a_prompt_of_128k_tokens_is_not_too_long(serve):
    worker = ScriptedWorker()
    order = PrefillOrder(list(range(131072)), None, "", "", 0, "tcp://r:1", "cd" * 32)
    await RemotePrefillNodes([await serve(worker)], MODEL, SECRET).prefill(order)
    assert worker.orders == [order]


@pytest.mark.quick
async def test_an_order_that_no_s_node_takes_is_no_failure_of_one(serve):
    """Otherwise a client with a long cache_salt would keep the prompts of all others from the prefill S-nodes."""
    worker = ScriptedWorker()
    nodes = RemotePrefillNodes([await serve(worker)], MODEL, SECRET)
    with pytest.raises(LinkDown, match="cache_salt"):
        await nodes.prefill(ORDER._replace(cache_salt="x" * 5000))
    assert nodes.ready() and not worker.orders


@pytest.mark.quick
async def test_a_prompt_is_not_encoded_before_its_salt_is_checked(serve, monkeypatch):
    """A prompt may have a hundred thousand tokens, and the event loop encodes it."""
    encoded, encode = [], messages.encode
    for module in (messages, frames, prefill_nodes):
        monkeypatch.setattr(module, "encode", lambda m: (encoded.append(m.TYPE), encode(m))[1], raising=False)
    nodes = RemotePrefillNodes([await serve(ScriptedWorker())], MODEL, SECRET)
    await nodes.prefill(ORDER)
    assert encoded.count(PromptMessage.TYPE) == 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("secret", "model", "reason"),
    [
        (b"another secret 123", MODEL, "secrets of the two nodes differ"),
        (None, MODEL, "asks for a shared secret"),
        (SECRET, "ef" * 32, "different models"),
    ],
)
async def test_strangers_get_nothing(serve, secret, model, reason):
    worker = ScriptedWorker()
    with pytest.raises(LinkDown, match=reason):
        await RemotePrefillNodes([await serve(worker)], model, secret).prefill(ORDER)
    assert not worker.orders


@pytest.mark.quick
@pytest.mark.parametrize(("error", "again"), [(PromptTooLong("too long"), True), (Overloaded("full"), False)])
async def test_a_failure_is_told_and_a_busy_s_node_left_alone_for_a_while(serve, error, again):
    nodes = RemotePrefillNodes([await serve(ScriptedWorker(error))], MODEL, SECRET)
    assert nodes.ready()
    with pytest.raises(LinkDown, match=str(error)):
        await nodes.prefill(ORDER)
    assert nodes.ready() == again


@pytest.mark.quick
async def test_an_order_that_is_given_up_is_withdrawn(serve):
    worker = ScriptedWorker()
    worker.ready.clear()
    work = asyncio.create_task(RemotePrefillNodes([await serve(worker)], MODEL, SECRET).prefill(ORDER))
    async with asyncio.timeout(60):
        while not worker.orders:
            await asyncio.sleep(0.001)
        work.cancel()
        await worker.withdrawn.wait()


@pytest.mark.quick
async def test_orders_go_to_the_s_node_with_the_fewest_tokens_and_never_to_a_dead_one(serve):
    workers = [ScriptedWorker() for _ in range(2)]
    urls = [await serve(worker) for worker in workers]
    for worker in workers:
        worker.ready.clear()
    nodes = RemotePrefillNodes(["tcp://127.0.0.1:1", *urls], MODEL, SECRET)
    with pytest.raises(LinkDown, match="prefill S-node tcp"):
        await nodes.prefill(ORDER)
    work = [asyncio.create_task(nodes.prefill(ORDER)) for _ in range(4)]
    async with asyncio.timeout(60):
        while sum(len(worker.orders) for worker in workers) < 4:
            await asyncio.sleep(0.001)
    assert [len(worker.orders) for worker in workers] == [2, 2]
    for worker in workers:
        worker.ready.set()
    await asyncio.gather(*work)


@pytest.mark.quick
async def test_the_prefill_s_nodes_of_a_file_are_followed(serve, tmp_path):
    one, two = ScriptedWorker(), ScriptedWorker()
    urls, path = [await serve(worker) for worker in (one, two)], tmp_path / "prefill"
    nodes = RemotePrefillNodes([], MODEL, SECRET)
    following = asyncio.create_task(nodes.follow(FileSet(path, ("tcp",), may_be_empty=True)))
    try:
        async with asyncio.timeout(60):
            for text, worker in ((urls[0], one), (urls[1], two), ("", None)):
                path.write_text(text)
                while nodes._prefill != ((text,) if text else ()):
                    await asyncio.sleep(0.01)
                if worker is not None:
                    await nodes.prefill(ORDER)
                    assert worker.orders == [ORDER]
        path.unlink()
        await asyncio.sleep(0)
        assert not following.done()
    finally:
        following.cancel()


@pytest.mark.quick
async def test_what_is_no_order_ends_the_connection(serve):
    worker = ScriptedWorker()
    url = await serve(worker, None)
    for frame in (b"\0\0\0\0", b"\2\0\0\0{}", b"\xff" * 8, b'\x13\0\0\0{"type": "ACCEPTED"}'):
        conn = await tcp.dial_url(url)
        await asyncio.get_running_loop().sock_sendall(conn.sock, frame)
        with pytest.raises(TransportError):
            while True:
                await conn.read()
        conn.close()
    await RemotePrefillNodes([url], MODEL, None).prefill(ORDER)
    assert worker.orders == [ORDER]


@pytest.mark.quick
async def test_other_machines_are_not_served_without_a_secret():
    with pytest.raises(TransportError, match="secret"):
        await PrefillServer.listen("tcp://0.0.0.0:0", ScriptedWorker(), MODEL, None)


@pytest.mark.quick
def test_the_digest_is_that_of_the_weights_and_the_format(tmp_path):
    def hello(kv_dtype="fp16", slots=2):
        return Hello(Geometry(slots, 8, 2, 4, 2, 64, "fp32"), kv_dtype, (0, 0), 0.125, None, 8)

    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 200_000)
    same = model_digest(tmp_path, hello())
    assert model_digest(tmp_path, hello(slots=1)) == same != model_digest(tmp_path, hello("int8"))
    weights.write_bytes(b"a" * 199_999 + b"b")
    assert model_digest(tmp_path, hello()) != same


@contextlib.asynccontextmanager
async def engine_on(r_node, checkpoint, **options):
    """A started engine with a link to an R-node process. It computes with one thread, and rounds nothing."""
    torch.set_num_threads(1)
    model = load_model(checkpoint, device="cpu", dtype=torch.float32)
    link = await connect(r_node.url, model.hello(2, 128, "fp32", 16 << 20, 32), None)
    engine = make_engine(SPart(model, [link]), [link], max_batch_tokens=128, max_batch_size=16, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        await link.close()


@pytest.mark.parametrize("apart", [False, True], ids=["one R-node", "two R-nodes"])
async def test_every_token_is_that_of_transformers(serve, tmp_path, apart):
    checkpoint, given = make_checkpoint("llama-gqa"), prompts((300, 257, 30, 385, 300), seed=1)
    urls = [f"shm://{tmp_path}/{name}.sock" for name in ("a", "b")[: 1 + apart]]
    with r_node_processes(*urls, kv_bytes=64 << 20) as nodes:
        async with engine_on(nodes[0], checkpoint) as prefill:
            remote = RemotePrefillNodes([await serve(PrefillWorker(prefill), None)], MODEL, None)
            async with engine_on(nodes[-1], checkpoint, prefill_nodes=remote, guesses=3) as decode:
                streams = [submit(decode, prompt, greedy(30)) for prompt in given]
                results = await asyncio.gather(*map(tokens_of, streams))
                assert decode.stats.totals.remote_prefills == 4
                assert decode.stats.totals.recomputed == prefill.stats.totals.recomputed == 0
    judge = reference(checkpoint)
    for prompt, tokens in zip(given, results, strict=True):
        assert is_greedy(judge, prompt, tokens)


def test_nodes_whose_prefill_s_node_is_killed(start, tmp_path):
    """Both S-nodes share an R-node. What the prefill S-node has computed is computed again without it."""
    url = f"shm://{tmp_path}/r.sock"
    common = ("--r-node", url, "--port", "0", "--dtype", "fp32", "--kv-dtype", "fp32", "--kv-lease", "64MiB",
              "--s-threads", "1", "--no-prefix-cache")  # fmt: skip
    start("--role", "r", "--listen", url, "--threads", "1", "--kv-memory", "256MiB")
    prefill = start(*common, "--prefill-listen", "tcp://127.0.0.1:0", own_group=True)
    decode = start(*common, "--prefill-at", prefill.wait_for(r"prompts of other S-nodes are taken at (tcp://\S+)")[1])

    def ask(seed):
        prompt = [(i * i * seed + i) % 500 + 3 for i in range(300)]
        answer = api.completions.create(model="fastdecode-demo", prompt=prompt, max_tokens=20, seed=seed)
        return answer.choices[0].text

    def taken():
        metrics = fetch(f"{str(api.base_url).removesuffix('/v1/')}/metrics")
        [line] = [s for s in metrics.splitlines() if s.startswith("fastdecode:prompts_taken_total")]
        return float(line.split()[-1])

    with decode.api() as api:
        texts = [ask(seed) for seed in (1, 2)]
        assert taken() == 2
        prefill.kill_group()
        assert [ask(seed) for seed in (1, 2)] == texts
        assert taken() == 2
