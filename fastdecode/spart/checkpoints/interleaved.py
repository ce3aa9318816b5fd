"""InterleavedCheckpoint: Q and K of checkpoints in which RoPE turns neighbours of a head, in the decoder's order.

The decoder turns the two halves of a head by each other. With the rows of Q and K in that order the scores are the
same, because Q and K are in one order.
"""

from __future__ import annotations

import torch

from fastdecode.spart.checkpoints.config import ModelConfig, TensorNames
from fastdecode.spart.checkpoints.tensors import Checkpoint
from fastdecode.spart.linears.quantised import Quantised


def halves_of_heads(rows: int, heads: int) -> torch.Tensor:
    """The checkpoint's row for each of ours, int64 [rows]: RoPE's pairs lie side by side there, half a head apart in
    ours."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


def interleaved_rows(config: ModelConfig) -> dict[str, torch.Tensor]:
    """The checkpoint's row for each of ours, by the names of the Q and K projections that have another order."""
    if not config.rope_interleaved:
        return {}
    blocks = [config.names.block.replace("{i}", str(i)) for i in range(config.n_blocks)]
    heads = config.n_q_heads, config.n_kv_heads
    orders = [halves_of_heads(n * config.head_size, n) for n in heads]
    return {f"{block}{name}": rows for block in blocks for name, rows in zip(config.names.qkv, orders, strict=False)}


class InterleavedCheckpoint(Checkpoint):
    """The tensors of another checkpoint, with the rows of Q and K in the decoder's order."""

    def __init__(self, stored: Checkpoint, config: ModelConfig):
        self._stored, rows = stored, interleaved_rows(config)
        self._rows = {f"{name}.{end}": index for name, index in rows.items() for end in ("weight", "bias")}

    def names(self) -> set[str]:
        return self._stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(name)

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._stored.tensor(name)
        return tensor[self._rows[name]] if name in self._rows else tensor

    def matrix(self, name: str) -> torch.Tensor | Quantised:
        matrix = self._stored.matrix(name)
        if name not in self._rows:
            return matrix
        return matrix[self._rows[name]] if isinstance(matrix, torch.Tensor) else matrix.select_rows(self._rows[name])

    def expert(self, name: str, index: int) -> torch.Tensor | Quantised:
        return self._stored.expert(name, index)

    def head_differs(self, names: TensorNames) -> bool:
        return self._stored.head_differs(names)

    @property
    def quantisation(self) -> str | None:
        return self._stored.quantisation
