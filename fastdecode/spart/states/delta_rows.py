"""NativeRows: the gated delta rule of kernels/decoder (delta.h).

One call does what takes torch some forty small operations for rows that advance their states by one token each, and it
reads and writes each of these states once.
"""

from __future__ import annotations

import torch

from fastdecode.kernels import _native
from fastdecode.spart.checkpoints.config import DeltaRule
from fastdecode.spart.served import act_code
from fastdecode.spart.states.pool import StateRows
from fastdecode.spart.threads import pool_threads


class NativeRows:
    """The rule of one block."""

    def __init__(
        self,
        rule: DeltaRule,
        parameters: tuple[torch.Tensor, ...],
        norm_eps: float,
        length_eps: float,
        dtype: torch.dtype,
    ):
        """`parameters`: the convolution [kernel, channels], each V head's rate and bias [v_heads], and the norm
        [v_size], all fp32 and contiguous. `dtype`: that of the activations. Raises ValueError for a dtype that the CPU
        does not support."""
        assert all(tensor.is_contiguous() and tensor.dtype is torch.float32 for tensor in parameters)
        self._rule, self._dtype, self._parameters = rule, dtype, parameters
        conv, rate, bias, norm = (tensor.data_ptr() for tensor in parameters)
        self.native = _native.DeltaRows(
            act_code(dtype),
            (rule.k_heads, rule.v_heads, rule.k_size, rule.v_size),
            rule.kernel,
            _layout(rule),
            (conv, rate, bias, norm),
            norm_eps,
            length_eps,
        )

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether this CPU has the rule for activations of a dtype."""
        return _native.RowOps.supports(act_code(dtype))

    @property
    def isa(self) -> str:
        """The ISA of the functions."""
        return self.native.isa

    def advance(
        self, y: torch.Tensor, out: torch.Tensor, inputs: torch.Tensor, sums: torch.Tensor, rows: StateRows
    ) -> None:
        """Write `out` [n, v_heads * v_size] from the projections y [n, width], and advance the states: `inputs`
        [slots, kernel - 1, channels] and `sums` [slots, v_heads, k_size, v_size]."""
        rule = self._rule
        assert y.stride(1) == 1 and y.shape[1] == rule.channels + rule.v_width + 2 * rule.v_heads
        assert out.is_contiguous() and inputs.is_contiguous() and sums.is_contiguous() and sums.dtype is torch.float32
        assert y.dtype is out.dtype is inputs.dtype is self._dtype
        tensors = inputs.data_ptr(), sums.data_ptr()
        self.native.advance(y.data_ptr(), y.stride(0), out.data_ptr(), *tensors, rows.addresses, pool_threads())


def _layout(rule: DeltaRule) -> tuple[tuple[int, int], ...]:
    """Where Q, K, V, Z, beta and decay of the first K head stand in a row of the projections, and how far those of the
    next K head are from them."""
    group = rule.v_heads // rule.k_heads
    k_size, v_width, width = rule.k_size, group * rule.v_size, rule.channels + rule.v_width
    if rule.by_head:
        step = 2 * (k_size + v_width)
        wide = (0, step), (k_size, step), (2 * k_size, step), (2 * k_size + v_width, step)
        return *wide, (width, 2 * group), (width + group, 2 * group)
    k = rule.k_heads * k_size
    wide = (0, k_size), (k, k_size), (2 * k, v_width), (rule.channels, v_width)
    return *wide, (width, group), (width + rule.v_heads, group)
