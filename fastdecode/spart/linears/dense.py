"""Linears and embeddings with 16- and 32-bit weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastdecode.spart.linears.base import Embedding, Linear
from fastdecode.spart.linears.dense16 import Linear16, exact16, keeps16, kept16


class DenseLinear(Linear):
    """`weight` is [out, in], as in the checkpoint; `bias` is [out] or None."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class PackedLinear(Linear):
    """A linear for the CPU whose weight lies in the order that oneDNN's kernels read.

    F.linear packs the weight again at every call. For the few rows of a decode step that takes 1.4 times as long in
    bf16, and several times as long for a wide LM head. In fp32 a small weight is better left as it is: oneDNN's calls
    take longer than its product, and oneDNN compiles a kernel for each number of rows.
    """

    __slots__ = ("_bias", "_packed", "nbytes")

    _SMALL = 1 << 18  # bytes
    _ROWS = 32  # the number of rows that the order is best for; it is right for any number
    nbytes: int

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        """`weight` [out, in] is copied, `bias` [out] is kept."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, self._ROWS)
        self._bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    @classmethod
    def is_faster(cls, weight: torch.Tensor) -> bool:
        """Whether the CPU can multiply a packed `weight`, and does so faster than the weight as it is."""
        small = weight.dtype is torch.float32 and weight.nbytes < cls._SMALL
        return not small and can_pack(weight.device, weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        n, rows = len(x), known_rows(len(x))
        if n != rows:
            padded = x.new_zeros(rows, x.shape[1])
            padded[:n] = x
            x = padded
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y if n == rows else y[:n]


class DenseEmbedding(Embedding):
    """`weight` is [rows, width]; its rows are widened to `act`, the activations' dtype."""

    __slots__ = ("_act", "weight")

    def __init__(self, weight: torch.Tensor, act: torch.dtype):
        self.weight, self._act = weight, act

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids).to(self._act)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


def known_rows(n: int) -> int:
    """`n` rounded up to one of 16 sizes an octave: n <= 32 stays as it is, a larger n grows by at most a sixteenth.

    oneDNN compiles a kernel for every number of rows that it meets and keeps a thousand of them; each takes some
    milliseconds and 0.7 MB. Without rounding, steps would have hundreds of different numbers of rows.
    """
    step = 1 << max(0, (n - 1).bit_length() - 5)
    return -(-n // step) * step


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """True if PackedLinear works on this device with this dtype. oneDNN itself says whether the CPU has 16-bit
    dtypes."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def make_dense(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The best linear for a weight [out, in] and a bias [out] or None, by their device and dtype."""
    if (narrow := kept16(weight)) is not None:
        return Linear16(narrow, bias, weight.dtype)
    if PackedLinear.is_faster(weight):
        return PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def make_embedding(weight: torch.Tensor, act: torch.dtype) -> Embedding:
    """The best embedding for a weight [rows, width] and activations in `act`, by its device and dtype. In fp32 there
    is each number of 16 bits, so these stay as they are."""
    if act is torch.float32 and weight.dtype is not act:
        return DenseEmbedding(weight, act)
    weight = weight.to(act)
    if weight.dtype is torch.float32 and keeps16(weight.device) and (narrow := exact16(weight)) is not None:
        return DenseEmbedding(narrow, torch.float32)
    return DenseEmbedding(weight, act)
