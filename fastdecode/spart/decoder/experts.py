"""Mixture: a layer's experts in place of its MLP (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from fastdecode.kernels import _native
from fastdecode.spart.checkpoints.config import Experts
from fastdecode.spart.linears.base import Linear, multiplies
from fastdecode.spart.linears.experts import ExpertLinears, ExpertRows
from fastdecode.spart.served import act_code, address_of
from fastdecode.spart.threads import pool_threads


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
    """The router and the experts of one layer."""

    def __init__(
        self,
        config: Experts,
        router: torch.Tensor,
        router_bias: torch.Tensor | None,
        correction: torch.Tensor | None,
        up: ExpertLinears,
        down: ExpertLinears,
        shared: SharedExpert | None = None,
        expert_scale: torch.Tensor | None = None,
    ):
        """router [experts, hidden_size], whose product is in its own dtype; router_bias [experts] or None; correction
        fp32 [experts], [1, experts] or None: numbers that are added to scores to choose experts. The rows of `up` are
        gate, up. The caller computes the `shared` expert. expert_scale fp32 [experts] or None."""
        self.shared, self._expert_scale = shared, expert_scale
        self._config, self._router, self._router_bias, self._correction = config, router, router_bias, correction
        self._up, self._down = up, down
        self.native: _native.ExpertOps | None = None

    @cached_property
    def load(self) -> torch.Tensor:
        """The number of rows that each expert has had, int64 [experts]."""
        with torch.inference_mode(False):  # a tensor of that mode cannot be set to zero outside of it
            return torch.zeros(self._config.n, dtype=torch.int64, device=self._router.device)

    def run_in_c(self, gelu: bool, dtype: torch.dtype) -> None:
        """Let one call of kernels/decoder choose and compute the experts of rows in `dtype` on a CPU, if kernels/ has
        all of their products. `gelu`: their gate is that of GELU by tanh, else of SiLU, or the clamped one of
        gpt-oss."""
        up, down, c = self._up.native, self._down.native, self._config
        if not (up and down and all(multiplies(products, dtype) for products in up + down)):
            return
        weights = self._router, self._router_bias, self._correction, self._expert_scale
        assert all(weight is None or weight.is_contiguous() for weight in weights)
        single = self._router.dtype is torch.float32
        assert single or self._router.dtype is dtype
        least_sum = c.least_sum if c.renormalise else 0.0
        self.native = _native.ExpertOps(
            act_code(dtype),
            self._router.shape[1],
            c.intermediate_size,
            gelu,
            *(c.clamped_swiglu or (0.0, 0.0)),
            tuple(map(address_of, weights)),
            (c.used, c.groups, c.used_groups, c.group_best),
            (c.router_scale, least_sum, c.scale, single, c.sigmoid),
            self.load.data_ptr(),
            tuple(zip(up, down, strict=True)),
        )

    def __call__(
        self,
        x: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
        router_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [n, hidden_size] -> [n, hidden_size]. `activate` makes the input of `down` from the output of `up`.
        router_input [n, hidden_size] None: it is x.

        The rows are sorted by expert, and each one's results are added in the order of its router's choice, so a row
        does not depend on the other rows.
        """
        if not len(x):  # the last layer of a rank, in a step that draws no token
            return torch.empty_like(x)
        routed = x if router_input is None else router_input
        if self.native is None:
            return self._computed(x, *self.choose(routed), activate)
        out = torch.empty_like(x)
        assert x.is_contiguous() and routed.is_contiguous() and x.dtype is routed.dtype
        self.native.run(x.data_ptr(), routed.data_ptr(), out.data_ptr(), len(x), pool_threads())
        return out

    def _computed(
        self,
        x: torch.Tensor,
        shares: torch.Tensor,
        chosen: torch.Tensor,
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The experts' results, of operations of torch and a product for each linear."""
        used = self._config.used
        experts, order = chosen.flatten().sort(stable=True)
        counts = experts.new_zeros(self._config.n).scatter_add_(0, experts, torch.ones_like(experts))
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
        if config.router_scale != 1.0:
            outputs *= config.router_scale
        scores = outputs.sigmoid() if config.sigmoid else outputs.softmax(1)
        wanted = scores if self._correction is None else scores + self._correction
        if config.groups > 1:
            wanted = _of_best_groups(wanted, config)
        chosen = wanted.topk(config.used, dim=1).indices
        shares = scores.gather(1, chosen)
        if config.renormalise:
            shares /= shares.sum(1, keepdim=True).clamp_(min=config.least_sum)
        if config.scale != 1.0:
            shares *= config.scale
        if self._expert_scale is not None:
            shares *= self._expert_scale[chosen]
        return shares, chosen

    @property
    def pooled(self) -> bool:
        """Whether kernels/ computes the products of all experts."""
        return self._up.pooled and self._down.pooled and (self.shared is None or self.shared.mlp.pooled)

    @property
    def nbytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.nbytes
        return self._router.nbytes + self._up.nbytes + self._down.nbytes + shared


def _of_best_groups(scores: torch.Tensor, config: Experts) -> torch.Tensor:
    """The scores [n, experts], with those of experts outside the best groups of each row lower than any score."""
    by_group = scores.unflatten(1, (config.groups, -1))
    best = by_group.topk(config.group_best, dim=2).values.sum(2)  # [n, groups]
    chosen = torch.zeros_like(best).scatter_(1, best.topk(config.used_groups, dim=1).indices, 1.0)
    limited: torch.Tensor = by_group.masked_fill(chosen[:, :, None] == 0, -torch.inf)
    return limited.flatten(1)
