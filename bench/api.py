"""The cost of the API to the streams that it serves, by the number of its processes.

A node for each number of processes is up all the time; they get the same load in turn. First many streams at once:
output tokens a second, and the S-Part's time a step, beside that of an engine without an API in the same rounds, alone
and with a neighbour that takes as much CPU time as the API and the client. Then a few streams, whose largest gap
between two tokens is taken while another client sends what is expensive to serve.

The S-Part's time is that of steps in which every stream decodes, so that a server, whose requests come one by one, and
an engine have the same steps. It is taken in the middle of a load, which must be long enough for that (`--tokens`).

The client of the many streams costs little, as if it ran on another machine: its sockets report data by the kilobyte.
The CPU time of a token is given for each process of the node and for the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import aiohttp
import orjson
import uvloop
from tqdm import tqdm

from fastdecode.bench.neighbour import Neighbour
from fastdecode.bench.options import print_result
from fastdecode.bench.serving.client import first_model, metrics
from fastdecode.bench.soaking.processes import Node
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.embedded import EmbeddedRNode, split_machine
from fastdecode.daemon.process import freeze
from fastdecode.demo import model_dir
from fastdecode.engine.engine import Engine
from fastdecode.engine.request import SamplingParams
from fastdecode.engine.runner import Runner
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.loader import choose_device, choose_dtype
from fastdecode.spart.threads import set_threads
from fastdecode.transports.registry import connect

COMMAND = ("api", "what the API costs the streams, by the number of its processes")

_ALONE, _BESIDE = "engine", "engine beside a neighbour"
_BODY_BYTES = 8 * 2**20 - 4096
_CALM_SECONDS = 3.0
_MIDDLE = 0.45, 0.75  # of a load's seconds, between which the S-Part is timed
_FULL = 0.99  # part of the streams that must get a token in a step, on average, for the S-Part's time to count
_IDLE_SECONDS = 20.0  # within which a server should have ended the requests of a load that was given up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    add("--api-processes", action="append", type=int, metavar="N", help="repeatable; default: 0 and 1")
    add(
        "--older",
        action="append",
        type=Path,
        default=[],
        metavar="PYTHON",
        help="interpreter of an older fastdecode, which gets the same load; repeatable",
    )
    add("--streams", type=int, default=512, help="streams at once")
    add("--tokens", type=int, default=64, help="output tokens of each stream")
    add("--rounds", type=int, default=3)
    add("--bystanders", type=int, default=31, help="streams beside an expensive load; 0: no such loads")
    add("--load-seconds", type=float, default=30.0, metavar="S", help="an expensive load that lasts longer is given up")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Run the loads and print the figures. Raises RuntimeError, ValueError, OSError."""
    print_result(args, uvloop.run(_run(args)), _print_table)


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    path = NodeConfig(model=args.model).model_path() or model_dir()
    forms = {
        f"--api-processes {n}": (sys.executable, ["--api-processes", str(n), "--no-access-log"])
        for n in args.api_processes or (0, 1)
    }
    forms |= {f"older, {python}": (str(python), []) for python in args.older}
    rates: dict[str, list[float]] = {n: [] for n in forms}
    chunks: dict[str, float] = {}  # of a token
    steps: dict[str, list[float]] = {n: [] for n in [*forms, _ALONE, _BESIDE]}  # seconds of the S-Part in a step
    lasted: dict[str, float] = {}  # seconds of the last load
    cpu: dict[str, dict[str, list[float]]] = {n: {} for n in forms}  # seconds a token, by process
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastdecode-")))
        servers = {}
        for i, (name, (python, options)) in enumerate(forms.items()):
            log = directory / f"{i}.log"
            servers[name] = await stack.enter_async_context(_node(log, python, path, args.streams, options))
        engine, cpu_of_engine = await stack.enter_async_context(_engine(path, args.streams))
        neighbour, busy = stack.enter_context(Neighbour()), 0.0
        for timed in tqdm([False] + [True] * args.rounds, desc="rounds", unit="round"):
            for n, (server, node, cpu_of_s) in servers.items():
                spent = _cpu_seconds(node)
                counters = partial(_server_counters, server)
                timing = asyncio.create_task(_s_part_seconds(counters, args.streams, lasted.get(n)))
                with _off(cpu_of_s):
                    lasted[n], chunks[n] = await _streams(server, args.streams, args.tokens)
                if step := await timing:
                    steps[n].append(step)
                if timed:
                    rates[n].append(args.streams * args.tokens / lasted[n])
                    for process, now in _cpu_seconds(node).items():
                        of_token = (now - spent.get(process, 0.0)) / (args.streams * args.tokens)
                        cpu[n].setdefault(process, []).append(of_token)
                    busy = rates[n][-1] * sum(cpu[n][process][-1] for process in ("API", "client") if process in cpu[n])
            for n, part in ((_ALONE, 0.0), (_BESIDE, busy)):
                neighbour.work(part)
                counters = partial(_engine_counters, engine)
                timing = asyncio.create_task(_s_part_seconds(counters, args.streams, lasted.get(n)))
                with _off(cpu_of_engine):
                    lasted[n] = await _drive(engine, args.streams, args.tokens)
                if step := await timing:
                    steps[n].append(step)
            neighbour.work(0.0)
        gaps: dict[str, dict[str, tuple[float, bool]]] = {}
        if args.bystanders:
            longest = engine.longest_sequence
            for n, (server, *_) in servers.items():
                gaps[n] = await _gaps(server, args.bystanders, longest, args.load_seconds)
    return {
        "model": path.resolve().name,
        "streams": args.streams,
        "tokens_per_second": {n: statistics.median(values) for n, values in rates.items()},
        "tokens_per_second_range": {n: [min(values), max(values)] for n, values in rates.items()},
        "chunks_per_token": chunks,
        "cpu_seconds_per_token": {n: {p: statistics.median(v) for p, v in found.items()} for n, found in cpu.items()},
        "s_part_step_seconds": {name: statistics.median(found) for name, found in steps.items() if found},
        "s_part_step_seconds_range": {name: [min(found), max(found)] for name, found in steps.items() if found},
        "s_part_rounds": {name: len(found) for name, found in steps.items()},
        "bystanders": args.bystanders,
        "largest_gap_seconds": {n: {name: gap for name, (gap, _) in found.items()} for n, found in gaps.items()},
        "loads_given_up": {n: [name for name, (_, ended) in found.items() if not ended] for n, found in gaps.items()},
    }


@contextlib.asynccontextmanager
async def _node(
    log: Path, python: str, path: Path, streams: int, options: list[str]
) -> AsyncIterator[tuple[str, int, int | None]]:
    """The address and the process id of a node of the fastdecode that `python` imports, and the cpu that its S-Part has
    to itself, if it has one."""
    argv = ["--model", str(path), "--port", "0", "--kv-memory", "1GiB", *options]
    argv += ["--max-batch-size", str(streams), "--max-batch-tokens", str(max(512, streams))]
    node = Node(log, *argv, python=python)
    try:
        address = await node.read(r"(http://\S+)/v1")
        cpu = re.search(r"on cpu (\d+), which it has to itself", log.read_text(errors="replace"))
        yield address, node.process.pid, int(cpu[1]) if cpu else None
    finally:
        await node.end()


@contextlib.contextmanager
def _off(cpu: int | None) -> Iterator[None]:
    """Keep this thread, a client's or an engine's event loop's, off a cpu that the S-Part has to itself."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, (cpus - {cpu}) or cpus)
    yield
    os.sched_setaffinity(0, cpus)


def _cpu_seconds(pid: int) -> dict[str, float]:
    """The CPU seconds so far of this process, the client, of the node `pid`, and of the node's child processes, by what
    they do."""
    seconds = {"client": time.process_time()}
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for process in [str(pid), *children]:
        line = Path(f"/proc/{process}/cmdline").read_bytes()
        name = "API" if b"api_process\0" in line else "R-node" if b"--role\0r\0" in line else "engine"
        # proc(5): the name in parentheses may hold spaces; utime and stime are the 14th and 15th fields.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        seconds[name] = seconds.get(name, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return seconds


@contextlib.asynccontextmanager
async def _engine(path: Path, streams: int) -> AsyncIterator[tuple[Engine, int | None]]:
    """An engine in this process, with an embedded R-node as a node would start it, and the cpu that its S-Part has to
    itself, if it has one."""
    config = NodeConfig(model=path, kv_memory=2**30)
    device, rows = choose_device("auto"), max(512, streams)
    split = split_machine(config, s_on_gpu=device.type != "cpu")
    set_threads(split.s_threads)
    backend = choose_backend("auto", path)
    model = backend.load(device, choose_dtype("auto", backend.config.dtype, device), progress=False)
    if device.type == "cpu":
        split = split.for_model(config, model.parameters)
    set_threads(split.s_threads, model)
    r_node = EmbeddedRNode(config, split)
    try:
        await r_node.start()
        link = await connect(r_node.url, model.hello(split.mini_batches, rows, "fp16", None, 4 * streams), None)
        engine = Engine(
            backend.make_spart(model, [link]),
            [link],
            mini_batches=split.mini_batches,
            max_batch_size=streams,
            max_batch_tokens=rows,
            prefix_cache=True,
            start_runner=partial(Runner, cpu=split.s_cpu),
        )
        await engine.start()
        freeze()
        yield engine, split.s_cpu
        await engine.stop()
        await link.close()
    finally:
        await r_node.stop()


async def _drive(engine: Engine, streams: int, tokens: int) -> float:
    """The load of `_streams` on an engine whose tokens are not read: seconds."""
    start = time.perf_counter()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i in range(streams):
        engine.submit(_prompt(i), params)
    while engine.stats.running or engine.stats.waiting:
        await asyncio.sleep(0.01)
    return time.perf_counter() - start


def _prompt(i: int) -> list[int]:
    return [5 + i % 1000, 7, 9, 11] * 2


class _Stream(asyncio.Protocol):
    """A streamed completion, of which only the times are read, so that the client takes little of the machine."""

    def __init__(self, body: dict[str, Any]):
        self._body = orjson.dumps(body | {"stream": True})
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.largest_gap, self._last, self._end = 0.0, 0.0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's has another base
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(self._body)}\r\n"
        transport.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + self._body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._last:
            self.largest_gap = max(self.largest_gap, now - self._last)
        self._last = now
        self._end = (self._end + data)[-64:]
        if b"[DONE]" in self._end:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if b"[DONE]" in self._end:
            self.done.set_result(None)
        elif not self.done.done():
            self.done.set_exception(RuntimeError(f"a stream ended early, with {self._end!r}"))

    def take_gap(self) -> float:
        """The largest gap since the last call, the one that goes on included."""
        gap, self.largest_gap = max(self.largest_gap, time.perf_counter() - self._last), 0.0
        return gap


async def _open(server: str, body: dict[str, Any]) -> _Stream:
    host, port = server.removeprefix("http://").rsplit(":", 1)
    _, stream = await asyncio.get_running_loop().create_connection(lambda: _Stream(body), host, int(port))
    return stream


class _Whole(asyncio.Protocol):
    """A streamed completion, which is read as a whole: a token costs the client nothing."""

    _READ_BYTES = 16384  # a socket with fewer bytes to read, on an open connection, wakes nobody

    def __init__(self) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._data = bytearray()

    @classmethod
    async def open(cls, server: str) -> _Whole:
        host, port = server.removeprefix("http://").rsplit(":", 1)
        sock = socket.create_connection((host, int(port)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, cls._READ_BYTES)
        sock.setblocking(False)
        _, stream = await asyncio.get_running_loop().create_connection(cls, sock=sock)
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, body: bytes) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        self._transport.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)

    def data_received(self, data: bytes) -> None:
        self._data += data

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(bytes(self._data))


async def _streams(server: str, streams: int, tokens: int) -> tuple[float, float]:
    """Seconds that `streams` streams of `tokens` tokens take, all at once on open connections, and the chunks of a
    token."""
    model = await first_model(f"{server}/v1", None)
    ask = {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [orjson.dumps(ask | {"prompt": _prompt(i)}) for i in range(streams)]
    opened = [await _Whole.open(server) for _ in bodies]
    start = time.perf_counter()
    for stream, body in zip(opened, bodies, strict=True):
        stream.ask(body)
    answers = await asyncio.gather(*(stream.done for stream in opened))
    seconds = time.perf_counter() - start
    for answer in answers:
        if b"data: [DONE]" not in answer[-64:]:
            raise RuntimeError(f"a stream ended early, with {answer[-200:]!r}")
    return seconds, (sum(answer.count(b"data: {") for answer in answers)) / (streams * tokens)


async def _gaps(server: str, bystanders: int, longest: int, seconds: float) -> dict[str, tuple[float, bool]]:
    """The largest gap of any bystander's stream, and whether the load ended within `seconds`, by load."""
    ask = {"max_tokens": longest, "temperature": 0, "ignore_eos": True}
    found: dict[str, tuple[float, bool]] = {}
    for name, (path, body) in ({"none": ("", {})} | _loads(longest)).items():
        opened = await asyncio.gather(*(_open(server, ask | {"prompt": _prompt(i)}) for i in range(bystanders)))
        await asyncio.sleep(_CALM_SECONDS)
        for stream in opened:
            stream.take_gap()
        ended = True
        if path:
            ended = await _send(server + path, body, seconds)
        else:
            await asyncio.sleep(_CALM_SECONDS)
        found[name] = max(stream.take_gap() for stream in opened), ended
        tqdm.write(f"{name}: {1e3 * found[name][0]:.0f} ms{'' if ended else ', load given up'}", file=sys.stderr)
        for stream in opened:
            stream.transport.abort()
        await asyncio.gather(*(stream.done for stream in opened), return_exceptions=True)
        await _wait_until_idle(server)
    return found


def _loads(longest: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests that are expensive to serve: path and body."""
    message = {"role": "user", "content": "a"}
    prompt = [3 + i % 1000 for i in range(min(8192, longest // 2))]
    many = {"prompt": prompt, "max_tokens": 4, "n": 128, "ignore_eos": True}
    return {
        "an 8 MiB prompt": ("/v1/completions", {"prompt": "word " * (_BODY_BYTES // 5)}),
        "8 MiB of tiny messages": (
            "/v1/chat/completions",
            {"messages": [message] * (_BODY_BYTES // (len(orjson.dumps(message)) + 1))},
        ),
        f"n = 128, {len(prompt)} tokens, repetition_penalty": ("/v1/completions", many | {"repetition_penalty": 1.1}),
        "n = 128, top_k = 150,000": ("/v1/completions", many | {"prompt": prompt[:8], "top_k": 150_000}),
    }


async def _send(url: str, body: dict[str, Any], seconds: float) -> bool:
    """Send a request and wait for the end of its answer, whatever that is; False if it has not come in `seconds`."""
    limit = aiohttp.ClientTimeout(total=seconds)
    with contextlib.suppress(TimeoutError):
        data = await asyncio.to_thread(orjson.dumps, body)
        async with (
            aiohttp.ClientSession(timeout=limit, headers={"Content-Type": "application/json"}) as session,
            session.post(url, data=data) as answer,
        ):
            await answer.read()
            return True
    return False


async def _wait_until_idle(server: str) -> None:
    """Wait until the server has no request, or too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_IDLE_SECONDS), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{server}/metrics") as answer:
                    values = metrics(await answer.text())
                if not values["fastdecode:num_requests_running"] + values["fastdecode:num_requests_waiting"]:
                    return
                await asyncio.sleep(0.1)


class _Counters(NamedTuple):
    s_seconds: float  # that the S-Part has computed
    steps: float
    tokens: float


async def _server_counters(server: str) -> _Counters:
    async with aiohttp.ClientSession() as session, session.get(f"{server}/metrics") as answer:
        values = metrics(await answer.text())
    return _Counters(*(values[f"fastdecode:{n}_total"] for n in ("s_seconds", "steps", "generation_tokens")))


async def _engine_counters(engine: Engine) -> _Counters:
    return _Counters(engine.totals.s_seconds, engine.totals.steps, engine.totals.generated_tokens)


async def _s_part_seconds(
    counters: Callable[[], Awaitable[_Counters]], streams: int, load_seconds: float | None
) -> float | None:
    """Seconds that the S-Part takes for a step, in the middle of a load that begins now and lasts about `load_seconds`.
    None if that is not known, or if not nearly all streams got a token in each step."""
    if load_seconds is None:
        return None
    begin, end = (part * load_seconds for part in _MIDDLE)
    await asyncio.sleep(begin)
    before = await counters()
    await asyncio.sleep(end - begin)
    after = await counters()
    steps = after.steps - before.steps
    if not steps or after.tokens - before.tokens < _FULL * steps * streams:
        return None
    return (after.s_seconds - before.s_seconds) / steps


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['streams']} streams at once")
    for n, rate in result["tokens_per_second"].items():
        least, most = result["tokens_per_second_range"][n]
        chunks = result["chunks_per_token"][n]
        print(f"  {n}: {rate:8.0f} [{least:.0f}-{most:.0f}] output tokens/s, {chunks:.2f} chunks a token")
        cpu = result["cpu_seconds_per_token"][n]
        parts = ", ".join(f"{process} {1e6 * of_token:.1f}" for process, of_token in cpu.items())
        print(f"    CPU of a token: {1e6 * sum(cpu.values()):.1f} us ({parts})")
    print("the S-Part's time in a step in which every stream decodes, ms")
    for n, rounds in result["s_part_rounds"].items():
        if not rounds:
            print(f"  {n:48} no round had such steps only; try more --tokens")
            continue
        step, (least, most) = result["s_part_step_seconds"][n], result["s_part_step_seconds_range"][n]
        print(f"  {n:48} {1e3 * step:.3f} [{1e3 * least:.3f}-{1e3 * most:.3f}] in {rounds} rounds")
    if result["largest_gap_seconds"]:
        print(f"largest gap between two tokens of {result['bystanders']} streams, ms, while another client sends")
    for n, gaps in result["largest_gap_seconds"].items():
        for name, gap in gaps.items():
            given_up = " (load given up)" if name in result["loads_given_up"][n] else ""
            print(f"  {n}: {name:45} {1e3 * gap:8.0f}{given_up}")
