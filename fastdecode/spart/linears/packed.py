"""PackedMatrix: a Quantised matrix as a GPU keeps it, in 4 or 8 bits and the activation dtype.

`pack` lists what the form changes. A table of numbers other than E2M1's, and a matrix that was rounded after a Hadamard
transform, are rounded again, because no GPU library multiplies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fastdecode.spart.linears.base import Embedding
from fastdecode.spart.linears.quantised import E2M1_TABLE, E2M1_ZERO, Quantised, pack_pairs, unpack_pairs
from fastdecode.spart.linears.rounding import quantise

#: Rows are a multiple of this number; what is added is zero. The kernels write 8 outputs at once.
_ROWS = 8
#: A group whose minimum is this many times its step is stored as its minimum: fp16 has no larger zero points.
_FLAT = 1 << 15


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix [outs, ins] whose element (o, i) is scales[o, i // group] * (n - zeros[o, i // group]). n is the code,
    or the number of OCP's E2M1 format that the code stands for."""

    codes: torch.Tensor  # uint8 [rows, columns * bits / 8]; a byte has the first of two numbers in its low half
    scales: torch.Tensor  # [rows, columns / group] in the activation dtype
    zeros: torch.Tensor | None  # like `scales`; None: half of the codes' range, or none with a table
    bits: int  # 4 or 8
    group: int
    table: torch.Tensor | None  # [16] E2M1's numbers in the activation dtype; None: the codes are the numbers
    outs: int  # of `rows`
    ins: int  # of `columns`

    @property
    def columns(self) -> int:
        """The columns that are stored."""
        return self.codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the matrix takes."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.zeros) if tensor is not None)

    def rows(self, index: slice | torch.Tensor) -> torch.Tensor:
        """Some rows in the activation dtype: [n, ins]. `index` is a slice or int64 [n]."""
        codes, scales = self.codes[index], self.scales[index]
        if self.bits == 4:
            codes = unpack_pairs(codes)
        if self.table is None:
            numbers = codes.to(scales.dtype).view(len(codes), -1, self.group)
            numbers -= 1 << (self.bits - 1) if self.zeros is None else self.zeros[index][:, :, None]
        else:
            numbers = self.table.index_select(0, codes.flatten().int()).view(len(codes), -1, self.group)
        return numbers.mul_(scales[:, :, None]).flatten(1)[:, : self.ins]


def pack(matrix: Quantised, device: torch.device, dtype: torch.dtype) -> PackedMatrix:
    """A matrix on `device`, with scales and zero points in the activation dtype. `order` is left to the caller.

    Codes of 4 and 8 bits stay as they are. Minimums become zero points, which are rounded to `dtype`: by at most 1/256
    of a step where a number of 4 bits has 11 bits of precision (fp16), by 1/32 in bf16. Matrices that no kernel
    multiplies are rounded again, in groups of 32.
    """
    if matrix.hadamard or matrix.table not in ((), E2M1_TABLE):
        matrix = quantise(replace(matrix, order=None).dequantise(), matrix.bits)
    q, scales, mins = matrix.q, matrix.scales, matrix.mins
    outs, ins = q.shape
    group, middle = matrix.group, 1 << (matrix.bits - 1)
    zeros = table = None
    if matrix.table:
        assert matrix.zero == E2M1_ZERO and mins is None, "the table's numbers are twice E2M1's"
        table, scales = torch.tensor(E2M1_TABLE, dtype=dtype).sub_(E2M1_ZERO).div_(2), scales * 2
    elif mins is not None:
        flat = scales.abs() * _FLAT <= mins.abs()
        scales = torch.where(flat, mins, scales)
        zeros = torch.where(flat, 0, matrix.zero - mins / scales)
        q = torch.where(flat.repeat_interleave(group, 1)[:, :ins], 1, q)
    elif matrix.zero != middle:
        zeros = torch.full_like(scales, matrix.zero)
    more_rows = -outs % _ROWS
    q = F.pad(q, (0, scales.shape[1] * group - ins, 0, more_rows))
    codes = q if matrix.bits == 8 else pack_pairs(q)

    def stored(values: torch.Tensor) -> torch.Tensor:
        return F.pad(values, (0, 0, 0, more_rows)).to(device, dtype)

    return PackedMatrix(
        codes=codes.contiguous().to(device),
        scales=stored(scales),
        zeros=None if zeros is None else stored(zeros),
        bits=matrix.bits,
        group=group,
        table=None if table is None else table.to(device),
        outs=outs,
        ins=ins,
    )


def alike(matrices: Sequence[PackedMatrix]) -> list[PackedMatrix]:
    """Matrices of one width in one form: those without zero points get some if others have some. Empty if they differ
    in anything else."""
    forms = {
        (matrix.bits, matrix.group, matrix.table is None, matrix.ins, matrix.scales.shape[1]) for matrix in matrices
    }
    if len(forms) > 1:
        return []
    if all(matrix.zeros is None for matrix in matrices):
        return list(matrices)
    middle = 1 << (matrices[0].bits - 1)
    return [
        matrix if matrix.zeros is not None else replace(matrix, zeros=torch.full_like(matrix.scales, middle))
        for matrix in matrices
    ]


def over_one_another(matrices: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """One matrix of several, rows over rows; None if they have no common form, or rows that were added."""
    if len(matrices) == 1:
        return matrices[0]
    parts = alike(matrices)
    if not parts or any(matrix.outs < len(matrix.codes) for matrix in parts):
        return None
    zeros = [matrix.zeros for matrix in parts if matrix.zeros is not None]
    return replace(
        parts[0],
        codes=torch.cat([matrix.codes for matrix in parts]),
        scales=torch.cat([matrix.scales for matrix in parts]),
        zeros=torch.cat(zeros) if zeros else None,
        outs=sum(matrix.outs for matrix in parts),
    )


class PackedEmbedding(Embedding):
    """The rows of one or several packed matrices, one after another."""

    __slots__ = ("_matrices", "nbytes")

    nbytes: int

    def __init__(self, matrices: Sequence[PackedMatrix]):
        self._matrices = tuple(matrices)
        self.nbytes = sum(matrix.nbytes for matrix in matrices)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        first, parts = 0, []
        for matrix in self._matrices:
            index = ids - first
            inside = (index >= 0) & (index < matrix.outs)
            rows = matrix.rows(index.clamp(0, matrix.outs - 1))
            parts.append(torch.where(inside[:, None], rows, rows.new_zeros(())))
            first += matrix.outs
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
