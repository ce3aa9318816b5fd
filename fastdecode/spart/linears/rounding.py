"""Rounding: floats to a Quantised, by kernels/linears/quantise.h.

Where activations are rounded as well, `quantise` multiplies the matrix by a Hadamard matrix: see
kernels/linears/linear.h. One large activation then does not make the others of its block coarse, AVX2's kernel can
round them to 7 bits, and a large weight is spread over its group. The transformed weights of a group are distributed
almost normally, and their 4 bits are LEVELS.
"""

from __future__ import annotations

import torch

from fastdecode.kernels import _native
from fastdecode.spart.linears.quantised import GROUP, LEVELS, Quantised
from fastdecode.spart.served import ACT_NAMES, act_code
from fastdecode.spart.threads import pool_threads

#: The most columns that are rounded at a time with their errors compensated: whole groups.
MOST_COLUMNS = _native.QUANTISE_COLUMNS


def quantise(weight: torch.Tensor, bits: int, activation_bits: int = 15) -> Quantised:
    """Round a matrix [out, in] of any float dtype, in groups of GROUP inputs, each weight to the nearest number.

    The matrix is transformed (`hadamard`) if activations have 8 bits and the inputs are whole groups. 8 bits are
    symmetric about zero; 4 bits have a minimum too (kernels/linears/quantise.h).
    """
    ins = weight.shape[1]
    hadamard = activation_bits == 8 and ins % GROUP == 0
    matrix = Rounding(len(weight), ins, bits, hadamard)
    matrix.round_nearest(weight.cpu(), hadamard)
    return matrix.quantised(activation_bits, weight.device)


class Rounding:
    """A matrix that is being rounded, in memory of the CPU."""

    def __init__(self, outs: int, ins: int, bits: int, transformed: bool):
        """`transformed`: its groups are, or will be, multiplied by a Hadamard matrix / GROUP."""
        groups = -(-ins // GROUP)
        self._q = torch.empty(outs, ins, dtype=torch.uint8)
        self._scales = torch.empty(outs, groups)
        self._mins = torch.empty(outs, groups) if bits == 4 else None
        self._bits, self._transformed = bits, transformed

    def round_nearest(self, weight: torch.Tensor, transform: bool) -> None:
        """Round all of the matrix, each weight to the nearest number. `transform`: multiply the groups by the Hadamard
        matrix first."""
        self._run(weight, transform)

    def round_compensated(self, columns: torch.Tensor, factor: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Round the columns [out, in] of `groups`, int64 [in / GROUP], one after another, to 4 bits. `factor` [in, in]
        is the columns' part of the factor in quantise.h; in is at most MOST_COLUMNS. Returns the columns' errors
        divided by the factor's diagonal, fp32 [out, in]."""
        errors = torch.empty(columns.shape)
        self._run(columns, False, factor.float().contiguous(), errors, groups.contiguous())
        return errors

    def _run(
        self,
        x: torch.Tensor,
        transform: bool,
        factor: torch.Tensor | None = None,
        errors: torch.Tensor | None = None,
        groups: torch.Tensor | None = None,
    ) -> None:
        if x.dtype not in ACT_NAMES or x.stride(1) != 1:
            x = x.float().contiguous()
        outs, ins = x.shape
        _native.quantise(
            x.data_ptr(),
            act_code(x.dtype),
            self._bits,
            outs,
            ins,
            x.stride(0),
            transform,
            self._transformed and self._bits == 4,
            self._q.data_ptr(),
            self._q.shape[1],
            self._scales.data_ptr(),
            _address(self._mins),
            self._scales.shape[1],
            _address(factor),
            _address(errors),
            _address(groups),
            pool_threads(),
        )

    def quantised(self, activation_bits: int, device: torch.device) -> Quantised:
        """The matrix, once all of it is rounded, on a device."""
        mins = None if self._mins is None else self._mins.to(device)
        return Quantised(
            self._q.to(device),
            self._scales.to(device),
            mins,
            128 if self._bits == 8 else 0,
            self._bits,
            GROUP,
            activation_bits,
            table=LEVELS if self._transformed and self._bits == 4 else (),
            hadamard=self._transformed,
        )


def _address(x: torch.Tensor | None) -> int:
    """The address of a tensor's numbers, 0 for none."""
    return 0 if x is None else x.data_ptr()
