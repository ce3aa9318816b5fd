"""StatePool: the states of all sequences, which stay in the S-Part's memory while their K and V are on R-nodes.

A sequence has a slot from its first chunk to its last. A step reads and writes the slots of its chunks: those of one
row together (gather, update, scatter), those of several rows one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fastdecode.spart.step.batch import Chunk
from fastdecode.spart.step.step_table import StepTable


class StateTensor(NamedTuple):
    """One tensor of a state. `dtype` None: that of activations."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None


class StatePool:
    """The states of `n_slots` sequences. `blocks` has the tensors of each block that keeps states, [slots, *shape]."""

    def __init__(self, blocks: Iterable[Sequence[StateTensor]], n_slots: int, device: torch.device, dtype: torch.dtype):
        """Raises ValueError without a slot."""
        if n_slots < 1:
            raise ValueError("the layers of the model keep states, so its S-Part needs state_slots")
        self.n_slots = n_slots
        self.blocks = [
            [torch.zeros(n_slots, *one.shape, device=device, dtype=one.dtype or dtype) for one in tensors]
            for tensors in blocks
        ]
        self._lengths: list[int | None] = [None] * n_slots  # tokens that a slot's state has seen; None: not known

    def begin(self, chunk: Chunk) -> None:
        """Take the slot of a chunk for a step: the state of a sequence that begins is zero.

        Raises ValueError if the pool has no such slot, or its state is not that of the tokens before the chunk.
        """
        slot = chunk.state
        if not 0 <= slot < self.n_slots:
            raise ValueError(f"a chunk has state slot {slot}, not one of the pool's {self.n_slots}")
        if chunk.pos == 0:
            for tensors in self.blocks:
                for tensor in tensors:
                    tensor[slot] = 0
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

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rows that advance together, int64 [sequences, tokens], and the slots of their sequences."""
        if len(self.single):
            yield self.single[:, None], self.slots
        for span, slot in self.prompts:
            yield torch.arange(span.start, span.stop, device=self.slots.device)[None], self.slots.new_tensor([slot])

    def on_device(self, uploaded: dict[str, torch.Tensor]) -> None:
        """Take the rows and slots of the chunks of one row, int64 [chunks] each, from the step's table."""
        self.single, self.slots = uploaded["state rows"], uploaded["state slots"]
