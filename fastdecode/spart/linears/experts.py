"""ExpertLinears: one linear of every expert of a layer, for rows that are sorted by expert."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch

from fastdecode.spart.linears.base import Linear, NativeProducts, Weight
from fastdecode.spart.linears.grouped_mm import grouped_mm


class ExpertRows:
    """The rows of each expert."""

    def __init__(self, experts: torch.Tensor, counts: torch.Tensor):
        """`experts` int64 [rows] is the expert of each row, in order; `counts` int64 [experts] has each one's rows."""
        self.experts = experts
        self.ends = counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def spans(self) -> list[tuple[int, slice]]:
        """The experts with rows, and the rows of each. The host reads them from the device."""
        ends = self.ends.cpu().tolist()
        spans = enumerate(map(slice, [0, *ends], ends))
        return [(expert, rows) for expert, rows in spans if rows.stop > rows.start]


class ExpertLinears(Weight):
    """y = x Wᵀ + b with the W and b of each row's expert."""

    __slots__ = ()

    @property
    def pooled(self) -> bool:
        """See Linear.pooled."""
        return False

    @property
    def native(self) -> tuple[NativeProducts, ...]:
        """Linear.native of each expert; empty if experts differ in the number of these products."""
        return ()

    @abstractmethod
    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """x [rows, in] -> [rows, out], both in the activation dtype."""


class LoopedExperts(ExpertLinears):
    """A product for each expert with rows, in any format that a linear has."""

    __slots__ = ("_linears",)

    def __init__(self, linears: Sequence[Linear]):
        self._linears = tuple(linears)

    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        return torch.cat([self._linears[expert](x[span]) for expert, span in rows.spans])

    @property
    def pooled(self) -> bool:
        return all(linear.pooled for linear in self._linears)

    @property
    def native(self) -> tuple[NativeProducts, ...]:
        native = tuple(linear.native for linear in self._linears)
        return native if len(set(map(len, native))) == 1 else ()

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self._linears)


class StackedExperts(ExpertLinears):
    """One grouped product, which does not wait for the host to know the rows of each expert."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        """weight [experts, out, in], bias [experts, out] or None, in the activation dtype."""
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        y = grouped_mm(x, self._weight.transpose(1, 2), rows.ends)
        return y if self._bias is None else y.add_(self._bias.index_select(0, rows.experts))

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)
