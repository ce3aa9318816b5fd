"""LatentAttention: what is before and after multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv
2405.04434, section 2.1.2 and appendix C).

K and V of all heads are products of one latent row with a matrix of each head. Here the queries are multiplied with the
matrices of K, and the outputs with those of V. All query heads then share one KV head: K is the latent row and the part
of K with RoPE, V is the latent row, the first elements of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from fastdecode.spart.checkpoints.config import Latent
from fastdecode.spart.decoder.rope import Angles
from fastdecode.spart.linears.base import Linear
from fastdecode.spart.linears.heads import HeadLinears
from fastdecode.spart.lora.adapters import AdapterRows, adapted_product


class LatentOps(Protocol):
    """The operations of BlockOps (block_ops.py) that latent attention needs."""

    def norm_parts(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See BlockOps."""

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, interleaved: bool) -> None:
        """See BlockOps."""


@dataclass(slots=True)
class LatentAttention:
    """The parameters of a layer; norms are in the activation dtype."""

    config: Latent
    inputs: Linear  # of the residual stream: Q, or the row that all queries are made of; the latent row; K with RoPE
    q_norm: torch.Tensor | None  # [q_rank], and the linear [n_q_heads * q_size, q_rank]; None: `inputs` makes Q
    q: Linear | None
    kv_norm: torch.Tensor  # [rank]
    k: HeadLinears  # of queries, [n_q_heads, rank, k_size]
    v: HeadLinears  # of O rows, [n_q_heads, v_size, rank]
    o: Linear  # [hidden_size, n_q_heads * v_size]

    def project(
        self,
        h: torch.Tensor,
        angles: Angles,
        q_heads: torch.Tensor,
        kv: torch.Tensor,
        ops: LatentOps,
        adapters: AdapterRows | None,
    ) -> None:
        """Write the layer's Q and KV rows of the normalised residual stream h [n, hidden_size] to `q_heads`
        [n, n_q_heads, row_size] and `kv` [n, row_size]."""
        c = self.config
        widths = [c.q_rank or q_heads.shape[1] * c.q_size, c.rank, c.rope_size]
        q, latent, k = adapted_product(self.inputs, h, adapters).split_with_sizes(widths, dim=1)
        if self.q is not None and self.q_norm is not None:
            q = adapted_product(self.q, ops.norm_parts(q, self.q_norm, c.norm_eps), adapters)
        plain, turned = q.unflatten(1, (-1, c.q_size)).split_with_sizes([c.k_size, c.rope_size], dim=2)
        q_heads[..., : c.rank].copy_(self.k(plain.transpose(0, 1)).transpose(0, 1))
        ops.turn(turned, angles.q_cos, angles.q_sin, q_heads[..., c.rank :], c.interleaved)
        kv[:, : c.rank].copy_(ops.norm_parts(latent, self.kv_norm, c.norm_eps))
        ops.turn(k[:, None], angles.cos, angles.sin, kv[:, None, c.rank :], c.interleaved)

    def finish(self, o: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        """O rows [n, n_q_heads * rank] of latent rows -> the output of attention, [n, hidden_size]."""
        heads = self.v(o.unflatten(1, (-1, self.config.rank)).transpose(0, 1))
        return adapted_product(self.o, heads.transpose(0, 1).flatten(1), adapters)

    @property
    def linears(self) -> list[Linear]:
        """The linears of the layer."""
        return [linear for linear in (self.inputs, self.q, self.o) if linear is not None]
