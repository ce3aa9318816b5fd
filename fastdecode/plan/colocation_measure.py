"""Measures what the S-Part and the R-nodes of this machine cost each other, over full caches (see colocation.py)."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass

from fastdecode.bench.decoding_in_parts import DecodingInParts
from fastdecode.daemon.decoding import USUAL_TEMPERATURE, DecodeShape, Round
from fastdecode.plan.children import r_node
from fastdecode.plan.colocation import Colocation
from fastdecode.plan.model import PlannedModel
from fastdecode.region.contract import PAGE_TOKENS, blocks_for
from fastdecode.spart import Model

_STEPS = 8  # of a round
_LEAST_ROUNDS = 3
_HEADROOM = 1.25  # KV-cache of an R-node beside what its sequences need
_MORE_MEMORY = 256 << 20


@dataclass(frozen=True, slots=True)
class ColocatedLoad:
    """Sequences that decode over R-nodes on this machine: `rows` in each mini-batch."""

    rows: int
    context: int
    kv_dtype: str
    r_nodes: int = 1

    @classmethod
    def from_bytes(cls, model: PlannedModel, kv_dtype: str, kv_bytes: float, rows: int) -> ColocatedLoad:
        """`rows` sequences, or more if their contexts would be beyond the model's, that read about `kv_bytes` a
        step."""
        tokens = kv_bytes / model.token_bytes(kv_dtype)
        longest = model.max_positions - _STEPS - 1
        rows = max(rows, -int(-tokens // longest))
        return cls(rows, max(PAGE_TOKENS, int(tokens / rows)), kv_dtype)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Seconds of a step, the medians or the least of all rounds."""

    step: float
    waited: float  # for R-nodes
    s_alone: float = 0.0  # the S-Part of all mini-batches, every answer at once
    r_alone: float = 0.0  # the R-nodes, with a call of each mini-batch in progress


async def measure_colocation(
    planned: PlannedModel, model: Model, load: ColocatedLoad, threads: int, seconds: float, in_turns: bool, least: bool
) -> Colocation:
    """Decode `load` for about `seconds` over R-nodes with `threads` threads in all, in turns or side by side, with two
    mini-batches. `least`: the fastest round counts, else the median. Raises RuntimeError, TransportError."""
    r = await _rounds(planned, model, load, threads, seconds, in_turns, least)
    read = load.rows * planned.read_tokens(load.context + _STEPS / 2) * planned.token_bytes(load.kv_dtype)
    if in_turns:
        waited, s_part, lost = r.waited, r.step - r.waited, 0.0
    else:
        waited, s_part = r.r_alone / 2, r.s_alone / 2
        lost = (r.step - max(r.s_alone, r.r_alone)) / min(r.s_alone, r.r_alone)
    return Colocation(
        r_nodes=load.r_nodes,
        kv_dtype=load.kv_dtype,
        group=planned.group,
        kv_bytes=read,
        waited=max(waited, 1e-9),
        layers=planned.n_layers,
        carried=load.rows * (2 * planned.q_bytes + planned.kv_row_bytes),
        parameters=planned.parameters,
        rows=load.rows,
        s_part=s_part,
        lost=min(1.0, max(0.0, lost)),
    )


async def _rounds(
    planned: PlannedModel, model: Model, load: ColocatedLoad, threads: int, seconds: float, in_turns: bool, least: bool
) -> Rounds:
    mini_batches = 1 if in_turns else 2
    sequences = mini_batches * load.rows
    pages = blocks_for(load.context + _STEPS + 1)
    memory = sequences * pages * PAGE_TOKENS * planned.token_bytes(load.kv_dtype) / load.r_nodes
    best = min if least else statistics.median
    with ExitStack() as stack:
        each = max(1, threads // load.r_nodes), int(_HEADROOM * memory) + _MORE_MEMORY
        urls = [stack.enter_context(r_node("shm", *each)) for _ in range(load.r_nodes)]
        shape = DecodeShape(sequences, load.context, _STEPS, mini_batches, load.kv_dtype, USUAL_TEMPERATURE)
        decoding = await DecodingInParts.open(model, urls, shape)
        try:
            await decoding.fill()
            await decoding.split_round()
            splits: list[Round] = []
            alone: list[tuple[float, float]] = []
            end = time.perf_counter() + seconds
            while len(splits) < _LEAST_ROUNDS or time.perf_counter() < end:
                splits.append(await decoding.split_round())
                if not in_turns:
                    alone.append((await decoding.s_round(), await decoding.r_round()))
        finally:
            await decoding.close()
    # A step and its waiting come from one round; the S-Part and the R-nodes alone are two measurements.
    step, waited, _ = min(splits) if least else (statistics.median(s) for s in zip(*splits, strict=True))
    s_alone, r_alone = (best(s) for s in zip(*alone, strict=True)) if alone else (0.0, 0.0)
    return Rounds(step / _STEPS, waited / _STEPS, s_alone / _STEPS, r_alone / _STEPS)
