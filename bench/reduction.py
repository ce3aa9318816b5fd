"""Sums over the ranks of an S-Part through shared memory, beside torch.distributed's gloo.

Ranks are processes of this machine. In each round every rank sums rows of activations over all ranks, again and again,
by each way in turns. A time is the median over all batches of calls, as rank 0 sees them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from fastdecode.bench.options import numbers, print_result
from fastdecode.daemon.option_values import count
from fastdecode.spart.ranks.reduction import Reduction, create_segment
from fastdecode.spart.served import TORCH_DTYPES
from fastdecode.spart.threads import set_threads

COMMAND = ("reduction", "microseconds of a sum over ranks, and of gloo's")

_BATCH = 10  # calls between two looks at the clock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-bench reduction`."""
    add = parser.add_argument
    add("--ranks", type=numbers, default=[2, 4], metavar="N,...", help="numbers of processes (2,4)")
    add("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64], metavar="N,...", help="(1,2,4,8,16,32,64)")
    add("--width", type=count, default=4096, help="numbers of a row")
    add("--dtype", choices=sorted(TORCH_DTYPES), default="fp32")
    add("--threads", type=count, default=1, help="of a rank")
    add("--seconds", type=float, default=0.1, help="duration of each way, number of rows and round")
    add("--rounds", type=count, default=5)


def run(args: argparse.Namespace) -> None:
    """Measure and print. Raises RuntimeError if a rank fails, ValueError for too many ranks."""
    rows = [row for n in args.ranks for row in _measure(n, args)]
    settings = {"width": args.width, "dtype": args.dtype, "threads": args.threads}
    print_result(args, {"cpus": len(os.sched_getaffinity(0)), **settings, "rows": rows}, _print_table)


def _print_table(result: dict[str, Any]) -> None:
    print(
        f"rows of {result['width']} in {result['dtype']}, {result['threads']} thread(s) a rank, {result['cpus']} CPUs"
    )
    for row in result["rows"]:
        speeds = f"{row['us']:9.1f} us{row['gloo_us']:12.1f} us with gloo{row['gloo_us'] / row['us']:8.1f}x"
        print(f"  {row['ranks']} ranks{row['rows']:>6} rows{speeds}")


def _measure(n_ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    segment = create_segment(n_ranks)
    context = multiprocessing.get_context("fork")  # importing torch takes seconds
    with tempfile.TemporaryDirectory(prefix="fastdecode-") as directory:
        ours, theirs = context.Pipe()
        ranks = []
        for rank in range(n_ranks):
            rendezvous = f"file://{directory}/store"
            ranks.append(context.Process(target=_rank, args=(theirs, segment, rank, n_ranks, rendezvous, args)))
            ranks[-1].daemon = True
            ranks[-1].start()
        theirs.close()
        os.close(segment)
        try:
            rows: list[dict[str, Any]] = ours.recv()
        except EOFError:
            raise RuntimeError(f"one of {n_ranks} ranks has failed") from None
        finally:
            for process in ranks:
                process.join(timeout=5.0)
                process.kill()
    return rows


def _rank(
    answers: Connection, segment: int, rank: int, n_ranks: int, rendezvous: str, args: argparse.Namespace
) -> None:
    """Sum as one of the ranks; rank 0 sends the medians."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    set_threads(args.threads)
    reduction = Reduction(segment, rank, n_ranks)
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=n_ranks)
    ways: dict[str, Callable[[torch.Tensor], object]] = {"us": reduction.sum_, "gloo_us": distributed.all_reduce}
    times: dict[tuple[int, str], list[float]] = {(rows, way): [] for rows in args.rows for way in ways}
    for timed in [False] + [True] * args.rounds:
        for (rows, way), of_cell in times.items():
            x = torch.zeros(rows, args.width, dtype=TORCH_DTYPES[args.dtype])
            batches = _time_batches(reduction, ways[way], x, args.seconds)
            of_cell.extend(batches if timed else [])
    distributed.destroy_process_group()
    if rank == 0:
        medians = {cell: 1e6 * statistics.median(of_cell) for cell, of_cell in times.items()}
        answers.send([{"ranks": n_ranks, "rows": n, **{way: medians[n, way] for way in ways}} for n in args.rows])


def _time_batches(
    reduction: Reduction, sum_: Callable[[torch.Tensor], object], x: torch.Tensor, seconds: float
) -> list[float]:
    """The seconds of a call in each batch of calls. Rank 0 decides when the time is over, by a sum."""
    times = []
    goes_on, end = torch.ones(1), time.perf_counter() + seconds
    while goes_on.item():
        begun = time.perf_counter()
        for _ in range(_BATCH):
            sum_(x)
        now = time.perf_counter()
        times.append((now - begun) / _BATCH)
        goes_on.fill_(float(reduction.rank == 0 and now < end))
        reduction.sum_(goes_on)
    return times
