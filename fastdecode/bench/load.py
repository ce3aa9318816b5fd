"""Load: what a peer of the decode benchmark is to decode, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Load:
    """`batch` sequences of `context` cached tokens, decoded at once."""

    model: Path  # directory or GGUF file
    batch: int
    context: int
    weights: str  # format of the weights, as for fastdecode-node
    kv_dtype: str
    dtype: torch.dtype  # of activations, and of weights that are not quantised
    device: torch.device
    threads: int
