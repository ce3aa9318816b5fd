"""GroupedLinear: the product with a Quantised matrix on a CPU, which stays in its 4 or 8 bits in memory.

The kernels of kernels/linears round each row's activations to 7, 8 or 15 bits in blocks of 32 and sum in integers.
torch's int8 products round a row, or the whole batch, to 8 bits with one scale; on SmolLM2-135M that costs 3 % of its
perplexity. linears/gpu.py multiplies on other devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fastdecode.kernels._native import QuantisedLinear
from fastdecode.spart.linears.base import Embedding, Linear
from fastdecode.spart.linears.huge_pages import in_huge_pages
from fastdecode.spart.linears.quantised import Quantised
from fastdecode.spart.threads import pool_threads

_LANES, _BLOCK, _CHUNKS = 16, 32, 8  # kernels/linears/linear.h
_SIGN = 0x80  # makes of a number around 128 the signed number, and the other way round
_UNIT_EXPONENT = 14  # the largest scale or minimum of a row is stored as an fp16 below 2^14


class GroupedLinear(Linear):
    """A quantised matrix in the layout of kernels/linears/linear.h."""

    def __init__(self, matrix: Quantised, bias: torch.Tensor | None):
        """`bias` is [out] of any float dtype, or None. Both are copied."""
        self.outs, self.ins = matrix.q.shape  # rows and columns of the matrix
        signed = matrix.hadamard and matrix.bits == 8 and QuantisedLinear.wants_signed()
        rows = -(-self.outs // _LANES) * _LANES
        self._weights = in_huge_pages(_tiles(matrix, rows))
        self._negated_sums = in_huge_pages(_negated_sums(matrix, rows)) if signed else None
        if signed:
            self._weights ^= _SIGN
        most = matrix.scales.abs().amax(1)
        if matrix.mins is not None:
            most = torch.maximum(most, matrix.mins.abs().amax(1))
        # Powers of two, so that scales which were fp16 in the file stay exact.
        units = torch.exp2(torch.log2(most.clamp_min(1e-30)).ceil() - _UNIT_EXPONENT)
        self._scales = in_huge_pages(_lanes(matrix.scales / units[:, None], rows))
        mins = matrix.mins
        self._mins = None if mins is None else in_huge_pages(_lanes(mins / units[:, None], rows))
        self._units = F.pad(units, (0, rows - self.outs))
        self._bias = None if bias is None else F.pad(bias.float(), (0, rows - self.outs))
        optional = (self._mins, self._bias, self._negated_sums)
        of_mins, of_bias, of_sums = (None if tensor is None else tensor.numpy() for tensor in optional)
        self._native = QuantisedLinear(
            self.outs,
            self.ins,
            matrix.bits,
            matrix.group,
            matrix.zero,
            1 if matrix.activation_bits == 8 else 2,  # passes over the activations
            matrix.hadamard,
            self._weights.numpy(),
            self._scales.numpy(),
            self._units.numpy(),
            of_mins,
            of_bias,
            bytes(matrix.table) or None,
            of_sums,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(x), self.outs)
        self.write(x.float().contiguous(), y, 0)
        return y.to(x.dtype)

    @property
    def native(self) -> tuple[QuantisedLinear, ...]:
        return (self._native,)

    def write(self, x: torch.Tensor, y: torch.Tensor, first: int) -> None:
        """Write the product of x [n, in] to y [n, width], from column `first` on; both are fp32 and contiguous."""
        self._native.run(x.numpy(), y.numpy(), pool_threads(), y.shape[1], first)

    @property
    def nbytes(self) -> int:
        tensors = (self._weights, self._scales, self._mins, self._units, self._bias, self._negated_sums)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def read_rows(self, ids: torch.Tensor, first: int, y: torch.Tensor) -> None:
        """Write the rows `ids` - `first` to y [n, in] fp32, as far as the matrix has them; ids is int64 [n]."""
        self._native.read_rows(ids.contiguous().numpy(), first, y.numpy())


class GroupedEmbedding(Embedding):
    """The rows of one or several GroupedLinears, one after another. They may be the LM head's: then embedding and head
    take memory once."""

    __slots__ = ("_dtype", "_linears", "nbytes")

    nbytes: int

    def __init__(self, linears: Sequence[GroupedLinear], dtype: torch.dtype, shared: bool):
        """`dtype`: of activations. `shared`: the memory counts as the head's."""
        self._linears = tuple(linears)
        self._dtype = dtype
        self.nbytes = 0 if shared else sum(linear.nbytes for linear in linears)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows, first = torch.zeros(len(ids), self._linears[0].ins), 0
        for linear in self._linears:
            linear.read_rows(ids, first, rows)
            first += linear.outs
        return rows.to(self._dtype)


def _tiles(matrix: Quantised, rows: int) -> torch.Tensor:
    """The stored numbers, uint8 [tiles, blocks, chunks, lanes, 4]; with 4 bits a byte holds an even chunk's number and
    the odd chunk's behind it."""
    outs, ins = matrix.q.shape
    width = matrix.scales.shape[1] * matrix.group
    q = matrix.q
    if (rows, width) != (outs, ins):
        q = F.pad(q, (0, width - ins, 0, rows - outs))
    q = q.view(rows // _LANES, _LANES, width // _BLOCK, _CHUNKS, 4)
    if matrix.bits == 4:
        q = q[:, :, :, 0::2] | q[:, :, :, 1::2] << 4
    return q.permute(0, 2, 3, 1, 4).contiguous()


def _negated_sums(matrix: Quantised, rows: int) -> torch.Tensor:
    """Minus the sum of each block's numbers, without their zero: int16 [tiles, blocks, lanes]."""
    sums = (matrix.zero - matrix.q.to(torch.int16)).view(len(matrix.q), -1, _BLOCK).sum(2, dtype=torch.int16)
    padded = F.pad(sums, (0, 0, 0, rows - len(sums)))
    return padded.view(rows // _LANES, _LANES, -1).transpose(1, 2).contiguous()


def _lanes(values: torch.Tensor, rows: int) -> torch.Tensor:
    """[out, groups] -> fp16 [tiles, groups, lanes]."""
    padded = F.pad(values, (0, 0, 0, rows - len(values)))
    return padded.view(rows // _LANES, _LANES, -1).transpose(1, 2).to(torch.float16).contiguous()
