"""The cost of a layer to the S-node's thread, by the number of links: copying the rows out, ringing every link, and
gathering the O rows of all.

Each link leads to an R-engine of one thread in this process, over shared memory. A mini-batch of `--rows` rows is
spread over the links. The times are processor time of the calling thread. The time that the R-engines work is left out:
the replies have arrived before they are gathered. R-engines that are asleep must be woken, each by a system call;
`--spin-us` sets how long idle R-engines stay awake.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from tqdm import tqdm

from fastdecode.bench.options import numbers, print_result
from fastdecode.kernels._native import REngine, page_bytes
from fastdecode.region.contract import KV_DTYPES, ROW_ATTEND, ROW_DTYPE
from fastdecode.region.geometry import Geometry, geometry_tuple
from fastdecode.region.region import Region
from fastdecode.transports._native import Port, StepGroup

COMMAND = ("links", "what a layer costs the S-node's thread, by the number of links")

_LAYERS = 64
_TIMEOUT = 60.0
_SETTLE_S = 0.002


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--links",
        type=numbers,
        default=[1, 8, 64],
        metavar="N,...",
        help="numbers of links; each must divide the rows",
    )
    parser.add_argument("--rows", type=int, default=128, help="rows of the mini-batch")
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--spin-us", type=int, default=0, help="microseconds that an idle R-engine stays awake")
    parser.add_argument("--rounds", type=int, default=5, help="steps of 64 layers with each number of links")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


class _Links:
    """`n` links that share a mini-batch, each row the next token of a sequence of its own."""

    def __init__(self, n: int, args: argparse.Namespace):
        """Raises ValueError, OSError, MemoryError."""
        if not 1 <= n <= args.rows or args.rows % n:
            raise ValueError(f"{args.rows} rows cannot be spread evenly over {n} links")
        self.per_link = args.rows // n
        geometry = Geometry(1, self.per_link, _LAYERS, args.heads, args.kv_heads, args.head_size, "fp16")
        numbers, dtype = geometry_tuple(geometry), KV_DTYPES.index("int8")
        self.steps = 0
        elements = (args.heads, 2 * args.kv_heads, args.heads)
        self.rows = [np.ones((args.rows, heads * args.head_size), np.float16) for heads in elements]
        with ExitStack() as stack:
            self.ports = []
            self.links = []
            for _ in range(n):
                region = stack.enter_context(closing(Region.create(geometry)))
                memory = 2 * self.per_link * page_bytes(numbers, dtype)
                engine = stack.enter_context(closing(REngine(1, memory, None, None, args.spin_us)))
                link = engine.add_link(region.view, numbers, dtype, self.per_link, self.per_link, 1.0, (0,) * _LAYERS)
                self.links.append(stack.enter_context(closing(link)))
                port = Port(region.view, numbers, args.spin_us, wake_fd=link.eventfd)
                self.ports.append(stack.enter_context(closing(port)))
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def step(self) -> list[tuple[float, float]]:
        """Microseconds to ring and to gather each layer. Raises RuntimeError."""
        table = np.zeros(self.per_link, ROW_DTYPE)
        table["seq_index"], table["tag"], table["n_rows"] = np.arange(self.per_link), 1, 1
        table["pos"], table["flags"] = self.steps, ROW_ATTEND
        members = [
            (port, table.view(np.uint8), i * self.per_link, (i + 1) * self.per_link, 0, 0)
            for i, port in enumerate(self.ports)
        ]
        group = StepGroup(0, members, *(rows.view(np.uint8) for rows in self.rows))
        _check(group.arm())
        _check(group.wait(_TIMEOUT, rows=False))
        taken = []
        for layer in range(_LAYERS):
            start = time.thread_time_ns()
            failures = group.ring(layer)
            rung = time.thread_time_ns()
            _check(failures)
            time.sleep(_SETTLE_S)
            _check(group.wait(_TIMEOUT, rows=False))  # the replies that have not arrived yet
            begin = time.thread_time_ns()
            failures = group.wait(_TIMEOUT)
            end = time.thread_time_ns()
            _check(failures)
            taken.append(((rung - start) / 1e3, (end - begin) / 1e3))
        group.disarm()
        self.steps += 1
        return taken


def _check(failures: list[tuple[int, int, str]] | None) -> None:
    if failures:
        raise RuntimeError(f"link {failures[0][0]} has failed: {failures[0][2]}")


def run(args: argparse.Namespace) -> None:
    taken: dict[int, list[tuple[float, float]]] = {n: [] for n in args.links}
    with ExitStack() as stack:
        every = {n: stack.enter_context(closing(_Links(n, args))) for n in args.links}
        for links in every.values():
            links.step()  # touches memory that is new
        for _ in tqdm(range(args.rounds), desc="rounds", unit="round"):
            for n, links in every.items():
                taken[n] += links.step()
    rows: list[dict[str, Any]] = []
    for n, times in taken.items():
        ring, gather = (statistics.median(part) for part in zip(*times, strict=True))
        both = sorted(a + b for a, b in times)
        rows.append({"links": n, "ring_us": ring, "gather_us": gather, "p10_us": both[len(both) // 10],
                     "p50_us": statistics.median(both), "p90_us": both[len(both) * 9 // 10]})  # fmt: skip
    print_result(args, {"rows_of_the_batch": args.rows, "spin_us": args.spin_us, "links": rows}, _print_table)


def _print_table(result: dict[str, Any]) -> None:
    rows, spin_us = result["rows_of_the_batch"], result["spin_us"]
    print(f"host time of a layer, us; {rows} rows, R-engines awake for {spin_us} us")
    print(f"{'links':>6} {'ring':>9} {'gather':>9} {'both p10':>9} {'p50':>9} {'p90':>9}")
    for row in result["links"]:
        print(f"{row['links']:6} " + " ".join(f"{row[key]:9.1f}" for key in list(row)[1:]))
