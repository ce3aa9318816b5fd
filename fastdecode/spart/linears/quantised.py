"""Quantised: a weight matrix in few bits, the common form of every quantised file and of rounded weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

#: Numbers that share a scale if we round the weights ourselves; kernels/linears rounds activations in such blocks.
GROUP = 32
#: Bits of the weights that `--weights` makes.
BITS = {"int8": 8, "int4": 4}
#: With `--weights`, a CPU rounds activations to 8 bits, for speed.
ACTIVATION_BITS = 8

#: The numbers that 4 bits of a transformed matrix stand for. Among numbers up to the 32 of the kernels' tables, these
#: have the smallest squared error for 32 normally distributed weights that share a scale and a minimum. Equal steps
#: between all numbers have an error 6 % larger.
LEVELS = (0, *range(3, 30, 2), 32)

#: The numbers of OCP's E2M1 format, twice each, above E2M1_ZERO: those of the codes 0 to 7, and then their negatives.
E2M1_ZERO = 12
_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
E2M1_TABLE = (*(E2M1_ZERO + number for number in _MAGNITUDES), *(E2M1_ZERO - number for number in _MAGNITUDES))


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [out, in] whose element (o, i) is scales[o, i // group] * (n - zero) + mins[o, i // group], where n is
    q[o, i], or table[q[o, i]] if there is a table."""

    q: torch.Tensor  # [out, in] uint8; below 16 if `bits` is 4
    scales: torch.Tensor  # [out, groups] fp32, groups = ceil(in / group)
    mins: torch.Tensor | None  # [out, groups] fp32; None: zero
    zero: int
    bits: int  # 4 or 8
    group: int  # a multiple of GROUP
    #: Bits to which a CPU rounds the activations that multiply it, 8 or 15. A file that says nothing about activations
    #: means exact ones; 15 bits give the same results up to rounding.
    activation_bits: int = 15
    order: torch.Tensor | None = None  # [in]: the input that belongs to each column of `q`; None: the column's own
    table: tuple[int, ...] = ()  # the numbers, 0 to 32, that 4-bit codes stand for; empty: the codes themselves
    #: Each block of GROUP inputs was multiplied by a Hadamard matrix / GROUP before it was rounded. Only with
    #: activations of 8 bits and inputs that are whole groups; with 8 bits the zero is 128 and numbers are within
    #: FD_LINEAR_MOST_OF_FOUR (kernels/linears/linear.h).
    hadamard: bool = False

    @property
    def form(self) -> tuple[object, ...]:
        """The properties that matrices must share to be stacked."""
        order = None if self.order is None else self.order.numpy().tobytes()
        return (
            self.bits,
            self.group,
            self.zero,
            self.mins is None,
            self.activation_bits,
            order,
            self.table,
            self.hadamard,
        )

    def dequantise(self) -> torch.Tensor:
        """The matrix [out, in] in fp32."""
        outs, ins = self.q.shape
        groups = self.scales.shape[1]
        numbers = decode(self.q, self.table)
        values = F.pad(numbers, (0, groups * self.group - ins)).view(outs, groups, self.group).float() - self.zero
        values *= self.scales[:, :, None]
        if self.mins is not None:
            values += self.mins[:, :, None]
        values = (hadamard_blocks(values) if self.hadamard else values).view(outs, -1)[:, :ins]
        return values if self.order is None else values[:, self.order.argsort()]

    def select_rows(self, index: torch.Tensor | slice) -> Quantised:
        """The matrix of the rows `index`."""
        mins = None if self.mins is None else self.mins[index]
        return replace(self, q=self.q[index], scales=self.scales[index], mins=mins)

    def slice_inputs(self, inputs: slice) -> Quantised:
        """The matrix of the inputs from `inputs.start` to before `inputs.stop`, in smaller groups where these cut one.
        Raises ValueError if no groups are small enough."""
        stop = self.scales.shape[1] * self.group if inputs.stop == self.q.shape[1] else inputs.stop
        group = math.gcd(self.group, inputs.start, stop)
        if self.order is not None:
            raise ValueError("its inputs are in an order of their own (act-order)")
        if group % GROUP:
            raise ValueError(f"the inputs {inputs.start} to {inputs.stop} are not whole groups of {GROUP}")

        def of_groups(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(self.group // group, 1)[:, inputs.start // group : stop // group]

        mins = None if self.mins is None else of_groups(self.mins)
        return replace(self, q=self.q[:, inputs], scales=of_groups(self.scales), mins=mins, group=group)

    def select_inputs(self, index: torch.Tensor) -> Quantised:
        """The matrix whose input i is the input index[i] of this one. `index` has each input once; the matrix has no
        `order` and is not transformed."""
        assert self.order is None and not self.hadamard, "the inputs of each group would not stay together"
        first = index[:: self.group]
        steps = torch.arange(len(index)) % self.group
        if (first % self.group).any() or not torch.equal(
            index - steps, first.repeat_interleave(self.group)[: len(index)]
        ):
            return replace(self, order=index.argsort())  # groups are torn apart, so activations are put in their order
        groups = first // self.group
        mins = None if self.mins is None else self.mins[:, groups]
        return replace(self, q=self.q[:, index], scales=self.scales[:, groups], mins=mins)


#: A matrix [out, in] for each head: a tensor [heads, out, in], or quantised matrices of one form.
HeadMatrices = torch.Tensor | Sequence[Quantised]


def activation_bits(device: torch.device) -> int:
    """Bits of the activations for which `--weights` rounds: those of a GPU have 16, so its weights are not
    transformed, and their numbers lie at equal steps."""
    return ACTIVATION_BITS if device.type == "cpu" else 15


def decode(codes: torch.Tensor, table: tuple[int, ...]) -> torch.Tensor:
    """The numbers, uint8, that codes [...] uint8 stand for; see Quantised.table."""
    return torch.tensor(table, dtype=torch.uint8, device=codes.device)[codes.int()] if table else codes


def pack_pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers below 16, uint8 [rows, 2 n] -> bytes [rows, n], each with an even column's number in its low half and the
    next column's in its high half."""
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, ...] -> the numbers of their halves, the low one first: uint8 [rows, 2 * bytes of a row]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def hadamard_blocks(x: torch.Tensor) -> torch.Tensor:
    """Multiply each block of GROUP numbers of x, whose size is a multiple of GROUP, by the Hadamard matrix of 1 and -1.
    Twice is a multiplication by GROUP."""
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    pair = matrix.new_tensor([[1, 1], [1, -1]])
    while len(matrix) < GROUP:
        matrix = torch.kron(matrix, pair)
    return (x.reshape(-1, GROUP) @ matrix).view(x.shape)


def concatenate(matrices: Sequence[Quantised]) -> Quantised:
    """One matrix of several of the same form, rows over rows."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    mins = [matrix.mins for matrix in matrices if matrix.mins is not None]
    return replace(
        first,
        q=torch.cat([matrix.q for matrix in matrices]),
        scales=torch.cat([matrix.scales for matrix in matrices]),
        mins=torch.cat(mins) if mins else None,
    )


def rows_of(matrices: Sequence[Quantised], start: int, stop: int) -> list[Quantised]:
    """The rows from `start` to before `stop` of matrices whose rows stand over one another."""
    parts, first = [], 0
    for matrix in matrices:
        own = slice(max(start - first, 0), max(stop - first, 0))
        first += len(matrix.q)
        if len(matrix.q[own]):
            parts.append(matrix.select_rows(own))
    return parts
