"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C).

K and V of all heads are products of one latent row with a matrix of each head. The absorbed form multiplies the queries
with the matrices of K and the results with those of V instead. All query heads then share one KV head: K is the latent
row and the part of K with RoPE, V is the latent row, the first elements of K. For DeepSeek-V3 that is 576 elements a
token and layer, where the heads themselves have 40960.
"""

from __future__ import annotations

from typing import Any

import torch

from fastdecode.region.contract import MAX_HEAD_SIZE


class LatentHeads(torch.nn.Module):
    """The matrices of K and V of each head, in place of the linear that makes K and V of the latent rows."""

    def __init__(self, weight: torch.nn.Parameter, n_heads: int, k_size: int):
        """weight [n_heads * (k_size + v_size), rank]; `k_size` is that of the part of K without RoPE."""
        super().__init__()
        self.weight = weight
        heads = weight.data.view(n_heads, -1, weight.shape[1])
        self._k, self._v = heads[:, :k_size], heads[:, k_size:].transpose(1, 2)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """q [1, n_heads, rows, k_size + rope] -> the queries of latent rows, [1, n_heads, rows, rank + rope]."""
        plain, rope = q[0].split([self._k.shape[1], q.shape[3] - self._k.shape[1]], dim=2)
        return torch.cat([plain @ self._k, rope], dim=2)[None]

    def outputs(self, o: torch.Tensor) -> torch.Tensor:
        """O of latent rows [1, rows, n_heads, rank] -> O [1, rows, n_heads, v_size]."""
        return (o[0].transpose(0, 1) @ self._v).transpose(0, 1)[None]


def absorb(module: Any) -> None:
    """Let an attention module with latent rows give its attention function one KV head, where that is smaller than its
    heads and an R-node has room for it. Other modules stay as they are. A module that selects the tokens it attends to
    always has one KV head, whose rows are what R-nodes can select."""
    if not hasattr(module, "expand_kv") or type(getattr(module, "kv_b_proj", None)) is not torch.nn.Linear:
        return
    rank, rope, of_head = module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim + module.v_head_dim
    expanded = module.num_heads * (of_head + rope)  # of all ranks that share the model
    if rank + rope <= MAX_HEAD_SIZE and (rank + rope < expanded or hasattr(module, "indexer")):
        linear = module.kv_b_proj
        module.kv_b_proj = LatentHeads(linear.weight, linear.out_features // of_head, module.qk_nope_head_dim)
        module.expand_kv = _latent_rows


def latent_heads(module: torch.nn.Module) -> LatentHeads | None:
    """The matrices of an attention module that `absorb` has changed; None for another module."""
    found = getattr(module, "kv_b_proj", None)
    return found if isinstance(found, LatentHeads) else None


def _latent_rows(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """latent [1, 1, rows, rank] and rope [1, 1, rows, rope] -> K [1, 1, rows, rank + rope] and V."""
    return torch.cat([latent, rope], dim=3), latent
