"""Prompts in layers that select the tokens they attend to (trained sparse attention, hf/indexer.py), by torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_BLOCK_SCORES = 1 << 24  # the most scores of a block of rows, all heads together


def select_tokens(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, pos: int, topk: int) -> torch.Tensor:
    """The `topk` tokens that each row selects, int64 [n, topk]: those of the largest index scores.

    Index queries q [n, heads, size] and their weights [n, heads] are those of rows at positions from `pos` on; the
    index keys [pos + n, size] are those of all tokens up to them. There are at least `topk` tokens; a row that sees
    fewer selects later ones, too. Scores are made in fp32.
    """
    heads, selected = q.shape[1], []
    positions, transposed = torch.arange(len(keys), device=q.device), keys.float().T
    step = max(1, _BLOCK_SCORES // (heads * len(keys)))
    for start in range(0, len(q), step):
        block = q[start : start + step].float()
        products = (block.flatten(0, 1) @ transposed).relu_().unflatten(0, (-1, heads))
        scores = (weights[start : start + step, None].float() @ products)[:, 0]
        scores.masked_fill_(positions > positions[pos + start :][: len(block), None], float("-inf"))
        selected.append(scores.topk(topk).indices)
    return torch.cat(selected)


def attend_selected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, selected: torch.Tensor, pos: int, scale: float
) -> torch.Tensor:
    """Attention of q [batch, heads, n, d] to k [batch, heads, pos + n, d] and v [batch, heads, pos + n, e], where each
    row attends to the tokens that it has selected [n, tokens] and sees. Returns O [batch, heads, n, e]."""
    n, length = q.shape[2], k.shape[2]
    step, outputs = max(1, _BLOCK_SCORES // (q.shape[1] * length)), []
    for start in range(0, n, step):
        block = q[:, :, start : start + step]
        seen = torch.ones(block.shape[2], length, dtype=torch.bool, device=q.device).tril_(pos + start)
        mask = torch.zeros_like(seen).scatter_(1, selected[start : start + step], True) & seen
        outputs.append(F.scaled_dot_product_attention(block, k, v, attn_mask=mask, scale=scale))
    return torch.cat(outputs, dim=2)
