"""Round trips over a link, from an empty doorbell to 4 MiB and in the shape of a real layer call.

The other process is an R-node that this command starts, or the one at --peer. The time of a call goes from `ring` to
the end of `wait`, less the least time that the R-engine reports: the rest is the transport's cost. Steps are armed
between the measurements. In the same rounds and with the same number of bytes, the peers (--beside) are measured.
Between receiving and sending, their other end works as long as the R-engine does, on memory that displaces the bytes
from its caches as the KV-cache does.

`bytes_out` and `bytes_back` count the rows that a case is about. `carried_out` and
`carried_back` count all bytes that a call carries, among them the 32 bytes of K and V that even an empty call has. Over
shm no bytes are sent, so a call costs only the time of Python and of the two doorbells, which is part of every other
transport's time too.

--stream measures the time from one reply to the next with several calls in flight. Their K and V rows go out, and the
R-engine appends them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np
from tqdm import tqdm

from fastdecode.bench.options import pinned, print_result
from fastdecode.bench.perftest import TOOLS, Perftest
from fastdecode.bench.perftest import installed as perftest_installed
from fastdecode.bench.rnode_child import RNodeChild
from fastdecode.bench.transport_peers import PEERS, EchoProcess, installed
from fastdecode.daemon.option_values import count, format_bytes
from fastdecode.kernels._native import page_bytes
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE, blocks_for
from fastdecode.region.geometry import Geometry, geometry_tuple
from fastdecode.transports import registry
from fastdecode.transports.base import Hello, Link

COMMAND = ("transport", "round trips over a link, and over raw sockets, gloo, ZeroMQ and perftest")

_PAYLOADS = (0, 256, 4 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
_HEAD_SIZE, _MAX_Q_ROW = 8, 16 << 10
_ACT_BYTES = 2
_KV_DTYPE = "fp16"
_STREAM_SLOTS, _STREAM_ROW, _STREAM_HEAD_SIZE = 4, 64 << 10, 256
_PERFTEST = "perftest"
_MIN_CALLS = 30
_LAYERS = 256
_OS_PAGE = 4096
_LAYERS_KV_BYTES = 512 << 20
_FRAME_BYTES = 24  # head of a data frame of TCP; the other transports send less beside the rows
_TIMEOUT = 20.0
_KV_BYTES = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", action="append", metavar="URL",
        help="start an R-node that listens at this URL (repeatable); default: shm and tcp")  # fmt: skip
    add("--peer", action="append", default=[], metavar="URL",
        help="R-node that is already running, here or elsewhere (repeatable)")  # fmt: skip
    add("--secret-file", type=Path, metavar="FILE", help="shared secret of the R-nodes at --peer")
    add("--beside", action="append", choices=[*PEERS, _PERFTEST, "none"], help="peer to run; default: all installed "
        f"ones; {_PERFTEST} needs an rdma:// link that is started here")  # fmt: skip
    bytes_: Any = {"action": "append", "type": int, "metavar": "BYTES"}
    add("--payload", **bytes_, help="bytes each way (repeatable)")
    add("--out", **bytes_, default=[], help="bytes out, none back (repeatable)")
    add("--stream", **bytes_, default=[], help="bytes out, several calls in flight (repeatable)")
    add("--rows", type=count, default=64, help="rows of the layer call")
    add("--heads", type=count, default=32, help="its query heads")
    add("--kv-heads", type=count, default=8)
    add("--head-size", type=count, default=128)
    add("--spin-us", type=int, default=20000,
        help="microseconds that a waiter spins before it sleeps, on both sides")  # fmt: skip
    add("--seconds", type=float, default=0.2, help="duration of each case, transport and round")
    add("--rounds", type=count, default=5)
    add("--cpus", type=_two_cpus, metavar="A,B",
        help="pin the waiting thread to CPU A and the answering process to CPU B")  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="plot latency and throughput over the payload")


def _two_cpus(text: str) -> tuple[int, int]:
    here, there = map(int, text.split(","))
    return here, there


@dataclass(frozen=True, slots=True)
class Case:
    """Calls of one shape. With `attend` False, rows are only appended, so no rows come back."""

    name: str
    rows: int
    q_heads: int
    kv_heads: int
    head_size: int
    attend: bool
    bytes_out: int
    bytes_back: int
    slots: int = 1

    @classmethod
    def payload(cls, n: int) -> Case:
        """`n` bytes of Q rows out and `n` bytes of O rows back; each row has 32 bytes of K and V too. Raises
        ValueError."""
        if n == 0:
            return cls("empty", 1, 1, 1, _HEAD_SIZE, False, 0, 0)
        row = min(n, _MAX_Q_ROW)
        if n % row or row % (_HEAD_SIZE * _ACT_BYTES):
            raise ValueError(f"a payload of {n} bytes is not a multiple of 16, or of 16 KiB beyond that")
        heads = row // (_HEAD_SIZE * _ACT_BYTES)
        return cls(format_bytes(n), n // row, heads, 1, _HEAD_SIZE, True, n, n)

    @classmethod
    def out(cls, n: int) -> Case:
        """`n` bytes of K and V out, in one row, so that the R-engine has little work. Raises ValueError."""
        unit = 2 * _HEAD_SIZE * _ACT_BYTES
        if n <= 0 or n % unit:
            raise ValueError(f"{n} bytes out are not a multiple of {unit}")
        return cls(f"{format_bytes(n)} out", 1, n // unit, n // unit, _HEAD_SIZE, False, n, 0)

    @classmethod
    def layer(cls, rows: int, heads: int, kv_heads: int, head_size: int) -> Case:
        q, kv = (rows * n * head_size * _ACT_BYTES for n in (heads, 2 * kv_heads))
        return cls(f"layer {rows}x{heads}/{kv_heads}x{head_size}", rows, heads, kv_heads, head_size, True, q + kv, q)

    @classmethod
    def stream(cls, n: int) -> Case:
        """`n` bytes of K and V rows out, in each of several calls in flight. Raises ValueError."""
        if n <= 0 or n % _STREAM_ROW:
            raise ValueError(f"a stream of {n} bytes a call is not a multiple of {format_bytes(_STREAM_ROW)}")
        heads = _STREAM_ROW // (2 * _STREAM_HEAD_SIZE * _ACT_BYTES)
        rows = n // _STREAM_ROW
        return cls(f"stream {format_bytes(n)}", rows, heads, heads, _STREAM_HEAD_SIZE, False, n, 0, _STREAM_SLOTS)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.slots, self.rows, self.layers, self.q_heads, self.kv_heads, self.head_size, "fp16")

    @property
    def pages(self) -> int:
        """KV pages of a step: each row is a sequence of its own, but in a stream each slot is one sequence."""
        return self.rows if self.slots == 1 else self.slots * blocks_for(self.rows)

    @property
    def layers(self) -> int:
        """Layers of a step: as many as the KV-cache allows, because only the layers are timed."""
        kv_row = 2 * self.kv_heads * self.head_size * _ACT_BYTES
        return max(1, min(_LAYERS, _LAYERS_KV_BYTES // (self.pages * PAGE_TOKENS * kv_row)))

    @property
    def carried(self) -> tuple[int, int]:
        q, kv = (n * self.rows * self.head_size * _ACT_BYTES for n in (self.q_heads, 2 * self.kv_heads))
        return _FRAME_BYTES + kv + q * self.attend, _FRAME_BYTES + q * self.attend


def run(args: argparse.Namespace) -> None:
    if args.plot:
        from fastdecode.bench import plot  # fails here rather than after the measurement
    result = _measure(args)
    if args.plot:
        plot.transport(result, args.plot)
    print_result(args, result, _print_table)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    payloads = _PAYLOADS if args.payload is None else args.payload
    cases = [Case.payload(n) for n in payloads]
    cases += [Case.out(n) for n in args.out]
    cases.append(Case.layer(args.rows, args.heads, args.kv_heads, args.head_size))
    streams = [Case.stream(n) for n in args.stream]
    secret = args.secret_file.read_bytes().strip() if args.secret_file else None
    here, there = args.cpus or (None, None)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastdecode-"))
        urls = [(url, secret) for url in args.peer]
        to_start = args.url or ([] if args.peer else [f"shm://{directory}/r.sock", "tcp://127.0.0.1:0"])
        for url in to_start:
            child = stack.enter_context(closing(RNodeChild(url, args.spin_us, _KV_BYTES, there)))
            urls.append((child.url, None))
        rdma = [url for url in to_start if url.startswith("rdma://")]
        wanted = args.beside or [*PEERS, *([_PERFTEST] if rdma else [])]
        present = [*installed(name for name in wanted if name in PEERS)]
        peers = {name: stack.enter_context(closing(EchoProcess(name, there))) for name in present}
        perftest = None
        if rdma and _PERFTEST in wanted and perftest_installed():
            present.append(_PERFTEST)
            perftest = Perftest(rdma[0])
        samples: dict[tuple[Case, str], list[np.ndarray]] = {}
        for _ in tqdm(range(args.rounds), desc="rounds", unit="round"):
            for case in tqdm(cases, desc="cases", unit="case", leave=False):
                engine_ns = 0
                for url, shared in urls:
                    taken = asyncio.run(_calls(url, shared, case, args.spin_us, args.seconds, here))
                    samples.setdefault((case, url), []).append(taken)
                    engine_ns = int(taken[0, 1])
                beside: dict[str, EchoProcess | Perftest] = dict(peers)
                if perftest and case.bytes_out == case.bytes_back:
                    beside["ib_write_lat"] = perftest
                for name, peer in beside.items():
                    taken = _round_trips(peer, case, engine_ns, args.seconds, here)
                    samples.setdefault((case, name), []).append(taken)
            for case in streams:
                for url, shared in urls:
                    if not url.startswith("shm://"):  # over shm nothing is sent
                        taken = asyncio.run(_stream(url, shared, case, args.spin_us, args.seconds, here))
                        samples.setdefault((case, url), []).append(taken)
                if perftest:
                    writes = max(_MIN_CALLS, int(args.seconds * 1e9 / perftest.stream(case.bytes_out, _MIN_CALLS)))
                    taken = np.array([perftest.stream(case.bytes_out, writes)])
                    samples.setdefault((case, "ib_write_bw"), []).append(taken)
    rows = [_row(case, source, rounds) for (case, source), rounds in samples.items()]
    return {
        "spin_us": args.spin_us,
        "cpus": args.cpus,
        "rounds": args.rounds,
        "beside_absent": [name for name in wanted if name not in (*present, "none")],
        "rows": rows,
    }


def _hello(case: Case) -> Hello:
    one_page = page_bytes(geometry_tuple(case.geometry), KV_DTYPES.index(_KV_DTYPE))
    kv_bytes = case.pages * one_page + case.layers * _OS_PAGE  # each layer of a lease is rounded to whole OS pages
    return Hello(case.geometry, _KV_DTYPE, (0,) * case.layers, case.head_size**-0.5, kv_bytes, case.pages)


async def _calls(
    url: str, secret: bytes | None, case: Case, spin_us: int, seconds: float, cpu: int | None
) -> np.ndarray:
    """[calls, 2]: nanoseconds from ringing a layer to the end of wait, and how many of them the R-engine works on a
    layer: the average of a step, and the least of these, so that a stall of the R-engine shows as time."""
    link = await registry.connect(url, _hello(case), secret, spin_us=spin_us)
    try:
        y, rng = link.layout, np.random.default_rng(0)
        for offset, row_bytes in ((y.q, y.q_row_bytes), (y.kv, y.kv_row_bytes)):
            start, n = y.slot(0) + offset, case.rows * row_bytes
            link.region[start : start + n] = rng.standard_normal(n // 2).astype(np.float16).tobytes()
        taken: list[np.ndarray] = []
        busy: list[float] = []
        end, tag = 0.0, 0
        while sum(map(len, taken)) < _MIN_CALLS or perf_counter() < end:
            tag += 1
            with pinned(cpu):  # this blocks the event loop, which has only the link's pings to serve meanwhile
                step, busy_ns = _timed_step(link, case, tag)
            taken.append(step)
            busy.append(busy_ns)
            await link.free([(row, tag) for row in range(case.rows)])
            if end == 0:  # the first step has touched memory that was new
                taken.clear()
                busy.clear()
                end = perf_counter() + seconds
        times = np.concatenate(taken)
        return np.stack([times, np.full_like(times, int(min(busy)))], axis=1)
    finally:
        await link.close()


def _arm(link: Link, slot: int, table: np.ndarray) -> None:
    link.arm(slot, table)
    link.wait(slot, _TIMEOUT)


def _timed_step(link: Link, case: Case, tag: int) -> tuple[np.ndarray, float]:
    """One step, each of whose rows is the first token of a sequence of its own. Returns the nanoseconds of its calls
    [layers] and the R-engine's average work on them."""
    table = np.zeros(case.rows, ROW_DTYPE)
    table["seq_index"], table["tag"], table["n_rows"] = np.arange(case.rows), tag, 1
    table["flags"] = ROW_ATTEND if case.attend else 0
    _arm(link, 0, table)
    step = link.steps[0]
    taken = np.zeros(case.layers, np.int64)
    for layer in range(case.layers):
        start_ns = perf_counter_ns()
        failures = step.ring(layer) or step.wait(_TIMEOUT)  # as an S-node calls
        taken[layer] = perf_counter_ns() - start_ns
        if failures:
            raise RuntimeError(f"{link.url} has failed: {failures[0][2]}")
    times = link.disarm(0)
    assert times is not None
    return taken, times.busy_ns / case.layers


async def _stream(
    url: str, secret: bytes | None, case: Case, spin_us: int, seconds: float, cpu: int | None
) -> np.ndarray:
    """[1]: nanoseconds for each call, with a call in flight in every slot; the rows are appended to the KV-cache."""
    link = await registry.connect(url, _hello(case), secret, spin_us=spin_us)
    slots = range(case.geometry.n_slots)
    calls, elapsed, tag = 0, 0.0, 0
    try:
        while calls < _MIN_CALLS or elapsed < seconds:
            tag += 1
            with pinned(cpu):
                for slot in slots:
                    _arm(link, slot, np.array([(slot, tag, 0, case.rows, 0, 0)], ROW_DTYPE))
                start = perf_counter()
                for layer in range(case.layers):
                    for slot in slots:
                        if layer:
                            link.wait(slot, _TIMEOUT)
                        link.ring(slot, layer)
                for slot in slots:
                    link.wait(slot, _TIMEOUT)
                elapsed += perf_counter() - start
            calls += case.layers * len(slots)
            await link.free([(slot, tag) for slot in slots])
        return np.array([elapsed / calls * 1e9])
    finally:
        await link.close()


def _round_trips(
    peer: EchoProcess | Perftest, case: Case, engine_ns: int, seconds: float, cpu: int | None
) -> np.ndarray:
    """[calls, 2] like `_calls`. A peer whose other end is ours works there for `engine_ns` nanoseconds a call."""
    work = {"work_ns": engine_ns} if isinstance(peer, EchoProcess) else {}
    with pinned(cpu):
        trial = peer.round_trips(case.bytes_out, case.bytes_back, _MIN_CALLS, **work)
        n = max(_MIN_CALLS, int(seconds * 1e9 / statistics.median(trial)))
        taken = np.array(peer.round_trips(case.bytes_out, case.bytes_back, n, **work))
    return np.stack([taken, np.full_like(taken, work.get("work_ns", 0))], axis=1)


def _row(case: Case, source: str, rounds: list[np.ndarray]) -> dict[str, Any]:
    ours = "://" in source
    out, back = case.carried if ours else (max(1, case.bytes_out), max(1, case.bytes_back))
    row = {
        "transport": source.partition(":")[0] if ours else "rdma" if source in TOOLS else "tcp",
        "case": case.name,
        "bytes_out": case.bytes_out,
        "bytes_back": case.bytes_back,
        "peer": None if ours else source,
        "url": source if ours else None,
        "carried_out": out,
        "carried_back": back,
    }
    if rounds[0].ndim == 1:  # a stream: its calls overlap, so no call has a time of its own
        micros = np.concatenate(rounds) / 1e3
        p50 = float(np.median(micros))
        row |= dict.fromkeys(("p90_us", "p99_us", "p999_us", "engine_us")) | {
            "calls": None,
            "spread_p50_us": [float(micros.min()), float(micros.max())],
        }
    else:
        samples = np.concatenate(rounds)  # integers, so that equal times do not differ by rounding
        spent = samples[:, 0] - samples[:, 1]
        p50, p90, p99, p999 = (float(ns) / 1e3 for ns in np.percentile(spent, (50, 90, 99, 99.9)))
        medians = [float(np.median(taken[:, 0] - taken[:, 1])) / 1e3 for taken in rounds]
        row |= {"p90_us": p90, "p99_us": p99, "p999_us": p999}
        row |= {"engine_us": float(np.median(samples[:, 1])) / 1e3 if ours else None}
        row |= {"calls": len(samples), "spread_p50_us": [min(medians), max(medians)]}
    return row | {"p50_us": p50, "gbps": (case.bytes_out + case.bytes_back) / p50 * 1e-3}


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"round trips less the R-engine's time, us; both sides spin {result['spin_us']} us; {result['rounds']} rounds"
    )
    columns = {
        "p50": "p50_us",
        "p90": "p90_us",
        "p99": "p99_us",
        "p99.9": "p999_us",
        "GB/s": "gbps",
        "engine": "engine_us",
    }
    print(f"{'case':<22}{'over':<13}" + "".join(f"{name:>9}" for name in columns))
    for row in result["rows"]:
        numbers = (
            f"{'':>9}" if row[key] is None else f"{row[key]:>9.{2 if key == 'gbps' else 1}f}"
            for key in columns.values()
        )
        print(f"{row['case']:<22}{row['peer'] or row['transport']:<13}" + "".join(numbers))
    if result["beside_absent"]:
        print(f"not installed: {', '.join(result['beside_absent'])}")
