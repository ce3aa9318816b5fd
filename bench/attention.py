"""Decode attention of the R-engine in GB/s of KV-cache read, and its share of the read-only roofline.

There are three parts: a sweep over formats and shapes with the KV in memory, next to the peers; one thread alone at
group 1; and one thread whose KV lies in its L2, which shows what the instructions alone allow. The bandwidth of a
shared machine drifts, so each round measures the roofline and the R-engine in all cells in turn, as far as their KV has
room in memory at once; after that, the rounds of each cell measure the R-engine and every peer. The figures of a cell
come from its judging rounds: those in which the roofline is below `--judge-below`, or all rounds if there is none.
Rounds go on until `--rounds` of them judge or three times as many have run. A peer's output is held against float64
before it is timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from fastdecode.bench import attention_kernels
from fastdecode.bench.attention_peers import PEERS, AttentionPeer, check, installed
from fastdecode.bench.attention_report import print_report, summary
from fastdecode.bench.options import pinned, print_result, refuse_unsupported
from fastdecode.bench.other_version_peer import OtherVersionAttention
from fastdecode.bench.rpart import RPart
from fastdecode.bench.shape import Data, Shape
from fastdecode.bench.shapes import SHAPES
from fastdecode.daemon.machine import available_memory, usable_cpus
from fastdecode.daemon.option_values import count, size_option
from fastdecode.daemon.roofline import Roofline, huge_pages
from fastdecode.kernels import _native
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS

COMMAND = ("attention", "GB/s of the R-engine's attention, its share of the read roofline, and peers")

PARTS = ("sweep", "one-thread", "in-cache")

_ONE_THREAD_CONTEXT, _HEAD_SIZE = 4096, 128  # of the two parts besides the sweep
_L2 = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
_IN_CACHE_SECONDS = 0.1  # of one round, so long that the cost of the call itself vanishes in it
_PATIENCE = 3  # at most this many times `--rounds` rounds, to get `--rounds` judging ones
_AT_ONCE = 12  # cells that take turns at most: within a longer round the bandwidth would drift
_SHARE_OF_MEMORY = 0.6  # of what is available: the KV of the cells that take turns
_SETTLE_SECONDS = 0.005  # in which the threads of the last peer stop spinning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument

    def repeatable(flag: str, help_text: str, **how: Any) -> None:
        add(flag, action="append", help=f"{help_text} (repeatable)", **how)

    repeatable("--kv-dtype", "KV-cache format; default: fp16, bf16, int8, int4", choices=KV_DTYPES)
    repeatable("--group", "query heads for each KV head; default: 1, 4, 8", type=count)
    repeatable("--context", "cached tokens of each sequence; default: 512, 4096, 32768", type=count)
    repeatable("--head-size", "elements of a head; default: 64, 128", type=count)
    add("--kv-heads", type=count, default=8)
    add("--v-size", type=count, help="elements of a V head; default: --head-size")
    repeatable("--v", "V is stored beside K, or is the first elements of K (latent attention); default: stored; peers "
        "run neither this nor --v-size", choices=("stored", "in-k"))  # fmt: skip
    add("--index-heads", type=count, metavar="N", help="attend to all tokens and, in turns, to the tokens that an "
        "indexer of N heads selects (trained sparse attention); means --v in-k and --kv-heads 1")  # fmt: skip
    add("--index-size", type=count, default=128, help="elements of an index head; default: 128")
    add("--index-topk", type=count, default=2048, help="tokens that the indexer selects; default: 2048")
    add("--model", choices=SHAPES,
        help="the heads of a well-known model, in place of --group, --head-size and --kv-heads")  # fmt: skip
    add("--kv-bytes", type=size_option, default=2 << 30, metavar="SIZE", help="KV of each cell and peer; default: 2GiB")
    add("--scattered", action="store_true",
        help="no two pages of a sequence are adjacent (of the peers only fastdecode has pages)")  # fmt: skip
    repeatable("--part", "what to measure; default: all", choices=PARTS)
    add("--threads", type=count, help="threads of the sweep; default: one for each usable core")
    add("--isa", help="instruction set, such as avx2; default: the best")
    add("--rounds", type=count, default=7, help="judging rounds of each cell; default: 7")
    add("--fills", type=count, default=1, help="how often the caches of a cell with peers are filled, each time for "
        "a share of the rounds; default: 1 (the physical pages that a process gets change its speed)")  # fmt: skip
    add("--judge-below", type=float, default=50.0, metavar="GBPS",
        help="rounds with a lower roofline judge; default: 50")  # fmt: skip
    repeatable("--peer", "peer to run; default: all installed ones", choices=[*PEERS, "none"])
    add("--plot", type=Path, metavar="FILE", help="plot the cells and their rooflines")


def run(args: argparse.Namespace) -> None:
    refuse_unsupported([args.isa] if args.isa else [])
    if args.plot:
        from fastdecode.bench import plot  # fails here rather than after the measurement
    # Else a peer's idle threads would spin on the cores of the next peer.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    result = _measure(args)
    if args.plot:
        plot.attention(result, args.plot)
    print_result(args, result, print_report)


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.model is not None:
        model = SHAPES[args.model]
        args.group, args.head_size = [model.heads // model.kv_heads], [model.head_size]
        args.kv_heads = model.kv_heads
    if args.index_heads is not None:
        args.v, args.kv_heads = ["in-k"], 1
    cpus = usable_cpus()
    threads = args.threads or len(cpus)
    if threads > len(cpus):
        raise ValueError(f"--threads {threads}: this process may run on {len(cpus)} CPUs")
    parts = args.part or PARTS
    wanted = list(PEERS) if args.peer is None else [name for name in args.peer if name != "none"]
    if args.v or args.v_size:
        wanted = []
    present = [name for name in wanted if name in installed()]
    rows = []
    for part in filter(parts.__contains__, PARTS):
        cells = list(_cells(args, part))
        if part == "in-cache":
            rows += [_cell_in_cache(args, *cell, cpus[0]) for cell in tqdm(cells, desc=part, unit="cell")]
            continue
        cells_at_once = max(1, min(_AT_ONCE, int(_SHARE_OF_MEMORY * available_memory()) // args.kv_bytes))
        for i in tqdm(range(0, len(cells), cells_at_once), desc=f"{part}, {cells_at_once} cells at once", unit="turn"):
            rows += _own_rows(args, part, cells[i : i + cells_at_once], cpus[: threads if part == "sweep" else 1])
        for cell in tqdm(cells if part == "sweep" and present else [], desc="peers", unit="cell"):
            rows += _peer_rows(args, *cell, cpus[:threads], present)
    raise_rooflines(rows)
    return {
        "threads": threads,
        "rounds": args.rounds,
        "judge_below": args.judge_below,
        "kv_bytes": args.kv_bytes,
        "peers_absent": [name for name in wanted if name not in present] if "sweep" in parts else [],
        "rows": rows,
        "summary": summary(rows),
    }


def _cells(args: argparse.Namespace, part: str) -> Iterator[tuple[str, Shape]]:
    """The cells of a part: a format and a shape each.

    Outside of the sweep there is one context and one head size, unless the command line asks for others.
    """
    dtypes = args.kv_dtype or ("fp16", "bf16", "int8", "int4")
    sizes = args.head_size or ((64, 128) if part == "sweep" else (_HEAD_SIZE,))
    groups = (1,) if part == "one-thread" else args.group or (1, 4, 8)
    for kv_dtype, head_size, group, v in itertools.product(dtypes, sizes, groups, args.v or ("stored",)):
        v_size, v_in_k = args.v_size or head_size, v == "in-k"
        if part == "in-cache":
            page = attention_kernels.chunk_bytes(kv_dtype, head_size, v_size, v_in_k)
            contexts: Sequence[int] = [max(1, _in_cache_bytes() // page) * PAGE_TOKENS]
        else:
            contexts = args.context or ((512, 4096, 32768) if part == "sweep" else (_ONE_THREAD_CONTEXT,))
        heads = 1 if part == "in-cache" else args.kv_heads
        indexer = {name: getattr(args, name) for name in ("index_heads", "index_size", "index_topk")}
        for context in contexts:
            dense = Shape(context, group, head_size, heads, v_size, v_in_k)
            yield kv_dtype, dense
            if args.index_heads and part != "in-cache":
                yield kv_dtype, replace(dense, **indexer)


def _in_cache_bytes() -> int:
    """KV that stays in a core's L2 cache: half of it, or of 1 MiB where the size is unknown."""
    try:
        return int(_L2.read_text().strip().removesuffix("K")) * 1024 // 2
    except (OSError, ValueError):
        return 1 << 19


@functools.cache
def _fastest_variant(n_bytes: int, cpus: tuple[int, ...], passes: int) -> int:
    with closing(Roofline(n_bytes, cpus)) as roofline:
        roofline.choose(passes)
        return roofline.variant


def _roofline(n_bytes: int, cpus: Sequence[int], passes: int = 1) -> Roofline:
    """A roofline that reads in the fastest way, which is looked for once for each number of bytes and set of CPUs."""
    return Roofline(n_bytes, cpus, _fastest_variant(n_bytes, tuple(cpus), passes))


class _Cell:
    """The R-engine with one shape, and its measurements: one of each list for each round. The first round is a
    warm-up."""

    def __init__(self, args: argparse.Namespace, part: str, kv_dtype: str, shape: Shape, cpus: list[int]):
        self.common = _common(part, kv_dtype, shape, len(cpus))
        self.cpus, self._args = cpus, args
        self._ours = RPart(shape, kv_dtype, args.kv_bytes, cpus, args.isa, scattered=args.scattered)
        self.sequences = self._ours.sequences
        self.roof: list[float] = []
        self.gbps: list[float] = []
        self.rate: list[float] = []

    def close(self) -> None:
        self._ours.close()

    def measure(self, roofline: Roofline) -> None:
        """Run one round: a layer, between two measurements of the roofline.

        Where attention itself reads faster than that, its speed is the roofline of the round.
        """
        before = roofline.gbps()
        elapsed, kv_bytes = self._ours.layer()
        self.gbps.append(kv_bytes / elapsed * 1e-9)
        self.roof.append(max((before + roofline.gbps()) / 2, self.gbps[-1]))
        self.common["roofline_variant"] = _native.read_variants()[roofline.variant]
        self.rate.append(self.sequences / elapsed)

    @property
    def judging(self) -> int:
        """The number of judging rounds so far."""
        return sum(r < self._args.judge_below for r in self.roof[1:])

    def row(self) -> dict[str, Any]:
        row = {**self.common, "sequences": self.sequences, "isa": self._ours.isa, "peer": None}
        row |= {"format": self.common["kv_dtype"], "run_pages": self._ours.run_pages()}
        return {**row, **_figures(self._args, self.roof[1:], self.gbps[1:], self.rate[1:])}


def _run_rounds(
    args: argparse.Namespace, cells: list[_Cell], rounds: int, then: Callable[[], None] = lambda: None
) -> None:
    """Run rounds of all cells until each has `rounds` judging ones, or for three times as many rounds.

    `then` is called at the end of every round.
    """
    with closing(_roofline(args.kv_bytes, cells[0].cpus)) as roofline:
        for _ in (bar := tqdm(range(rounds * _PATIENCE + 1), desc="rounds", unit="round", leave=False)):
            judging = min(cell.judging for cell in cells)
            bar.set_postfix_str(f"{judging} of {rounds} judge")
            if judging >= rounds:
                break
            for cell in cells:
                cell.measure(roofline)
            then()


def _own_rows(
    args: argparse.Namespace, part: str, cells: list[tuple[str, Shape]], cpus: list[int]
) -> list[dict[str, Any]]:
    """The rows of the R-engine. The cells take turns in each round, because they are compared with each other."""
    with ExitStack() as stack:
        filled = [stack.enter_context(closing(_Cell(args, part, *cell, cpus))) for cell in cells]
        _run_rounds(args, filled, args.rounds)
        return [cell.row() for cell in filled]


def _peer_rows(
    args: argparse.Namespace, kv_dtype: str, shape: Shape, cpus: list[int], names: list[str]
) -> list[dict[str, Any]]:
    """The rows of the peers, measured in turns with the R-engine: one shape, because all at once would take too much
    memory."""
    fills = [_measure_peers(args, kv_dtype, shape, cpus, names) for _ in range(args.fills)]
    cells = [cell for cell, _ in fills if cell]
    roof, ours = ([x for cell in cells for x in getattr(cell, of)[1:]] for of in ("roof", "rate"))
    rows = []
    for name, peer in fills[0][1].items():
        seconds = [s for _, peers in fills for s in peers[name].seconds[1:]]
        theirs = [peer.kv_bytes / s * 1e-9 for s in seconds]
        rates = [peer.sequences / s for s in seconds]
        row = {**cells[0].common, "sequences": peer.sequences, "isa": None, "peer": name, "format": peer.format}
        ratio = statistics.median(a / b for a, b in zip(ours, rates, strict=True))
        rows.append({**row, **_figures(args, roof, theirs, rates), "ours_to_peer": ratio})
    return rows


@dataclass(slots=True)
class _Timed:
    """The measurements of a peer whose cache was filled once; the first of `seconds` is a warm-up."""

    format: str
    sequences: int
    kv_bytes: int
    seconds: list[float] = field(default_factory=list)


def _measure_peers(
    args: argparse.Namespace, kv_dtype: str, shape: Shape, cpus: list[int], names: list[str]
) -> tuple[_Cell | None, dict[str, _Timed]]:
    """Fill the caches of the R-engine and of the peers once, and measure them in turns; None if no peer can run."""
    with ExitStack() as stack:
        peers: dict[str, AttentionPeer] = {}
        for name in names:
            how = {"scattered": args.scattered} if PEERS[name] is OtherVersionAttention else {}
            try:
                peer = PEERS[name](shape, kv_dtype, args.kv_bytes, len(cpus), **how)
            except ValueError as error:
                tqdm.write(f"{name} cannot run {kv_dtype}, head size {shape.head_size}: {error}", file=sys.stderr)
                continue
            peers[name] = stack.enter_context(closing(peer))
            peer.layer()
            check(peer, shape, kv_dtype)
        if not peers:
            return None, {}
        cell = stack.enter_context(closing(_Cell(args, "sweep", kv_dtype, shape, cpus)))
        timed = {name: _Timed(peer.format, peer.sequences, peer.kv_bytes) for name, peer in peers.items()}

        def measure() -> None:
            for name, peer in peers.items():
                timed[name].seconds.append(peer.layer())
                time.sleep(_SETTLE_SECONDS)

        _run_rounds(args, [cell], -(-args.rounds // args.fills), measure)
        return cell, timed


def _cell_in_cache(args: argparse.Namespace, kv_dtype: str, shape: Shape, cpu: int) -> dict[str, Any]:
    """The row of the kernel alone, which attends to the same pages again and again.

    The R-engine is left out because it sleeps between calls, and a core that slept is cold for calls of microseconds.
    """
    data, isa = Data.of(shape), args.isa or _native.isa_best()
    n_pages = shape.context // PAGE_TOKENS
    kv_bytes = n_pages * attention_kernels.chunk_bytes(kv_dtype, shape.head_size, shape.v_size, shape.v_in_k)
    pages = np.frombuffer(huge_pages(kv_bytes), np.uint8)[:kv_bytes]
    k, v = (np.ascontiguousarray(x[:, 0], np.float32) for x in (data.k, data.v))
    attention_kernels.kv_append(isa, kv_dtype, pages, 0, k, shape.v_size if shape.v_in_k else v)
    q = (data.q.astype(np.float32) * np.float32(shape.head_size**-0.5)).reshape(1, 1, shape.group, -1)
    acc = np.empty((*q.shape[:3], shape.v_size), np.float32)
    m, l = (np.empty(q.shape[:3], np.float32) for _ in range(2))  # noqa: E741
    passes = max(1, int(_IN_CACHE_SECONDS * 1e11 / kv_bytes))
    with pinned(cpu), closing(_roofline(kv_bytes, [cpu], passes)) as roofline:

        def attend(times: int) -> float:
            order, last = np.tile(np.arange(n_pages), times), n_pages * times * PAGE_TOKENS - 1
            start = time.perf_counter()
            attention_kernels.kv_attend(isa, kv_dtype, pages, order, 0, q, last, 0, acc, m, l, v_in_k=int(shape.v_in_k))
            return time.perf_counter() - start

        times = max(1, int(100 * _IN_CACHE_SECONDS / attend(100)))
        variant = _native.read_variants()[roofline.variant]
        roof: list[float] = []
        seconds: list[float] = []
        for _ in range(args.rounds):
            roof.append(roofline.gbps(passes))
            seconds.append(attend(times))
    row = _common("in-cache", kv_dtype, shape, 1)
    row |= {"sequences": 1, "isa": isa, "peer": None, "format": kv_dtype, "roofline_variant": variant}
    gbps = [times * kv_bytes / s * 1e-9 for s in seconds]
    return {**row, **_figures(argparse.Namespace(judge_below=0.0), roof, gbps, [times / s for s in seconds])}


#: The way in which a roofline was read that `raise_rooflines` has raised.
ANOTHER_CELL = "attention in another cell"


def raise_rooflines(rows: list[dict[str, Any]]) -> None:
    """Let no roofline be lower than what another cell with as many threads has read from memory in the same run: memory
    that read slowly while a cell was measured must not make its share larger."""
    for part in ("sweep", "one-thread"):
        of_part = [row for row in rows if row["part"] == part]
        fastest = max((row["gbps"] for row in of_part if row["peer"] is None), default=0.0)
        for row in of_part:
            if row["roofline_gbps"] < fastest:
                row |= {"roofline_gbps": fastest, "roofline_pct": 100 * row["gbps"] / fastest}
                row |= {"roofline_variant": ANOTHER_CELL}
                row["spread"]["roofline_pct"] = [100 * gbps / fastest for gbps in row["spread"]["gbps"]]


def _common(part: str, kv_dtype: str, shape: Shape, threads: int) -> dict[str, Any]:
    return {
        "part": part,
        "kv_dtype": kv_dtype,
        "group": shape.group,
        "context": shape.context,
        "head_size": shape.head_size,
        "v_size": shape.v_size,
        "v_in_k": shape.v_in_k,
        "index_heads": shape.index_heads,
        "index_topk": shape.index_topk,
        "kv_heads": shape.kv_heads,
        "threads": threads,
    }


def _figures(args: argparse.Namespace, roof: list[float], gbps: list[float], rate: list[float]) -> dict[str, Any]:
    """Medians over the judging rounds and over all rounds; the smallest and largest value of all rounds."""
    judging = [i for i, r in enumerate(roof) if r < args.judge_below] or range(len(roof))
    pct = [100 * g / r for g, r in zip(gbps, roof, strict=True)]
    series = {"gbps": gbps, "roofline_gbps": roof, "roofline_pct": pct, "seq_layers_per_s": rate}
    return {
        **{name: statistics.median(values[i] for i in judging) for name, values in series.items()},
        "rounds": len(roof),
        "judged_rounds": len(judging),
        "all_rounds": {name: statistics.median(values) for name, values in series.items()},
        "spread": {name: [min(values), max(values)] for name, values in series.items()},
    }
