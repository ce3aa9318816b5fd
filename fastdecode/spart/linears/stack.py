"""make_linear: one Linear of one or several matrices that multiply the same rows, such as Q, K and V."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch

from fastdecode.spart.linears.base import Linear, NativeProducts
from fastdecode.spart.linears.dense import make_dense
from fastdecode.spart.linears.experts import ExpertLinears, LoopedExperts, StackedExperts
from fastdecode.spart.linears.grouped import GroupedLinear
from fastdecode.spart.linears.quantised import ACTIVATION_BITS, Quantised, concatenate, quantise


class ConcatenatedLinear(Linear):
    """Linears of the same rows whose outputs stand side by side: parts that are stored in different forms."""

    __slots__ = ("_parts", "_writers")

    def __init__(self, parts: Sequence[Linear]):
        self._parts = tuple(parts)
        self._writers = [part for part in parts if isinstance(part, GroupedLinear) and part.writes]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._writers) < len(self._parts):
            return torch.cat([part(x) for part in self._parts], dim=1)
        rows = x.float().contiguous()
        y = torch.empty(len(x), sum(part.outs for part in self._writers))
        first = 0
        for part in self._writers:
            part.write(rows, y, first)
            first += part.outs
        return y.to(x.dtype)

    @property
    def pooled(self) -> bool:
        return all(part.pooled for part in self._parts)

    @property
    def native(self) -> NativeProducts:
        if len(self._writers) < len(self._parts):
            return ()
        return tuple(native for part in self._writers for native in part.native)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)


def side_by_side(linears: Sequence[Linear]) -> Linear:
    """One linear of linears of the same rows; an only one is itself."""
    return linears[0] if len(linears) == 1 else ConcatenatedLinear(linears)


class PermutedLinear(Linear):
    """A linear whose input columns are stored in another order (GPTQ with act-order)."""

    __slots__ = ("_linear", "_order")

    def __init__(self, linear: Linear, order: torch.Tensor):
        """`order` [in] is the input that belongs to each stored column."""
        self._linear, self._order = linear, order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.index_select(1, self._order))

    @property
    def pooled(self) -> bool:
        return self._linear.pooled

    @property
    def nbytes(self) -> int:
        return self._linear.nbytes + self._order.nbytes


def make_linear(
    parts: Sequence[torch.Tensor | Quantised],
    bias: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
    bits: int | None = None,
) -> Linear:
    """The linear of matrices [out_i, in], rows over rows. `bias` is [sum of out_i] or None.

    Float matrices become `dtype`, or are rounded to `bits`. Neighbours of the same form become one matrix.
    """
    if bits is not None:
        parts = [part if isinstance(part, Quantised) else quantise(part, bits, ACTIVATION_BITS) for part in parts]
    linears: list[Linear] = []
    done = 0
    for form, group in groupby(parts, key=lambda part: part.form if isinstance(part, Quantised) else None):
        members = list(group)
        outs = sum(len(part.q) if isinstance(part, Quantised) else len(part) for part in members)
        part_bias = None if bias is None else bias[done : done + outs]
        done += outs
        if form is None:
            linears.append(
                _dense([part for part in members if isinstance(part, torch.Tensor)], part_bias, device, dtype)
            )
        else:
            matrix = concatenate([part for part in members if isinstance(part, Quantised)])
            linear: Linear = GroupedLinear(matrix, part_bias, device)
            linears.append(linear if matrix.order is None else PermutedLinear(linear, matrix.order.to(device)))
    return side_by_side(linears)


def make_experts(
    parts_of: Iterable[tuple[Sequence[torch.Tensor | Quantised], torch.Tensor | None]],
    device: torch.device,
    dtype: torch.dtype,
    bits: int | None = None,
) -> ExpertLinears:
    """The linears of all experts. `parts_of` has the matrices and the bias of each; see make_linear."""
    linears, weights, biases = [], [], []
    for parts, bias in parts_of:
        if device.type == "cpu" or bits is not None or any(isinstance(part, Quantised) for part in parts):
            linears.append(make_linear(parts, bias, device, dtype, bits))
            continue
        dense = [part.to(device, dtype) for part in parts if isinstance(part, torch.Tensor)]
        weights.append(torch.cat(dense))
        biases += [] if bias is None else [bias.to(device, dtype)]
    if linears:
        return LoopedExperts(linears)
    return StackedExperts(torch.stack(weights), torch.stack(biases) if biases else None)


def _dense(
    parts: Sequence[torch.Tensor], bias: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> Linear:
    weight = torch.empty(sum(map(len, parts)), parts[0].shape[1], device=device, dtype=dtype)
    for part, target in zip(parts, torch.split(weight, list(map(len, parts))), strict=True):
        target.copy_(part)
    return make_dense(weight, None if bias is None else bias.to(device, dtype))
