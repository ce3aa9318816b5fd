"""The heads of a layer, in rows that hold one head after another."""

from __future__ import annotations

import torch

from fastdecode.spart.shape import AttentionShape, Heads


def heads_in(rows: torch.Tensor, start: int, n: int, size: int) -> torch.Tensor:
    """A view [rows, n, size] of the `n` heads that begin at element `start` of rows [rows, elements]."""
    heads: torch.Tensor = rows[:, start : start + n * size].unflatten(1, (n, size))
    return heads


def kv_heads_in(rows: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K [rows, KV heads, k_size] and V [rows, KV heads, v_size] in KV rows of a layer with these heads."""
    k = heads_in(rows, 0, heads.n_kv, heads.k_size)
    if heads.v_in_k:
        return k, k[:, :, : heads.v_size]
    return k, heads_in(rows, heads.n_kv * heads.k_size, heads.n_kv, heads.v_size)


def index_in(
    q: torch.Tensor, kv: torch.Tensor, heads: Heads, shape: AttentionShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the index queries [rows, index heads, index size] and their weights [rows, index heads] in Q rows, and
    of the index keys [rows, 1, index size] in KV rows, of a layer with these heads and an indexer."""
    n, size, at = shape.index_heads, shape.index_size, heads.n_q * heads.k_size
    weights = q[:, at + n * size : at + n * (size + 1)]
    return heads_in(q, at, n, size), weights, heads_in(kv, heads.kv_row_size, 1, size)


def multiply_heads(heads: torch.Tensor, matrices: torch.Tensor) -> None:
    """Multiply heads [rows, n, size] in place by matrices [KV heads, size, size]; n is a multiple of the KV heads."""
    n_kv, size = matrices.shape[:2]
    rows = heads.unflatten(1, (n_kv, -1)).transpose(0, 1)
    rows.copy_(torch.bmm(rows.reshape(n_kv, -1, size), matrices).view(rows.shape))
