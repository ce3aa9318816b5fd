"""Products of bf16 rows with a matrix of bf16 weights by kernels/linears, beside oneDNN's and the read roofline.

Every call multiplies with another copy of the matrix, so that weights come from memory, as they do in a step. Each
round takes the roofline, our products and oneDNN's in turns. A step calls products from C, into memory that is there.
Here Python calls ours into memory that is there, and the time of as many calls without rows is subtracted. For the
ratio to oneDNN's, ours are called through torch as oneDNN's are.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from tqdm import tqdm

from fastdecode.daemon.machine import usable_cpus
from fastdecode.daemon.roofline import Roofline
from fastdecode.spart.linears.base import Linear
from fastdecode.spart.linears.dense import PackedLinear, can_pack
from fastdecode.spart.linears.dense16 import Linear16, multiplies_bf16
from fastdecode.spart.threads import set_threads

_BYTES = 1 << 30  # of the copies of a matrix, and of the roofline's buffer: more than last-level caches hold
_OPERATIONS = 2e11  # of one engine's calls in a round, unless a single call has more


def shape(text: str) -> tuple[int, int]:
    """The outputs and inputs of "8192x2048". Raises ValueError."""
    outs, ins = (int(part) for part in text.split("x"))
    if min(outs, ins) < 1:
        raise ValueError(f"{text} has no weights")
    return outs, ins


def measure(shapes: Sequence[tuple[int, int]], batches: Sequence[int], rounds: int, threads: int) -> dict[str, Any]:
    """Medians over `rounds` rounds for each shape and number of rows. Raises RuntimeError on a CPU without products of
    bf16 pairs."""
    cpu = torch.device("cpu")
    for _, ins in shapes:
        if not (multiplies_bf16(cpu, ins) and can_pack(cpu, torch.bfloat16)):
            raise RuntimeError(f"this processor has no products of bf16 pairs for {ins} inputs")
    set_threads(threads)
    rows = []
    with closing(Roofline(_BYTES, usable_cpus()[:threads])) as roofline:
        roofline.choose(passes=4)  # long readings, so that chance chooses less
        for outs, ins in shapes:
            weight = torch.randn(outs, ins).bfloat16()
            n = math.ceil(_BYTES / weight.nbytes)
            ours = [Linear16(weight, None, torch.bfloat16) for _ in range(n)]
            theirs = [PackedLinear(weight) for _ in range(n)]
            for batch in tqdm(batches, desc=f"{outs} x {ins}", unit="batch", leave=False):
                rows.append(_row(roofline, ours, theirs, batch, outs, ins, rounds) | {"outs": outs, "ins": ins})
    return {"threads": threads, "isa": ours[0].native[0].isa, "rows": rows}


def _row(
    roofline: Roofline, ours: Sequence[Linear16], theirs: Sequence[Linear], batch: int, outs: int, ins: int, rounds: int
) -> dict[str, Any]:
    x = torch.randn(batch, ins).bfloat16()
    weights = outs * ins  # without the zeros that fill panels
    calls = max(1, min(len(ours), int(_OPERATIONS / (2 * batch * weights))))
    _seconds(theirs[:1], x)  # oneDNN compiles a kernel
    read, in_step, our_seconds, their_seconds = [], [], [], []
    for _ in range(rounds):
        read.append(roofline.gbps())
        in_step.append(_seconds_in_step(ours[:calls], x, len(roofline.cpus)))
        our_seconds.append(_seconds(ours[:calls], x))
        their_seconds.append(_seconds(theirs[:calls], x))
    seconds, others = statistics.median(in_step), statistics.median(their_seconds)
    ratios = [b / a for a, b in zip(our_seconds, their_seconds, strict=True)]
    return {
        "batch": batch,
        "seconds": seconds,
        "gbps": 2e-9 * weights / seconds,
        "roofline_gbps": statistics.median(read),
        "tflops": 2e-12 * batch * weights / seconds,
        "onednn_seconds": others,
        "speedup": statistics.median(ratios),
        "speedups": [min(ratios), max(ratios)],
    }


def _seconds_in_step(linears: Sequence[Linear16], x: torch.Tensor, threads: int) -> float:
    """Seconds of one linear's product, as a step calls it."""
    rows, y = x.view(torch.int16).numpy(), linears[0](x).view(torch.int16).numpy()
    no_rows, no_outputs = rows[:0], y[:0]
    products = [linear.native[0].run for linear in linears]
    start = time.perf_counter()
    for product in products:
        product(rows, y, threads)
    end = time.perf_counter()
    for product in products:
        product(no_rows, no_outputs, threads)
    return (end - start - (time.perf_counter() - end)) / len(linears)


def _seconds(linears: Sequence[Linear], x: torch.Tensor) -> float:
    """Seconds of one linear's product, through torch."""
    start = time.perf_counter()
    for linear in linears:
        linear(x)
    return (time.perf_counter() - start) / len(linears)


def print_table(result: dict[str, Any]) -> None:
    """Print what `measure` returns."""
    print(f"products of bf16 rows and weights, {result['isa']}, {result['threads']} thread(s)")
    for row in result["rows"]:
        share = row["gbps"] / row["roofline_gbps"]
        low, high = row["speedups"]
        print(
            f"  {row['outs']:>6} x {row['ins']:<6}{row['batch']:>5} rows{1e3 * row['seconds']:10.3f} ms"
            f"{row['gbps']:7.1f} GB/s, {share:4.0%} of the roofline{row['tflops']:7.2f} TFLOPS"
            f"{row['speedup']:6.2f}x oneDNN [{low:.2f}-{high:.2f}]"
        )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The products of `fastdecode-bench spart --products`."""
    batches = args.batch or [1, 8, 16, 32, 128, 512, 2048]
    return measure(args.products, batches, args.rounds, args.threads or torch.get_num_threads())
