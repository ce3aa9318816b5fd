"""The R-engine's cost of handing a call to its threads, by their number, measured with calls that read no KV-cache.

A call of one item is done by thread 0 alone. A call of an item for each thread appends as many rows as the engine cuts
into that many items, which is hardly any work. The same rows on an engine of one thread are the work alone. The cost of
handing out is the time of the cut call, less the work divided by the cores that the threads can have. This cost is
computed from the tenth percentiles, which other programs on the machine disturb least. With more threads than cores,
the figures contain the time in which threads wait for cores.

A second table is the time in which the engine takes a step: it checks the row table and plans the work of the layers,
on thread 0, before it answers the S-node. Each of the step's sequences decodes one token.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from tqdm import tqdm

from fastdecode.bench.options import numbers, print_result
from fastdecode.bench.rpart import wait
from fastdecode.kernels._native import MAX_THREADS, REngine, page_bytes
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE
from fastdecode.region.geometry import Geometry, geometry_tuple
from fastdecode.region.region import Region
from fastdecode.transports._native import Port

COMMAND = ("rpart", "cost of taking a step, and of handing a call to the R-engine's threads, by their number")

_LAYERS, _KV_HEADS, _HEAD_SIZE = 64, 8, 8
#: Rows that one item appends, for all KV heads: the least that kernels/engine/plan.c makes an item of.
_ROWS_AN_ITEM = 512 // 4 // _KV_HEADS
_TAG = 1
#: Sequences and cached tokens of each of the steps that are taken.
_STEPS_TAKEN = [(n, context) for n in (1, 32, 256, 1024) for context in (1024, 8192)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads",
        type=numbers,
        default=[1, 2, 4, 8, 16, 32, 64, 128, 256],
        metavar="N,...",
        help="numbers of threads; more than there are cores is allowed",
    )
    parser.add_argument("--spin-us", type=int, default=100, help="microseconds that an idle thread spins")
    parser.add_argument("--steps", type=int, default=20, help=f"steps of {_LAYERS} calls for each figure and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


class _Appends:
    """An R-engine that is asked to append `rows` rows to a sequence, layer by layer."""

    def __init__(self, threads: int, spin_us: int, rows: int):
        """Raises ValueError, MemoryError."""
        geometry = Geometry(1, rows, _LAYERS, _KV_HEADS, _KV_HEADS, _HEAD_SIZE, "fp16")
        numbers = geometry_tuple(geometry)
        dtype = KV_DTYPES.index("fp16")
        n_pages = -(-rows // PAGE_TOKENS)
        with ExitStack() as stack:
            region = stack.enter_context(closing(Region.create(geometry)))
            engine = stack.enter_context(
                closing(REngine(threads, n_pages * page_bytes(numbers, dtype), None, None, spin_us))
            )
            windows = (0,) * _LAYERS
            self._link = stack.enter_context(
                closing(engine.add_link(region.view, numbers, dtype, n_pages, 1, 1.0, windows))
            )
            self._port = stack.enter_context(closing(Port(region.view, numbers, spin_us, wake_fd=self._link.eventfd)))
            self._stack = stack.pop_all()
        self._rows = rows
        self._table = np.zeros(1, ROW_DTYPE)
        self._table["tag"], self._table["n_rows"] = _TAG, rows

    def close(self) -> None:
        self._stack.close()

    def step(self) -> list[float]:
        """Microseconds of each call of a step. Raises RuntimeError."""
        self._port.arm(0, self._table.view(np.uint8))
        wait(self._port)
        taken = []
        for layer in range(_LAYERS):
            start = time.perf_counter()
            self._port.ring(0, layer)
            wait(self._port)
            taken.append((time.perf_counter() - start) * 1e6)
        self._port.disarm(0)
        self._link.free(0, _TAG)
        return taken


def run(args: argparse.Namespace) -> None:
    for n in args.threads:
        if not 1 <= n <= MAX_THREADS:
            raise ValueError(f"{n} threads are not within 1..{MAX_THREADS}")
    cores = len(os.sched_getaffinity(0))
    rows = [_row(n, cores, args) for n in tqdm(args.threads, desc="threads", unit="number")]
    taking = [_taking(n, context, args) for n, context in tqdm(_STEPS_TAKEN, desc="steps", unit="shape")]
    result = {"cores": cores, "spin_us": args.spin_us, "rows": rows, "taking_a_step": taking}
    print_result(args, result, _print_tables)


def _print_tables(result: dict[str, Any]) -> None:
    print("taking a step, us (p10, p50)")
    print(f"{'sequences':>9} {'tokens each':>11}")
    for row in result["taking_a_step"]:
        print(f"{row['sequences']:9} {row['context']:11} {row['p10']:9.1f}, {row['p50']:.1f}")
    print(f"a call without KV, us (p10, p50); {result['cores']} cores")
    print(f"{'threads':>7} {'one item':>16} {'an item a thread':>18} {'its work alone':>15} {'handing out':>12}")
    for row in result["rows"]:
        one, each = (f"{row[name]['p10']:.1f}, {row[name]['p50']:.1f}" for name in ("one_item", "item_a_thread"))
        print(f"{row['threads']:7} {one:>16} {each:>18} {row['work']['p10']:15.1f} {row['handing_out_us']:12.1f}")


def _taking(sequences: int, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds in which an engine takes a step of sequences that have `context` tokens, all of them shared."""
    geometry = Geometry(1, max(sequences, context), 1, 1, 1, _HEAD_SIZE, "fp16")
    numbers, dtype = geometry_tuple(geometry), KV_DTYPES.index("fp16")
    n_pages = context // PAGE_TOKENS + sequences
    table = np.zeros(sequences, ROW_DTYPE)
    table["seq_index"], table["tag"], table["pos"], table["n_rows"] = np.arange(sequences), _TAG, context, 1
    table["flags"] = ROW_ATTEND
    taken = []
    with ExitStack() as stack:
        region = stack.enter_context(closing(Region.create(geometry)))
        engine = stack.enter_context(
            closing(REngine(1, n_pages * page_bytes(numbers, dtype), None, None, args.spin_us))
        )
        link = stack.enter_context(closing(engine.add_link(region.view, numbers, dtype, n_pages, sequences, 1.0, (0,))))
        port = stack.enter_context(closing(Port(region.view, numbers, args.spin_us, wake_fd=link.eventfd)))
        _step(port, np.array([(0, _TAG, 0, context, 0, 0)], ROW_DTYPE))
        for index in range(1, sequences):
            link.fork(0, _TAG, index, _TAG, context)
        for _ in range(args.steps * args.rounds):
            taken.append(_step(port, table))
            for index in range(sequences):
                link.trim(index, _TAG, context)
    p10, p50 = np.percentile(taken, [10, 50]).tolist()
    return {"sequences": sequences, "context": context, "p10": p10, "p50": p50}


def _step(port: Port, table: np.ndarray) -> float:
    """Run a step of one layer; returns the microseconds in which the engine took it. Raises RuntimeError."""
    start = time.perf_counter()
    port.arm(0, table.view(np.uint8))
    wait(port)
    taken = (time.perf_counter() - start) * 1e6
    port.ring(0, 0)
    wait(port)
    port.disarm(0)
    return taken


def _row(threads: int, cores: int, args: argparse.Namespace) -> dict[str, Any]:
    shapes = {"one_item": (threads, 1), "item_a_thread": (threads, _ROWS_AN_ITEM * threads)}
    shapes["work"] = (1, _ROWS_AN_ITEM * threads)
    taken: dict[str, list[float]] = {name: [] for name in shapes}
    for _ in range(args.rounds):
        for name, (n, rows) in shapes.items():
            with closing(_Appends(n, args.spin_us, rows)) as appends:
                appends.step()
                for _ in range(args.steps):
                    taken[name] += appends.step()
    row: dict[str, Any] = {"threads": threads}
    for name, times in taken.items():
        row[name] = dict(zip(("p10", "p50", "p90"), np.percentile(times, [10, 50, 90]).tolist(), strict=True))
    row["handing_out_us"] = row["item_a_thread"]["p10"] - row["work"]["p10"] / min(threads, cores)
    return row
