"""Linear16: 16-bit weights on a CPU, exactly as in the checkpoint, by kernels/linears.

CPUs without 16-bit products compute in fp32. Kept in fp32, the weights of a 16-bit checkpoint would take twice the
memory, and a step of few rows, which memory limits, twice as long. Where the CPU has products of bf16 pairs, bf16 rows
are multiplied too, because oneDNN's kernels read slowly for few rows.
"""

from __future__ import annotations

import numpy as np
import torch

from fastdecode.kernels import _native
from fastdecode.spart.linears.base import Linear
from fastdecode.spart.linears.huge_pages import empty
from fastdecode.spart.served import act_code
from fastdecode.spart.threads import pool_threads


def kept16(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight [..., in] in 16 bits, if kernels/linears multiplies these with rows in the dtype of `weight` on its
    device, and if they have all of its numbers; else None."""
    if weight.dtype is torch.float32 and keeps16(weight.device):
        return exact16(weight)
    return weight if weight.dtype is torch.bfloat16 and multiplies_bf16(weight.device, weight.shape[-1]) else None


def keeps16(device: torch.device) -> bool:
    """True if 16-bit weights stay 16-bit in memory for fp32 activations on a device."""
    return _has_products(device, torch.float32)


def multiplies_bf16(device: torch.device, ins: int) -> bool:
    """True if Linear16 multiplies bf16 rows of `ins` numbers on a device."""
    return ins % 2 == 0 and _has_products(device, torch.bfloat16)


def _has_products(device: torch.device, act: torch.dtype) -> bool:
    """Whether kernels/linears multiplies bf16 weights and rows in `act` on a device."""
    return device.type == "cpu" and _native.Dense16Linear.supports(act_code(torch.bfloat16), act_code(act))


def exact16(weight: torch.Tensor) -> torch.Tensor | None:
    """The fp32 weight in bf16 or fp16, or None if neither has all of its numbers."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = weight.to(dtype)
        if torch.equal(narrow.float(), weight):
            return narrow
    return None


def packed16(
    weight: torch.Tensor, act: torch.dtype, bias: np.ndarray | None = None
) -> tuple[tuple[_native.Dense16Linear, ...], np.ndarray]:
    """The products of matrices `weight` [n, out, in], in fp16 or bf16 on the CPU, with rows in `act`, and the memory of
    all of them, to which they are copied. Each has the `bias`, fp32 [out]. Raises ValueError for activations without
    such products on this CPU."""
    n, outs, ins = weight.shape
    dtype, rows = act_code(weight.dtype), act_code(act)
    size = _native.Dense16Linear.packed_bytes(dtype, rows, outs, ins)
    packed = empty(n * size)
    products = []
    for i, matrix in enumerate(weight):
        of_matrix = packed[i * size : (i + 1) * size]
        _native.Dense16Linear.pack(dtype, rows, outs, ins, _numbers(matrix.contiguous()), of_matrix, pool_threads())
        products.append(_native.Dense16Linear(dtype, rows, outs, ins, of_matrix, bias))
    return tuple(products), packed


class Linear16(Linear):
    """The product by kernels/linears, for fp32 or bf16 activations."""

    __slots__ = ("_native", "_outs", "nbytes")

    nbytes: int

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, act: torch.dtype = torch.float32):
        """`weight` [out, in] in fp16 or bf16, on the CPU, is copied; `bias` [out] is kept in fp32; `act` is the
        activations' dtype.

        Raises ValueError for activations without such products on this CPU.
        """
        vector = None if bias is None else bias.float().contiguous().numpy()
        (self._native,), packed = packed16(weight[None], act, vector)
        self._outs = len(weight)
        self.nbytes = packed.nbytes + (0 if vector is None else vector.nbytes)

    @property
    def native(self) -> tuple[_native.Dense16Linear, ...]:
        return (self._native,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(len(x), self._outs)
        self._native.run(_numbers(x.contiguous()), _numbers(y), pool_threads())
        return y


def _numbers(x: torch.Tensor) -> np.ndarray:
    """The tensor's memory; numpy has no bf16."""
    return x.numpy() if x.dtype is torch.float32 else x.view(torch.int16).numpy()
