"""The gated delta rule (Yang et al., arXiv 2412.06464): a block's rows from their sequences' states.

On a CPU kernels/decoder computes them (delta_rows.py), elsewhere torch.

A state S [k_size, v_size] of a V head maps keys to values. A token decays it and corrects the value that it has for the
token's key:

    S  <-  exp(g) S                       g < 0: the decay
    u   =  beta (v - Sᵀ k)                the correction, 0 < beta < 1
    S  <-  S + k uᵀ
    o   =  Sᵀ q

Several tokens of a sequence advance together: with G the sum of the decays up to a token, the corrections U of a chunk
solve (I + L) U = beta (V - exp(G) K S), where L[t, s] = beta_t exp(G_t - G_s) k_t · k_s for s < t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fastdecode.kernels import _native
from fastdecode.spart.checkpoints.config import DeltaRule
from fastdecode.spart.linears.base import Linear
from fastdecode.spart.lora.adapters import AdapterRows, adapted_product
from fastdecode.spart.states.delta_rows import NativeRows
from fastdecode.spart.states.pool import Singles, Span, StateRows, StateTensor

#: Tokens of a sequence that advance together.
_CHUNK_TOKENS = 64
#: It is added to the square of the length of a query or key, by which these are divided.
_LENGTH_EPS = 1e-6


@dataclass(slots=True)
class DeltaWeights:
    """The parameters of one block. Those that are not linears are fp32; see DeltaNames."""

    inputs: Linear
    conv: torch.Tensor  # [channels, 1, kernel]
    decay: torch.Tensor  # [v_heads]
    decay_bias: torch.Tensor  # [v_heads]
    norm: torch.Tensor  # [v_size]
    out: Linear


def state_tensors(rule: DeltaRule) -> tuple[StateTensor, StateTensor]:
    """A sequence's state in a block: the last inputs of the convolution, and the sums S of the V heads."""
    inputs = StateTensor((rule.kernel - 1, rule.channels), None)
    return inputs, StateTensor((rule.v_heads, rule.k_size, rule.v_size), torch.float32)


def step_bytes(rule: DeltaRule, rows: int, single: int, itemsize: int) -> int:
    """An upper bound of the bytes of memory that a block takes at once in a step of `rows` rows, of which `single` are
    chunks of one row; activations have `itemsize` bytes."""
    heads = rule.v_heads * (2 * rule.k_size + rule.v_size + 1)
    row = itemsize * (2 * rule.channels + 2 * rule.v_width) + 4 * (2 * rule.channels + 2 * heads + 3 * rule.v_width)
    state = 4 * rule.k_size * rule.v_width + (4 + itemsize) * rule.kernel * rule.channels
    return rows * row + (single + 2) * state + 4 * rule.v_heads * _CHUNK_TOKENS * (6 * _CHUNK_TOKENS + heads)


class DeltaBlock:
    """The rule of a block. `index`: its number among the blocks that have a state."""

    def __init__(self, rule: DeltaRule, weights: DeltaWeights, norm_eps: float, index: int, dtype: torch.dtype):
        """`dtype`: of the activations."""
        self._rule, self._weights, self._norm_eps, self._index = rule, weights, norm_eps, index
        self._conv = weights.conv[:, 0].T.contiguous()  # [kernel, channels]
        self._rate = weights.decay.exp().neg()
        self._native: NativeRows | None = None
        if weights.norm.device.type == "cpu" and NativeRows.supports(dtype):
            parameters = self._conv, self._rate, weights.decay_bias, weights.norm
            self._native = NativeRows(rule, parameters, norm_eps, _LENGTH_EPS, dtype)

    @property
    def native(self) -> _native.DeltaRows | None:
        """The rule in kernels/decoder; None: torch computes it."""
        return None if self._native is None else self._native.native

    @property
    def isa(self) -> str | None:
        """The ISA of the rule in kernels/decoder; None: torch computes it."""
        return None if self._native is None else self._native.isa

    def __call__(self, h: torch.Tensor, rows: StateRows, adapters: AdapterRows | None) -> torch.Tensor:
        """h [n, hidden_size] -> [n, hidden_size], by the states of the rows' sequences; advances the states."""
        y = adapted_product(self._weights.inputs, h, adapters)
        out = y.new_empty(len(y), self._rule.v_width)
        inputs, sums = rows.pool.blocks[self._index]
        if self._native is not None:
            self._native.advance(y, out, inputs, sums, rows)
        else:
            for singles in rows.rounds():
                out.index_copy_(0, singles.rows, self._advance_rows(y, inputs, sums, singles))
            for span in rows.spans:
                out[span.rows] = self._advance_span(y[span.rows], inputs, sums, span)
        return adapted_product(self._weights.out, out, adapters)

    def _advance_rows(
        self, y: torch.Tensor, inputs: torch.Tensor, sums: torch.Tensor, singles: Singles
    ) -> torch.Tensor:
        """The outputs of rows of different sequences."""
        x, z, beta, decay = self._split(y.index_select(0, singles.rows))
        seen = torch.cat([inputs.index_select(0, singles.sources), x[:, None]], dim=1)
        inputs.index_copy_(0, singles.targets, seen[:, 1:])
        q, k, v = self._heads((seen.float() * self._conv).sum(1))
        states = sums.index_select(0, singles.sources)
        o = _advance_rows(states, q, k, v, beta, decay)
        sums.index_copy_(0, singles.targets, states)
        return self._gated(o, z)

    def _advance_span(self, y: torch.Tensor, inputs: torch.Tensor, sums: torch.Tensor, span: Span) -> torch.Tensor:
        """The outputs of a span's rows."""
        x, z, beta, decay = self._split(y)
        q, k, v = self._heads(self._convolve(x, inputs, span))
        state, o = sums[span.target], torch.empty_like(v)
        if span.source != span.target:
            state.copy_(sums[span.source])
        for start in range(0, len(y), _CHUNK_TOKENS):
            some = slice(start, start + _CHUNK_TOKENS)
            o[some] = _advance_chunk(state, q[some], k[some], v[some], beta[some], decay[some])
        return self._gated(o, z)

    def _convolve(self, x: torch.Tensor, inputs: torch.Tensor, span: Span) -> torch.Tensor:
        """The convolution of a span's rows x [n, channels], in fp32."""
        n, seen = len(x), torch.cat([inputs[span.source], x])
        inputs[span.target] = seen[n:]
        seen = seen.float()
        convolved = seen[:n] * self._conv[0]
        for i, weights in enumerate(self._conv[1:], 1):
            convolved.addcmul_(seen[i : i + n], weights)
        return convolved

    def _split(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The outputs y of the projections -> Q, K and V [n, channels], Z [n, v_heads * v_size], and in fp32 beta and
        the logarithm of the decay [n, v_heads]."""
        rule = self._rule
        if rule.by_head:
            wide, narrow = y.split([rule.channels + rule.v_width, 2 * rule.v_heads], dim=1)
            v_width = rule.v_width // rule.k_heads
            of_heads = wide.unflatten(1, (rule.k_heads, -1)).split([rule.k_size, rule.k_size, v_width, v_width], dim=2)
            q, k, v, z = (x.flatten(1) for x in of_heads)
            beta, decay = (x.flatten(1) for x in narrow.unflatten(1, (rule.k_heads, -1)).chunk(2, dim=2))
            mixed = torch.cat([q, k, v], dim=1)
        else:
            mixed, z, beta, decay = y.split([rule.channels, rule.v_width, rule.v_heads, rule.v_heads], dim=1)
        return mixed, z, beta.float().sigmoid(), self._rate * F.softplus(decay.float() + self._weights.decay_bias)

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The convolution's outputs, fp32 [n, channels] -> Q, K [n, v_heads, k_size] and V [n, v_heads, v_size]."""
        rule = self._rule
        width = rule.k_heads * rule.k_size
        q, k, v = F.silu(convolved, inplace=True).split([width, width, rule.v_width], dim=1)
        return _unit_heads(rule, q) * rule.k_size**-0.5, _unit_heads(rule, k), v.unflatten(1, (-1, rule.v_size))

    def _gated(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """The output of the rule, fp32 [n, v_heads, v_size] -> that of the block before its last projection, in the
        dtype of z [n, v_heads * v_size]."""
        o = F.rms_norm(o, (self._rule.v_size,), self._weights.norm, self._norm_eps)
        return (o.flatten(1) * F.silu(z.float())).to(z.dtype)


def _unit_heads(rule: DeltaRule, x: torch.Tensor) -> torch.Tensor:
    """Queries or keys x [n, k_heads * k_size] -> [n, v_heads, k_size]: each has length one, and is that of all V heads
    that share it."""
    heads: torch.Tensor = x.unflatten(1, (rule.k_heads, rule.k_size))
    unit = heads * torch.rsqrt(heads.square().sum(2, keepdim=True) + _LENGTH_EPS)
    return unit.repeat_interleave(rule.v_heads // rule.k_heads, dim=1)


def _advance_rows(
    states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """Advance states [n, heads, k_size, v_size] by a token each: q and k [n, heads, k_size], v [n, heads, v_size],
    beta and decay [n, heads]. Returns O [n, heads, v_size]."""
    states *= decay.exp()[:, :, None, None]
    correction = (v - _look_up(states, k)) * beta[:, :, None]
    states.addcmul_(k[:, :, :, None], correction[:, :, None])
    return _look_up(states, q)


def _look_up(states: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The values [n, heads, v_size] of keys [n, heads, k_size] in states [n, heads, k_size, v_size]."""
    return torch.matmul(keys[:, :, None], states).squeeze(2)


def _advance_chunk(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """Advance a state [heads, k_size, v_size] by n tokens of one sequence; the other arguments as for `_advance_rows`.
    Returns O [n, heads, v_size]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, n, size]
    # [heads, n, 1], [heads, n]. A sum in fp32 would lose a weak decay behind strong ones.
    beta, total = beta.T[:, :, None], decay.T.cumsum(1, dtype=torch.float64)
    faded = total.float().exp()[:, :, None]
    # The decay from token s to token t, [heads, t, s]; zero for a later s.
    between = (total[:, :, None] - total[:, None]).float().tril().exp().tril()
    system = beta * between * (k @ k.mT)
    corrections: torch.Tensor = torch.linalg.solve_triangular(
        system, beta * (v - faded * (k @ state)), upper=False, unitriangular=True
    )
    o = faded * (q @ state) + (between * (q @ k.mT)) @ corrections
    state *= faded[:, -1:]
    state += (k * between[:, -1, :, None]).mT @ corrections
    return o.transpose(0, 1)
