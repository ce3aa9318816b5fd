"""Rotary position embedding (Su et al., arXiv 2104.09864) over the two halves of a head, as in GPT-NeoX and Llama."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from fastdecode.spart.checkpoints.config import Rope


def inverse_frequencies(rope: Rope, head_size: int) -> torch.Tensor:
    """The angle by which RoPE turns each pair of a head's elements at each position, in radians: fp32 [pairs]."""
    size = rope.width(head_size)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / rope.theta**exponents
    match rope.kind:
        case "none":
            return torch.zeros_like(frequencies)
        case "linear":
            return frequencies / rope.factor
        case "proportional":
            turned = torch.arange(len(frequencies)) < int(rope.fraction * size // 2)
            return torch.where(turned, frequencies / rope.factor, 0.0)
        case "factors":
            return frequencies / torch.tensor(rope.factors)
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies, size)
        case _:
            return frequencies


def _llama3(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: the frequency of a slow pair is divided by `factor`, that of a fast pair is kept.

    Between the two, frequencies are interpolated.
    """
    turns = rope.original_max_positions * frequencies / (2 * math.pi)  # over the positions the model was trained on
    fast = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - fast) * frequencies / rope.factor + fast * frequencies


def _yarn(rope: Rope, frequencies: torch.Tensor, head_size: int) -> torch.Tensor:
    """YaRN, arXiv 2309.00071, equations 17 to 20: as Llama 3.1, but interpolated by the pair's number."""

    def pair_that_turns(times: float) -> float:
        ratio = rope.original_max_positions / (times * 2 * math.pi)
        return head_size * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    ramp = (torch.arange(head_size // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    slow = ramp.clamp(0, 1)
    return slow * frequencies / rope.factor + (1 - slow) * frequencies


_KEPT = 1 << 14  # positions whose angles a CPU looks up: 8 MiB with 64 pairs


class Angles(NamedTuple):
    """The angles of a step's rows, [n, 1, pairs] each: `cos` and `sin` turn K, `q_cos` and `q_sin` turn Q. Both are the
    same tensors unless Q is scaled by its position: the scale is then a factor in `q_cos` and `q_sin`."""

    cos: torch.Tensor
    sin: torch.Tensor
    q_cos: torch.Tensor
    q_sin: torch.Tensor

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """The addresses of the four tensors' elements, for kernels/decoder."""
        return self.cos.data_ptr(), self.sin.data_ptr(), self.q_cos.data_ptr(), self.q_sin.data_ptr()


class RotaryEmbedding:
    """The angles of a step's rows."""

    def __init__(self, rope: Rope, head_size: int, device: torch.device, dtype: torch.dtype):
        sets = [rope, replace(rope, factors=rope.long_factors)] if rope.long_factors else [rope]
        self._frequencies = torch.stack([inverse_frequencies(one, head_size) for one in sets]).to(device)
        self._rope, self._scale = rope, rope.attention_factor
        self._dtype = dtype
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None  # on a CPU: the angles of the first positions

    def angles(self, positions: torch.Tensor, long: torch.Tensor | None = None) -> Angles:
        """The angles at positions [n], in the activation dtype. Computed in fp32.

        `long` int64 [n] is 1 for rows that use the long factors; None: no row does.
        """
        cos, sin = self._turned(positions, long)
        if not self._rope.query_beta:
            return Angles(cos, sin, cos, sin)
        scale = 1 + self._rope.query_beta * torch.log1p(positions // self._rope.original_max_positions)[:, None, None]
        return Angles(cos, sin, (cos * scale).to(self._dtype), (sin * scale).to(self._dtype))

    def _turned(self, positions: torch.Tensor, long: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of all angles."""
        if long is not None or positions.device.type != "cpu" or not len(positions) or positions.max() >= _KEPT:
            return self._computed(positions, long)
        if self._first is None:
            self._first = self._computed(torch.arange(_KEPT), None)
        cos, sin = self._first
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _computed(self, positions: torch.Tensor, long: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = self._frequencies[:1] if long is None else self._frequencies.index_select(0, long)
        angles = (positions.to(torch.float32)[:, None] * frequencies)[:, None]
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1.0:
            cos, sin = cos * self._scale, sin * self._scale
        return cos.to(self._dtype), sin.to(self._dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> None:
    """Turn x [n, heads, head_size] into `out`: the halves (a, b) of a head's first elements, twice as many as cos
    has, become (a cos - b sin, b cos + a sin). Further elements are copied."""
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        out[..., size:].copy_(x[..., size:])
        x, out = x[..., :size], out[..., :size]
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
