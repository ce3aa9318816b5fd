"""The update of states of the gated delta rule by decoding rows, beside the speed at which memory is read and written.

The states of a block are more than caches hold. A round advances each by a token, in one call, and multiplies the same
memory in place: also a read and a write of each number, with next to no arithmetic. GB/s count both directions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.daemon.option_values import count
from fastdecode.spart.checkpoints.config import DeltaRule
from fastdecode.spart.states.delta import DeltaBlock, DeltaWeights, state_tensors
from fastdecode.spart.states.pool import StatePool, StateRows
from fastdecode.spart.step.batch import Chunk
from fastdecode.spart.step.step_table import StepTable
from fastdecode.spart.threads import set_threads

COMMAND = ("states", "GB/s of the update of states by decoding rows, and its share of memory's speed")

_WARM_UP = 2  # rounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-bench states`."""
    add = parser.add_argument
    add("--k-heads", type=count, default=16)
    add("--v-heads", type=count, default=32)
    add("--head-size", type=count, default=128)
    add("--sequences", action="append", type=count, help="rows of a call (repeatable); default: 1, 8 and 32")
    add("--bytes", type=count, default=512 << 20, help="of all states (512 MiB); more than caches hold")
    add("--threads", type=count, help="default: all cores")
    add("--rounds", type=count, default=9)


def run(args: argparse.Namespace) -> None:
    """Measure and print. Raises ValueError."""
    threads = args.threads or len(os.sched_getaffinity(0))
    set_threads(threads)
    size = args.head_size
    rule = DeltaRule(frozenset([0]), args.k_heads, args.v_heads, size, size, 4, by_head=False)
    cell = _States(rule, args.bytes)
    rows = [cell.measure(n, args.rounds) for n in args.sequences or [1, 8, 32]]
    result = {"threads": threads, "isa": cell.block.isa or "torch", "state_bytes": cell.state_bytes, "rows": rows}
    print_result(args, result, _print_table)


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['threads']} thread(s), {result['isa']}, a state of {result['state_bytes']} bytes")
    for row in result["rows"]:
        share = f"{row['memory_pct']:.0f} % of {row['memory_gbps']:.1f} GB/s"
        print(f"  {row['sequences']:>4} sequences a call {row['gbps']:8.1f} GB/s, {share}")


class _States:
    """The states of one block."""

    def __init__(self, rule: DeltaRule, n_bytes: int):
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self._rule = rule
        same: Any = _Same()
        weights = DeltaWeights(
            same, random(rule.channels, 1, rule.kernel), -random(rule.v_heads).abs(), random(rule.v_heads),
            torch.ones(rule.v_size), same,
        )  # fmt: skip
        self.block = DeltaBlock(rule, weights, 1e-6, 0, torch.float32)
        self.state_bytes = rule.state_bytes(4)
        n_slots = max(1, n_bytes // self.state_bytes)
        self._pool = StatePool([state_tensors(rule)], n_slots, torch.device("cpu"), torch.float32)
        self._pool.clear()

    def measure(self, sequences: int, rounds: int) -> dict[str, Any]:
        """The medians of some rounds. Raises ValueError if there are fewer states than `sequences`."""
        n_slots = self._pool.n_slots
        if sequences > n_slots:
            raise ValueError(f"--bytes has room for {n_slots} states, fewer than the {sequences} of a call")
        starts = range(0, n_slots - sequences + 1, sequences)
        calls = [self._rows(range(start, start + sequences)) for start in starts]
        rule = self._rule
        y = torch.randn(sequences, rule.channels + rule.v_width + 2 * rule.v_heads)
        sums = self._pool.blocks[0][1]
        updates, scalings = [], []
        for _ in tqdm(range(_WARM_UP + rounds), desc=f"{sequences} sequences", unit="round"):
            begun = time.perf_counter()
            for rows in calls:
                self.block(y, rows, None)
            updated = time.perf_counter()
            sums.mul_(0.999)
            updates.append(updated - begun)
            scalings.append(time.perf_counter() - updated)
        gbps = 2e-9 * len(calls) * sequences * self.state_bytes / statistics.median(updates[_WARM_UP:])
        memory = 2e-9 * sums.nbytes / statistics.median(scalings[_WARM_UP:])
        return {"sequences": sequences, "gbps": gbps, "memory_gbps": memory, "memory_pct": 100 * gbps / memory}

    def _rows(self, slots: range) -> StateRows:
        """One row for each of some slots."""
        self._pool.pretend(1)
        chunks = [Chunk(0, i, 1, 1, [0], False, None, state=slot) for i, slot in enumerate(slots)]
        table = StepTable()
        rows = StateRows(self._pool, chunks, range(len(chunks)), table)
        rows.on_device(table.upload(torch.device("cpu")))
        return rows


class _Same:
    """A Linear that changes nothing: only the rule is measured."""

    native = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x
