"""The scores of a prompt's rows by torch: what a row sees, and the changes that few models make to scores: soft-capping
(Gemma 2), attention sinks (gpt-oss), ALiBi's slopes (MPT)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from fastdecode.spart.shape import Heads
from fastdecode.transports.base import LayerOptions


@dataclass(frozen=True, slots=True)
class Scoring:
    """The changes that one layer makes to its scores."""

    softcap: float = 0.0  # a score s becomes softcap * tanh(s / softcap); 0: it does not
    sinks: torch.Tensor | None = None  # fp32 [KV heads, query heads of each, 1]: one more score of each head
    slopes: torch.Tensor | None = None  # fp32 [KV heads, query heads of each, 1, 1]: times the distance of two tokens

    @property
    def is_plain(self) -> bool:
        """Whether the layer leaves its scores as they are."""
        return not self.softcap and self.sinks is None and self.slopes is None

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, own: int, first: int, scale: float
    ) -> torch.Tensor:
        """Attention of q [KV heads, group, n, d] to k and v [KV heads, keys, d].

        The rows of q are at positions from `own` on, those of k and v at positions from `first` on.
        `mask` [n, m] is added to the scores of the last m keys. Scores are made in fp32.
        """
        # One product for each KV head, so that K and V are not repeated for the query heads of a group.
        scores = torch.bmm(q.float().flatten(1, 2), k.float().transpose(1, 2)).mul_(scale).unflatten(1, q.shape[1:3])
        if self.softcap:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.slopes is not None:
            rows = torch.arange(own, own + q.shape[2], device=q.device)[:, None]
            scores += self.slopes * (torch.arange(first, first + k.shape[1], device=q.device) - rows)
        scores[..., -mask.shape[1] :] += mask
        if self.sinks is None:
            weights = scores.softmax(dim=-1)
        else:
            total = torch.logaddexp(scores.logsumexp(dim=-1), self.sinks)
            weights = scores.sub_(total[..., None]).exp_()
        out: torch.Tensor = torch.bmm(weights.to(v.dtype).flatten(1, 2), v).unflatten(1, q.shape[1:3])
        return out


_PLAIN = Scoring()


def mask_of_rows(window: int, segment: int, own: int, n: int, first: int, like: torch.Tensor) -> torch.Tensor:
    """An additive mask [n, own + n - first] for the scores of `n` rows at positions from `own` on, whose keys are at
    positions from `first` on. Its dtype and device are those of `like`. A row sees the positions up to its own, at most
    `window` of them, and no other segment than its own (0: no such limit)."""
    rows = torch.arange(own, own + n, device=like.device)[:, None]
    columns = torch.arange(first, own + n, device=like.device)
    hidden = columns > rows
    if window:
        hidden |= columns <= rows - window
    if segment:
        hidden |= columns // segment != rows // segment
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


@functools.lru_cache(maxsize=4096)
def scoring_of(options: LayerOptions, layer: int, n_layers: int, heads: Heads, device: torch.device) -> Scoring:
    """The scoring of one of the `n_layers` of a model with these options, which has these heads."""
    if not (options.softcaps or options.sinks or options.slopes):
        return _PLAIN

    def per_head(values: bytes, row: int, n_rows: int) -> torch.Tensor | None:
        if not values:
            return None
        numbers = np.frombuffer(values, "<f4").reshape(n_rows, -1)[row, : heads.n_q].reshape(heads.n_kv, -1)
        return torch.from_numpy(numbers.copy()).to(device)[..., None]

    slopes = per_head(options.slopes, 0, 1)
    return Scoring(
        softcap=options.softcaps[layer] if options.softcaps else 0.0,
        sinks=per_head(options.sinks, layer, n_layers),
        slopes=None if slopes is None else slopes[..., None],
    )
