"""StatePool: the states of all sequences, which stay in the S-Part's memory while their K and V are on R-nodes.

A sequence has a slot from its first chunk to its last. A step reads and writes the slots of its chunks: those of one
row together (gather, update, scatter), those of several rows one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fastdecode.spart.checkpoints.config import DeltaRule
from fastdecode.spart.step.batch import Chunk
from fastdecode.spart.step.step_table import StepTable


class StatePool:
    """The states of `n_slots` sequences in all blocks that have one.

    `inputs` [blocks, slots, kernel - 1, channels] in the activation dtype are the last inputs of each convolution;
    `sums` [blocks, slots, v_heads, k_size, v_size] in fp32 are the products of keys and values that a rule has summed.
    """

    def __init__(self, rule: DeltaRule, n_slots: int, device: torch.device, dtype: torch.dtype):
        blocks, self.n_slots = len(rule.blocks), n_slots
        self.inputs = torch.zeros(blocks, n_slots, rule.kernel - 1, rule.channels, device=device, dtype=dtype)
        self.sums = torch.zeros(blocks, n_slots, rule.v_heads, rule.k_size, rule.v_size, device=device)
        self._lengths: list[int | None] = [None] * n_slots  # tokens that a slot's state has seen; None: not known

    def begin(self, chunk: Chunk) -> None:
        """Take the slot of a chunk for a step: the state of a sequence that begins is zero.

        Raises ValueError if the pool has no such slot, or its state is not that of the tokens before the chunk.
        """
        slot = chunk.state
        if not 0 <= slot < self.n_slots:
            raise ValueError(f"a chunk has state slot {slot}, not one of the pool's {self.n_slots}")
        if chunk.pos == 0:
            self.inputs[:, slot] = 0
            self.sums[:, slot] = 0
        elif self._lengths[slot] != chunk.pos:
            raise ValueError(f"a sequence goes on at {chunk.pos}, its state is that of {self._lengths[slot]} tokens")
        self._lengths[slot] = None

    def record(self, slot: int, length: int) -> None:
        """Record that a slot's state is that of `length` tokens."""
        self._lengths[slot] = length


class StateRows:
    """A step's rows in the pool. `prompts` are the rows and the slot of each chunk of several rows."""

    def __init__(self, pool: StatePool, chunks: Sequence[Chunk], starts: Sequence[int], table: StepTable):
        """`starts`: the first row of each chunk. Raises ValueError; see StatePool.begin."""
        for chunk in chunks:
            pool.begin(chunk)
        self.pool = pool
        self.prompts: list[tuple[slice, int]] = []
        single, slots = [], []
        for chunk, start in zip(chunks, starts, strict=False):
            if len(chunk.tokens) == 1:
                single.append(start)
                slots.append(chunk.state)
            else:
                self.prompts.append((slice(start, start + len(chunk.tokens)), chunk.state))
        table.add("state rows", np.array(single, np.int64))
        table.add("state slots", np.array(slots, np.int64))
        self.single: torch.Tensor
        self.slots: torch.Tensor

    def on_device(self, uploaded: dict[str, torch.Tensor]) -> None:
        """Take the rows and slots of the chunks of one row, int64 [chunks] each, from the step's table."""
        self.single, self.slots = uploaded["state rows"], uploaded["state slots"]
