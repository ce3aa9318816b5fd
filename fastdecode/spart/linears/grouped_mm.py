"""grouped_mm: rows that are sorted into groups, each group times its own matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: torch's grouped product takes tensors whose rows begin at multiples of this many bytes.
_ALIGNMENT = 16
#: The first CUDA devices that torch's grouped product runs on.
_CAPABILITY = (8, 0)


def grouped_mm(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The rows x [n, in], sorted by group, times matrices [groups, in, out] -> [n, out].

    `ends` [groups] int32 is the end of each group among the rows; the last one is n. torch's grouped product computes
    it where it can. Elsewhere a product for each group does, for which the host reads `ends`.
    """
    if _torch_can(x, matrices):
        return F.grouped_mm(x, matrices, offs=ends)
    out = x.new_empty(len(x), matrices.shape[2])
    begin = 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        if end > begin:
            torch.mm(x[begin:end], matrix, out=out[begin:end])
        begin = end
    return out


def _torch_can(x: torch.Tensor, matrices: torch.Tensor) -> bool:
    if not hasattr(F, "grouped_mm"):  # torch 2.9
        return False
    if x.device.type != "cpu" and x.dtype is not torch.bfloat16:  # torch would read `ends`, too
        return False
    strides = matrices.stride(0), max(matrices.stride()[1:]), x.stride(0)  # either dimension of a matrix may be last
    if any(size * x.itemsize % _ALIGNMENT for size in strides):
        return False
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= _CAPABILITY
