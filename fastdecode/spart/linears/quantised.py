"""Quantised: a weight matrix in few bits, the common form of every quantised file, and rounding to it.

Where activations are rounded as well, `quantise` multiplies the matrix by a Hadamard matrix: see
kernels/linears/linear.h. One large activation then does not make the others of its block coarse, AVX2's kernel can
round them to 7 bits, and a large weight is spread over its group. The transformed weights of a group are distributed
almost normally, and their 4 bits are LEVELS.
"""

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

#: The bound on `most_of_four` of a transformed matrix's numbers; FD_LINEAR_MOST_OF_FOUR in kernels/linears/linear.h.
MOST_OF_FOUR = 255

#: The numbers that 4 bits of a transformed matrix stand for. Among numbers up to the 32 of the kernels' tables, these
#: have the smallest squared error for 32 normally distributed weights that share a scale and a minimum. Equal steps
#: between all numbers have an error 6 % larger.
LEVELS = (0, *range(3, 30, 2), 32)

#: The numbers of OCP's E2M1 format, twice each, above E2M1_ZERO: those of the codes 0 to 7, and then their negatives.
E2M1_ZERO = 12
_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
E2M1_TABLE = (*(E2M1_ZERO + number for number in _MAGNITUDES), *(E2M1_ZERO - number for number in _MAGNITUDES))

_ELEMENTS = 1 << 17  # rounded at a time: what fits into a cache
_ROUNDS = 4  # of rounding with a scale and a minimum and fitting them to the rounded numbers
_SHARES = (1, 0.9)  # of a group's range, which scale and minimum are first fitted to


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
    #: MOST_OF_FOUR.
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


def quantise(weight: torch.Tensor, bits: int, activation_bits: int = 15) -> Quantised:
    """Round a matrix [out, in] of any float dtype in groups of GROUP inputs.

    The matrix is transformed (`hadamard`) if activations have 8 bits and the inputs are whole groups. 8 bits are
    symmetric about zero. 4 bits have a minimum too; scale and minimum start from shares of the group's range and are
    fitted to the rounded numbers by least squares, and those with the smallest squared error are kept.
    """
    step = max(1, _ELEMENTS // weight.shape[1])
    rows = [weight[i : i + step].float() for i in range(0, len(weight), step)]
    hadamard = activation_bits == 8 and weight.shape[1] % GROUP == 0
    round_rows = _round_to_8 if bits == 8 else _round_to_4
    matrix = concatenate([round_rows(block, hadamard) for block in rows])
    return replace(matrix, activation_bits=activation_bits)


def _grouped(weight: torch.Tensor, hadamard: bool) -> torch.Tensor:
    """[out, in] -> [out, groups, GROUP], padded with zeros, or transformed."""
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)
    return hadamard_blocks(groups) / GROUP if hadamard else groups


def _numbers(q: torch.Tensor, ins: int) -> torch.Tensor:
    return q.to(torch.uint8).flatten(1)[:, :ins].contiguous()


def most_of_four(numbers: torch.Tensor) -> torch.Tensor:
    """numbers [out, in] -> [out, in / GROUP] the largest sum, by magnitude, of the positive or of the negative numbers
    among four that AVX2 multiplies in one 16-bit sum: inputs 8i, 8i + 1, 8i + 4 and 8i + 5, or the 4 others of 8."""
    fours = numbers.view(len(numbers), -1, GROUP // 8, 2, 2, 2)
    positive, negative = (side.sum((3, 5)).amax((2, 3)) for side in (fours.clamp_min(0), (-fours).clamp_min(0)))
    return torch.maximum(positive, negative)


def _round_to_8(weight: torch.Tensor, hadamard: bool) -> Quantised:
    groups = _grouped(weight, hadamard)
    scales = groups.abs().amax(2) / 127
    if hadamard:  # rounding adds up to 1/2 to each of the four
        scales = torch.maximum(scales, most_of_four(groups.flatten(1)) / (MOST_OF_FOUR - 2))
    q = (groups / scales.clamp_min(1e-30)[:, :, None]).round_() + 128
    return Quantised(_numbers(q, weight.shape[1]), scales, None, 128, 8, GROUP, hadamard=hadamard)


def _round_to_4(weight: torch.Tensor, hadamard: bool) -> Quantised:
    numbers, scales, mins = fit_4_bits(_grouped(weight, hadamard), hadamard)
    q = _numbers(codes_of_levels(numbers) if hadamard else numbers, weight.shape[1])
    table = LEVELS if hadamard else ()
    return Quantised(q, scales[:, :, 0], mins[:, :, 0], 0, 4, GROUP, table=table, hadamard=hadamard)


def nearest_level(x: torch.Tensor) -> torch.Tensor:
    """The one of LEVELS that is nearest to each number, as a float."""
    # The numbers between the outermost two are odd; those two are 3 away from the next ones, not 2.
    odd = x.sub(1).div_(2).round_().clamp_(1, 14).mul_(2).add_(1)
    return (x - odd).div_(3).round_().clamp_(-1, 1).mul_(3).add_(odd)


def codes_of_levels(levels: torch.Tensor) -> torch.Tensor:
    """The codes, 0 to 15, of some of LEVELS."""
    return levels.div(2, rounding_mode="floor").clamp_max(15)


def fit_4_bits(groups: torch.Tensor, levels: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """groups [out, groups, inputs] fp32 -> their numbers of the same shape, 0 to 15 or some of LEVELS, and scales and
    minimums, both [out, groups, 1]."""
    most = LEVELS[-1] if levels else 15

    def rounded(scales: torch.Tensor, mins: torch.Tensor) -> torch.Tensor:
        numbers = (groups - mins) / scales.clamp_min(1e-30)
        return nearest_level(numbers) if levels else numbers.round_().clamp_(0, 15)

    least, largest = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    mean = groups.mean(2, keepdim=True)
    best = torch.full_like(mean, torch.inf)
    q, scales, mins = torch.zeros_like(groups), torch.zeros_like(mean), least
    for share in _SHARES:
        trial_scales = (largest - least) * (share / most)
        trial_mins = (largest + least - most * trial_scales) / 2
        for _ in range(_ROUNDS):
            trial = rounded(trial_scales, trial_mins)
            error = (trial * trial_scales + trial_mins - groups).square_().sum(2, keepdim=True)
            better = error < best
            scales, mins = torch.where(better, trial_scales, scales), torch.where(better, trial_mins, mins)
            q, best = torch.where(better, trial, q), torch.where(better, error, best)
            trial_mean = trial.mean(2, keepdim=True)
            trial -= trial_mean
            spread = trial.square().sum(2, keepdim=True).clamp_min(1e-30)
            trial_scales = trial.mul_(groups - mean).sum(2, keepdim=True) / spread
            trial_mins = mean - trial_scales * trial_mean
    return q, scales, mins
