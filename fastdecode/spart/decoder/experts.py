"""Mixture: a layer's experts in place of its MLP (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fastdecode.spart.checkpoints.config import Experts
from fastdecode.spart.linears.base import Linear
from fastdecode.spart.linears.experts import ExpertLinears, ExpertRows

#: The least sum by which scores are divided: sigmoids may all be 0.
_LEAST = 1e-20


@dataclass(slots=True)
class MLP:
    """The rows of `up` are gate, up if it is gated."""

    up: Linear
    down: Linear

    @property
    def nbytes(self) -> int:
        return self.up.nbytes + self.down.nbytes

    @property
    def pooled(self) -> bool:
        return self.up.pooled and self.down.pooled


@dataclass(slots=True)
class SharedExpert:
    """An MLP that all tokens pass beside their experts. Its output is multiplied by the sigmoid of the product of
    `gate` [1, hidden_size] and the token's row, if there is a gate."""

    mlp: MLP
    gate: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.mlp.nbytes + (0 if self.gate is None else self.gate.nbytes)


class Mixture:
    """The router and the experts of one layer. `load` int64 [experts] counts the rows that each expert has had; None:
    before the first step."""

    def __init__(
        self,
        config: Experts,
        router: torch.Tensor,
        router_bias: torch.Tensor | None,
        correction: torch.Tensor | None,
        up: ExpertLinears,
        down: ExpertLinears,
        shared: SharedExpert | None = None,
    ):
        """router [experts, hidden_size], whose product is in its own dtype; router_bias [experts] or None; correction
        fp32 [experts] or None: numbers that are added to scores to choose experts. The rows of `up` are gate, up. The
        caller computes the `shared` expert."""
        self.shared = shared
        self._config, self._router, self._router_bias, self._correction = config, router, router_bias, correction
        self._up, self._down = up, down
        self.load: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, activate: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """x [n, hidden_size] -> [n, hidden_size]. `activate` makes the input of `down` from the output of `up`.

        The rows are sorted by expert, and each one's results are added in the order of its router's choice, so a row
        does not depend on the other rows.
        """
        if not len(x):  # the last layer of a rank, in a step that draws no token
            return torch.empty_like(x)
        used = self._config.used
        shares, chosen = self.choose(x)
        experts, order = chosen.flatten().sort(stable=True)
        counts = experts.new_zeros(self._config.n).scatter_add_(0, experts, torch.ones_like(experts))
        if self.load is None:
            self.load = torch.zeros_like(counts)
        self.load += counts
        rows = ExpertRows(experts, counts)
        results = self._down(activate(self._up(x.index_select(0, order // used), rows)), rows)
        results = torch.empty_like(results).index_copy_(0, order, results).view(len(x), used, -1)
        return torch.bmm(shares[:, None].to(x.dtype), results)[:, 0]

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of the rows x [n, hidden_size], int64 [n, used], and their shares in the output, fp32 [n, used].
        A GPU does so without waiting for the host, so captured steps may have it."""
        config = self._config
        outputs = F.linear(x.to(self._router.dtype), self._router, self._router_bias).float()
        scores = outputs.sigmoid() if config.sigmoid else outputs.softmax(1)
        if self._correction is None:
            shares, chosen = scores.topk(config.used, dim=1)
        else:
            chosen = (scores + self._correction).topk(config.used, dim=1).indices
            shares = scores.gather(1, chosen)
        if config.renormalise:
            shares /= shares.sum(1, keepdim=True).clamp_(min=_LEAST)
        if config.scale != 1.0:
            shares *= config.scale
        return shares, chosen

    @property
    def pooled(self) -> bool:
        """Whether kernels/ computes the products of all experts."""
        return self._up.pooled and self._down.pooled and (self.shared is None or self.shared.mlp.pooled)

    @property
    def nbytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.nbytes
        return self._router.nbytes + self._up.nbytes + self._down.nbytes + shared
