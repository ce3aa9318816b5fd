"""Measures what the S-Part and the R-nodes of this machine cost each other, over full caches (see colocation.py)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fastdecode.bench.decoding_in_parts import DecodingInParts
from fastdecode.daemon.decoding import USUAL_TEMPERATURE, DecodeShape, Round
from fastdecode.plan.children import r_node
from fastdecode.plan.colocation import Colocation
from fastdecode.plan.model import PlannedModel
from fastdecode.region.contract import PAGE_TOKENS, blocks_for
from fastdecode.spart import Model

STEPS = 8  # of a round
_LEAST_ROUNDS = 3
_HEADROOM = 1.25  # KV-cache of an R-node beside what its sequences need
_MORE_MEMORY = 256 << 20


@dataclass(frozen=True, slots=True)
class ColocatedLoad:
    """Sequences that decode over R-nodes on this machine: `batch` in each mini-batch."""

    batch: int
    context: int
    kv_dtype: str
    r_nodes: int = 1

    @classmethod
    def from_bytes(cls, model: PlannedModel, kv_dtype: str, kv_bytes: float, batch: int) -> ColocatedLoad:
        """`batch` sequences, or more if their contexts would be beyond the model's, that read about `kv_bytes` a
        step."""
        tokens = kv_bytes / model.token_bytes(kv_dtype)
        longest = model.max_positions - STEPS - 1
        batch = max(batch, -int(-tokens // longest))
        return cls(batch, max(PAGE_TOKENS, int(tokens / batch)), kv_dtype)

    def kv_bytes(self, model: PlannedModel) -> float:
        """KV-cache of a mini-batch."""
        return self.batch * blocks_for(self.context + STEPS + 1) * PAGE_TOKENS * model.token_bytes(self.kv_dtype)

    def read_tokens(self, model: PlannedModel) -> float:
        """Cached tokens that a step of a mini-batch reads, as an average over a round."""
        return self.batch * model.read_tokens(self.context + STEPS / 2)

    def shape(self, mini_batches: int) -> DecodeShape:
        """The load as a decoding system takes it."""
        sequences = mini_batches * self.batch
        return DecodeShape(sequences, self.context, STEPS, mini_batches, self.kv_dtype, USUAL_TEMPERATURE)

    @contextmanager
    def nodes(self, model: PlannedModel, threads: int, mini_batches: int) -> Iterator[list[str]]:
        """The URLs of R-nodes that are started for the load, with `threads` threads in all."""
        memory = int(_HEADROOM * mini_batches * self.kv_bytes(model) / self.r_nodes) + _MORE_MEMORY
        each = max(1, threads // self.r_nodes), memory
        with ExitStack() as stack:
            yield [stack.enter_context(r_node("shm", *each)) for _ in range(self.r_nodes)]


async def measure_colocation(
    planned: PlannedModel, model: Model, load: ColocatedLoad, threads: int, seconds: float, in_turns: bool, least: bool
) -> Colocation:
    """Decode `load` for about `seconds` over R-nodes with `threads` threads in all, in turns or side by side, with two
    mini-batches. `least`: the fastest round counts, else the median. Raises RuntimeError, TransportError."""
    mini_batches = 1 if in_turns else 2
    splits: list[Round] = []
    alone: list[tuple[float, float]] = []  # seconds of the S-Part with every answer at once, and of the R-nodes
    with load.nodes(planned, threads, mini_batches) as urls:
        decoding = await DecodingInParts.open(model, urls, load.shape(mini_batches))
        try:
            await decoding.fill()
            await decoding.split_round()
            end = time.perf_counter() + seconds
            while len(splits) < _LEAST_ROUNDS or time.perf_counter() < end:
                splits.append(await decoding.split_round())
                if not in_turns:
                    alone.append((await decoding.s_round(), await decoding.r_round()))
        finally:
            await decoding.close()
    # A step and its waiting come from one round; the S-Part and the R-nodes alone are two measurements.
    step, waited, _ = min(splits) if least else (statistics.median(s) for s in zip(*splits, strict=True))
    s_part, lost = step - waited, 0.0
    if not in_turns:
        s_alone, r_alone = ((min if least else statistics.median)(s) for s in zip(*alone, strict=True))
        waited, s_part = r_alone / 2, s_alone / 2
        lost = (step - max(s_alone, r_alone)) / min(s_alone, r_alone)
    return Colocation(
        r_nodes=load.r_nodes,
        kv_dtype=load.kv_dtype,
        group=planned.group,
        kv_bytes=load.read_tokens(planned) * planned.token_bytes(load.kv_dtype),
        waited=max(waited / STEPS, 1e-9),
        layers=planned.n_layers,
        carried=load.batch * (2 * planned.q_bytes + planned.kv_row_bytes),
        parameters=planned.parameters,
        rows=load.batch,
        s_part=s_part / STEPS,
        lost=min(1.0, max(0.0, lost)),
    )
