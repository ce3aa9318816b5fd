"""Dense16Linear, Dense16Embedding: 16-bit weights for fp32 activations on a CPU, exactly as in the checkpoint.

CPUs without 16-bit products compute in fp32. Kept in fp32, the weights of a 16-bit checkpoint would take twice the
memory, and a step of few rows, which memory limits, twice as long.
"""

from __future__ import annotations

import torch

from fastdecode.kernels import _native
from fastdecode.region.contract import ACT_DTYPES
from fastdecode.spart.linears.base import Embedding, Linear

_CODES = {torch.float16: ACT_DTYPES.index("fp16"), torch.bfloat16: ACT_DTYPES.index("bf16")}


def keeps16(device: torch.device) -> bool:
    """True if 16-bit weights stay 16-bit in memory for fp32 activations on a device."""
    if device.type != "cpu":
        return False
    try:
        _native.Dense16Linear.pack(_CODES[torch.bfloat16], 1, 1, bytes(2))
    except ValueError:  # an ISA without vectors
        return False
    return True


def exact16(weight: torch.Tensor) -> torch.Tensor | None:
    """The fp32 weight in bf16 or fp16, or None if neither has all of its numbers."""
    for dtype in _CODES:
        narrow = weight.to(dtype)
        if torch.equal(narrow.float(), weight):
            return narrow
    return None


class Dense16Linear(Linear):
    """The product by kernels/linears, for fp32 activations."""

    __slots__ = ("_native", "_outs", "nbytes")

    nbytes: int

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        """`weight` [out, in] in fp16 or bf16, on the CPU, is copied; `bias` fp32 [out] is kept.

        Raises ValueError if the CPU's ISA has no such products.
        """
        outs, ins = weight.shape
        code = _CODES[weight.dtype]
        packed = _native.Dense16Linear.pack(code, outs, ins, weight.contiguous().view(torch.int16).numpy())
        vector = None if bias is None else bias.contiguous().numpy()
        self._native = _native.Dense16Linear(code, outs, ins, packed, vector)
        self._outs = outs
        self.nbytes = len(packed) + (0 if bias is None else bias.nbytes)

    @property
    def isa(self) -> str:
        """The ISA of the kernels."""
        return self._native.isa

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(len(x), self._outs)
        self._native.run(x.contiguous().numpy(), y.numpy(), torch.get_num_threads())
        return y


class Dense16Embedding(Embedding):
    """`weight` is [rows, width] in fp16 or bf16; its rows are widened to fp32."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor):
        self.weight = weight

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids).float()

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes
