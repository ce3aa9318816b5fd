"""HeadLinears: a matrix for each head, by which the rows of that head are multiplied."""

from __future__ import annotations

from abc import abstractmethod

import torch

from fastdecode.kernels import _native
from fastdecode.spart.linears.base import Weight
from fastdecode.spart.linears.dense16 import kept16, packed16
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


class Heads16(HeadLinears):
    """The products by kernels/, of 16-bit weights and of fp32 or bf16 rows (Linear16)."""

    __slots__ = ("_act", "_native", "_sizes", "nbytes")

    nbytes: int

    def __init__(self, weight: torch.Tensor, act: torch.dtype):
        """`weight` [heads, out, in] in fp16 or bf16, on the CPU, is copied; `act` is the activations' dtype."""
        heads, packed = packed16(weight, act)
        self._native = _native.HeadProducts(act_code(act), heads)
        self._act, self._sizes, self.nbytes = act, weight.shape, packed.nbytes

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


def absorbed_heads(weight: torch.Tensor, heads: int, k_size: int) -> tuple[HeadLinears, HeadLinears]:
    """The linears of queries, [heads, rank, k_size], and of O rows, [heads, v_size, rank], of latent attention, from
    the matrices of K and of V of the first head, and so on: `weight` [heads * (k_size + v_size), rank]."""
    each = weight.unflatten(0, (heads, -1))
    return _make_heads(each[:, :k_size].mT), _make_heads(each[:, k_size:])


def _make_heads(weight: torch.Tensor) -> HeadLinears:
    """The best linears for weights [heads, out, in], by their device and dtype, which is that of activations; as
    make_dense."""
    narrow = kept16(weight)
    return DenseHeads(weight) if narrow is None else Heads16(narrow, weight.dtype)
