"""make_linear: one Linear of one or several matrices that multiply the same rows, such as Q, K and V."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch

from fastdecode.spart.linears.base import Embedding, Linear, NativeProducts
from fastdecode.spart.linears.dense import make_dense
from fastdecode.spart.linears.experts import ExpertLinears, LoopedExperts, StackedExperts
from fastdecode.spart.linears.gpu import GPUExperts, GPULinear
from fastdecode.spart.linears.gpu_kernels import kernel_product
from fastdecode.spart.linears.grouped import GroupedEmbedding, GroupedLinear
from fastdecode.spart.linears.packed import PackedEmbedding, PackedMatrix, alike, over_one_another, pack
from fastdecode.spart.linears.quantised import Quantised, concatenate


class ConcatenatedLinear(Linear):
    """Linears of the same rows whose outputs stand side by side, of matrices that are stored in different forms."""

    __slots__ = ("_linears", "_writers")

    def __init__(self, linears: Sequence[Linear]):
        self._linears = tuple(linears)
        self._writers = [linear for linear in linears if isinstance(linear, GroupedLinear)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._writers) < len(self._linears):
            return torch.cat([linear(x) for linear in self._linears], dim=1)
        rows = x.float().contiguous()
        y = torch.empty(len(x), sum(linear.outs for linear in self._writers))
        first = 0
        for linear in self._writers:
            linear.write(rows, y, first)
            first += linear.outs
        return y.to(x.dtype)

    @property
    def pooled(self) -> bool:
        return all(linear.pooled for linear in self._linears)

    @property
    def native(self) -> NativeProducts:
        if len(self._writers) < len(self._linears):
            return ()
        return tuple(native for linear in self._writers for native in linear.native)

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in self._linears)


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
    matrices: Sequence[torch.Tensor | Quantised],
    bias: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Linear:
    """The linear of matrices [out_i, in], rows over rows. `bias` is [sum of out_i] or None.

    Float matrices become `dtype`. Neighbours of the same form become one matrix.
    """
    linears: list[Linear] = []
    done = 0
    for form, group in groupby(matrices, key=lambda matrix: matrix.form if isinstance(matrix, Quantised) else None):
        members = list(group)
        outs = sum(len(matrix.q) if isinstance(matrix, Quantised) else len(matrix) for matrix in members)
        own_bias = None if bias is None else bias[done : done + outs]
        done += outs
        if form is None:
            linears.append(
                _dense([matrix for matrix in members if isinstance(matrix, torch.Tensor)], own_bias, device, dtype)
            )
        else:
            whole = concatenate([matrix for matrix in members if isinstance(matrix, Quantised)])
            linear = quantised_linear(whole, own_bias, device, dtype)
            linears.append(linear if whole.order is None else PermutedLinear(linear, whole.order.to(device)))
    return side_by_side(linears)


def quantised_linear(
    matrix: Quantised, bias: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> GroupedLinear | GPULinear:
    """The product with one quantised matrix, whose columns are in the order of inputs. `bias` is [out] or None."""
    if device.type == "cpu":
        return GroupedLinear(matrix, bias)
    return GPULinear(pack(matrix, device, dtype), None if bias is None else bias.to(device, dtype))


def quantised_embedding(matrices: Sequence[Quantised], device: torch.device, dtype: torch.dtype) -> Embedding:
    """The rows of quantised matrices, one after another."""
    if device.type == "cpu":
        return GroupedEmbedding([GroupedLinear(matrix, None) for matrix in matrices], dtype, shared=False)
    return PackedEmbedding([pack(matrix, device, dtype) for matrix in matrices])


def tied_quantised(matrices: Sequence[Quantised], device: torch.device, dtype: torch.dtype) -> tuple[Embedding, Linear]:
    """An embedding and an LM head of the same quantised matrices, rows over rows. On a CPU they take memory once."""
    linears = [quantised_linear(matrix, None, device, dtype) for matrix in matrices]
    grouped = [linear for linear in linears if isinstance(linear, GroupedLinear)]
    embedding = (
        GroupedEmbedding(grouped, dtype, shared=True) if grouped else quantised_embedding(matrices, device, dtype)
    )
    return embedding, side_by_side(linears)


def make_experts(
    experts: Iterable[tuple[Sequence[torch.Tensor | Quantised], torch.Tensor | None]],
    device: torch.device,
    dtype: torch.dtype,
) -> ExpertLinears:
    """The linears of all experts. `experts` has the matrices and the bias of each; see make_linear."""
    if device.type == "cpu":  # one expert after another, so that only one is in memory in another form
        return LoopedExperts([make_linear(matrices, bias, device, dtype) for matrices, bias in experts])
    experts = list(experts)
    biases = [bias.to(device, dtype) for _, bias in experts if bias is not None]
    stacked_bias = torch.stack(biases) if biases else None
    if not any(_quantised(matrices) for matrices, _ in experts):
        weights = [torch.cat([torch.as_tensor(m).to(device, dtype) for m in matrices]) for matrices, _ in experts]
        return StackedExperts(torch.stack(weights), stacked_bias)
    if packed := _packed_experts([matrices for matrices, _ in experts], device, dtype):
        if kernel := kernel_product(packed):
            return GPUExperts(kernel, packed[0].outs, stacked_bias)
        own = biases if biases else [None] * len(packed)
        return LoopedExperts([GPULinear(matrix, bias) for matrix, bias in zip(packed, own, strict=True)])
    return LoopedExperts([make_linear(matrices, bias, device, dtype) for matrices, bias in experts])


def _quantised(matrices: Sequence[torch.Tensor | Quantised]) -> list[Quantised]:
    return [matrix for matrix in matrices if isinstance(matrix, Quantised)]


def _packed_experts(
    experts: Sequence[Sequence[torch.Tensor | Quantised]], device: torch.device, dtype: torch.dtype
) -> list[PackedMatrix]:
    """One matrix for each expert, all of one form; empty if they cannot have one."""
    packed = []
    for matrices in experts:
        parts = [pack(matrix, device, dtype) for matrix in _quantised(matrices) if matrix.order is None]
        whole = over_one_another(parts) if len(parts) == len(matrices) else None
        if whole is None:
            return []
        packed.append(whole)
    return alike(packed)


def _dense(
    matrices: Sequence[torch.Tensor], bias: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> Linear:
    weight = torch.empty(sum(map(len, matrices)), matrices[0].shape[1], device=device, dtype=dtype)
    for matrix, target in zip(matrices, torch.split(weight, list(map(len, matrices))), strict=True):
        target.copy_(matrix)
    return make_dense(weight, None if bias is None else bias.to(device, dtype))
