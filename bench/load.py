"""What the peers of the decode benchmark are to decode, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fastdecode.spart.served import ACT_NAMES


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """The checkpoint of a run, and the largest of its cells."""

    model: Path  # directory or GGUF file
    weights: str  # format of the weights, as for fastdecode-node
    dtype: torch.dtype  # of activations, and of weights that are not quantised
    device: torch.device
    threads: int
    batch: int  # the most sequences of a cell
    context: int  # the most cached tokens of a sequence
    steps: int  # tokens decoded of each sequence in a round
    ranks: int = 2  # of the peer of that name
    mini_batches: int = 1

    @property
    def dtype_name(self) -> str:
        """ "fp32", "fp16" or "bf16"."""
        return ACT_NAMES[self.dtype]


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """`batch` sequences of `context` cached tokens, decoded at once."""

    batch: int
    context: int

    def holds(self, other: Cell) -> bool:
        """True if this cell is at least as large in both numbers."""
        return self.batch >= other.batch and self.context >= other.context

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}"
