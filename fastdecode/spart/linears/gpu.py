"""GPULinear, GPUExperts: products with matrices that stay in 4 or 8 bits in a GPU's memory.

The kernels of humming-kernels multiply (gpu_kernels.py). Without them, a product converts a block of rows to the
activation dtype at a time: correct on every device, slower than weights in 16 bits, and it keeps no converted matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastdecode.spart.linears.base import Linear
from fastdecode.spart.linears.experts import ExpertLinears, ExpertRows
from fastdecode.spart.linears.gpu_kernels import KernelProduct, kernel_product
from fastdecode.spart.linears.packed import PackedMatrix

#: Numbers that are converted at a time. A converted block takes some 64 MiB.
_BLOCK = 1 << 23


class GPULinear(Linear):
    """The product with one matrix. If the kernels take it, its packed form can be freed."""

    __slots__ = ("_bias", "_kernel", "_matrix", "_outs", "nbytes")

    nbytes: int

    def __init__(self, matrix: PackedMatrix, bias: torch.Tensor | None):
        """`bias` is [outs] in the activation dtype, or None."""
        self._outs, self._bias = matrix.outs, bias
        self._kernel = kernel_product([matrix])
        self._matrix = matrix if self._kernel is None else None
        self.nbytes = (matrix if self._kernel is None else self._kernel).nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel is None:
            assert self._matrix is not None
            y = torch.cat([F.linear(x, self._matrix.rows(block)) for block in blocks(self._matrix)], dim=1)
        else:
            y = self._kernel(x)
        y = first_columns(y, self._outs)
        return y if self._bias is None else y + self._bias


class GPUExperts(ExpertLinears):
    """The products with the matrices of all experts of a layer by the kernels, for which the host need not know the
    rows of each one."""

    __slots__ = ("_bias", "_kernel", "_outs", "nbytes")

    nbytes: int

    def __init__(self, kernel: KernelProduct, outs: int, bias: torch.Tensor | None):
        """`kernel` has `outs` outputs or more; `bias` is [experts, outs] in the activation dtype, or None."""
        self._kernel, self._outs, self._bias = kernel, outs, bias
        self.nbytes = kernel.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        y = first_columns(self._kernel(x, rows.ends), self._outs)
        return y if self._bias is None else y + self._bias.index_select(0, rows.experts)


def first_columns(y: torch.Tensor, n: int) -> torch.Tensor:
    """The first n columns of y, contiguous."""
    return y if y.shape[1] == n else y[:, :n].contiguous()


def blocks(matrix: PackedMatrix) -> list[slice]:
    """Rows of a matrix that are converted together."""
    n_rows = len(matrix.codes)
    step = max(1, _BLOCK // matrix.columns)
    return [slice(first, min(first + step, n_rows)) for first in range(0, n_rows, step)]
