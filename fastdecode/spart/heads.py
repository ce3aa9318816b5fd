"""The heads of a layer, in rows that hold one head after another."""

from __future__ import annotations

import torch


def heads_in(rows: torch.Tensor, start: int, n: int, size: int) -> torch.Tensor:
    """A view [rows, n, size] of the `n` heads that begin at element `start` of rows [rows, elements]."""
    heads: torch.Tensor = rows[:, start : start + n * size].unflatten(1, (n, size))
    return heads
