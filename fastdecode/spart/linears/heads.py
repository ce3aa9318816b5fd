"""HeadLinears: a matrix for each head, by which the rows of that head are multiplied."""

from __future__ import annotations

from abc import abstractmethod

import torch

from fastdecode.kernels import _native
from fastdecode.spart.linears.base import NativeProducts, Weight
from fastdecode.spart.linears.dense16 import kept16, packed16
from fastdecode.spart.linears.grouped import GroupedLinear
from fastdecode.spart.linears.quantised import HeadMatrices
from fastdecode.spart.served import act_code
from fastdecode.spart.threads import pool_threads


class HeadLinears(Weight):
    """y = x Wᵀ with the W of each head."""

    __slots__ = ()

    @property
    def native(self) -> _native.HeadProducts | None:
        """The products of kernels/; None: torch computes them."""
        return None

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [heads, n, in] -> [heads, n, out], both in the activation dtype."""


class DenseHeads(HeadLinears):
    """The products by torch. `weight` [heads, out, in] may be any view."""

    __slots__ = ("_weight",)

    def __init__(self, weight: torch.Tensor):
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self._weight.mT)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes


class NativeHeads(HeadLinears):
    """The products by kernels/."""

    __slots__ = ("_act", "_native", "_sizes", "nbytes")

    nbytes: int

    def __init__(self, products: NativeProducts, sizes: tuple[int, int, int], act: torch.dtype, nbytes: int):
        """`products` of rows in `act` with the matrix of each head; `sizes`: heads, out, in. The weights take
        `nbytes`."""
        self._native = _native.HeadProducts(act_code(act), products)
        self._act, self._sizes, self.nbytes = act, sizes, nbytes

    @property
    def native(self) -> _native.HeadProducts:
        return self._native

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        heads, outs, ins = self._sizes
        x = x.contiguous()
        assert x.dtype is self._act and x.shape == (heads, x.shape[1], ins)
        y = x.new_empty(heads, x.shape[1], outs)
        self._native.run(x.data_ptr(), y.data_ptr(), x.shape[1], pool_threads())
        return y


def make_heads(matrices: HeadMatrices, device: torch.device, act: torch.dtype, as_stored: bool = True) -> HeadLinears:
    """The best linears on a device, for activations in `act`. The matrices are copied. Quantised ones remain so with
    `as_stored`, on a CPU with fp32 activations; else they become `act`."""
    if not isinstance(matrices, torch.Tensor):
        if as_stored and device.type == "cpu" and act is torch.float32:
            linears = [GroupedLinear(matrix, None) for matrix in matrices]
            sizes = len(linears), linears[0].outs, linears[0].ins
            natives = tuple(native for linear in linears for native in linear.native)
            return NativeHeads(natives, sizes, act, sum(linear.nbytes for linear in linears))
        matrices = torch.stack([matrix.dequantise() for matrix in matrices])
    weight = matrices.to(device, act, copy=True)
    narrow = kept16(weight)
    if narrow is None:
        return DenseHeads(weight)
    heads, outs, ins = narrow.shape
    products, packed = packed16(narrow, act)
    return NativeHeads(products, (heads, outs, ins), act, packed.nbytes)
