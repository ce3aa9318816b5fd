"""The gated delta rule (Yang et al., arXiv 2412.06464): a block's rows from their sequences' states.

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

from fastdecode.spart.checkpoints.config import DeltaRule
from fastdecode.spart.linears.base import Linear
from fastdecode.spart.lora.adapters import AdapterRows, adapted_product
from fastdecode.spart.states.pool import StateRows, StateTensor

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
    row = itemsize * (2 * rule.channels + rule.v_width) + 4 * (2 * rule.channels + 2 * heads + 3 * rule.v_width)
    state = 4 * rule.k_size * rule.v_width + (4 + itemsize) * rule.kernel * rule.channels
    return rows * row + (single + 2) * state + 4 * rule.v_heads * _CHUNK_TOKENS * (6 * _CHUNK_TOKENS + heads)


def delta_block(
    rule: DeltaRule,
    weights: DeltaWeights,
    norm_eps: float,
    h: torch.Tensor,
    rows: StateRows,
    index: int,
    adapters: AdapterRows | None,
) -> torch.Tensor:
    """h [n, hidden_size] -> [n, hidden_size], by the states of the rows' sequences in the `index`-th block that has
    one; advances the states."""
    mixed, z, beta, decay = _split(rule, adapted_product(weights.inputs, h, adapters))
    beta = beta.float().sigmoid()
    decay = weights.decay.exp().neg() * F.softplus(decay.float() + weights.decay_bias)
    inputs, sums = rows.pool.blocks[index]
    mixed = F.silu(_convolve(mixed, weights.conv[:, 0].T, rows, inputs))
    qk_width = rule.k_heads * rule.k_size
    q, k, v = mixed.split([qk_width, qk_width, rule.v_width], dim=1)
    q, k = _unit_heads(rule, q) * rule.k_size**-0.5, _unit_heads(rule, k)
    v = v.unflatten(1, (rule.v_heads, rule.v_size))
    o = torch.empty_like(v)
    for singles in rows.rounds():
        tokens = (x.index_select(0, singles.rows) for x in (q, k, v, beta, decay))
        states = sums.index_select(0, singles.sources)
        o.index_copy_(0, singles.rows, _advance_rows(states, *tokens))
        sums.index_copy_(0, singles.targets, states)
    for span, source, target in rows.spans:
        state = sums[target]
        if source != target:
            state.copy_(sums[source])
        for start in range(span.start, span.stop, _CHUNK_TOKENS):
            some = slice(start, min(start + _CHUNK_TOKENS, span.stop))
            o[some] = _advance_chunk(state, q[some], k[some], v[some], beta[some], decay[some])
    o = F.rms_norm(o, (rule.v_size,), weights.norm, norm_eps)
    o *= F.silu(z.float()).view_as(o)
    return adapted_product(weights.out, o.flatten(1).to(h.dtype), adapters)


def _split(rule: DeltaRule, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The outputs y of the projections -> Q, K and V [n, channels], Z [n, v_heads * v_size], and beta and decay
    [n, v_heads]."""
    if not rule.by_head:
        mixed, z, beta, decay = y.split([rule.channels, rule.v_width, rule.v_heads, rule.v_heads], dim=1)
        return mixed, z, beta, decay
    wide, narrow = y.split([rule.channels + rule.v_width, 2 * rule.v_heads], dim=1)
    v_width = rule.v_width // rule.k_heads
    of_heads = wide.unflatten(1, (rule.k_heads, -1)).split([rule.k_size, rule.k_size, v_width, v_width], dim=2)
    q, k, v, z = (x.flatten(1) for x in of_heads)
    beta, decay = (x.flatten(1) for x in narrow.unflatten(1, (rule.k_heads, -1)).chunk(2, dim=2))
    return torch.cat([q, k, v], dim=1), z, beta, decay


def _convolve(x: torch.Tensor, weight: torch.Tensor, rows: StateRows, inputs: torch.Tensor) -> torch.Tensor:
    """x [n, channels] -> fp32 [n, channels], each row from its own and the rows before it, whose weights are
    `weight` [kernel, channels]. `inputs` [slots, kernel - 1, channels] are the rows before the step's."""
    out = torch.empty(x.shape, device=x.device)
    kernel = len(weight)
    for singles in rows.rounds():
        seen = torch.cat([inputs.index_select(0, singles.sources), x.index_select(0, singles.rows)[:, None]], dim=1)
        inputs.index_copy_(0, singles.targets, seen[:, 1:])
        out.index_copy_(0, singles.rows, (seen.float() * weight).sum(1))
    for span, source, target in rows.spans:
        seen = torch.cat([inputs[source], x[span]])
        inputs[target] = seen[len(seen) - kernel + 1 :]
        n = span.stop - span.start
        out[span] = sum(seen[i : i + n].float() * weight[i] for i in range(kernel))
    return out


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
    beta, total = beta.T[:, :, None], decay.T.cumsum(1)  # [heads, n, 1], [heads, n]
    faded = total.exp()[:, :, None]
    # The decay from token s to token t, [heads, t, s]; zero for a later s.
    between = (total[:, :, None] - total[:, None]).tril().exp().tril()
    system = beta * between * (k @ k.mT)
    corrections: torch.Tensor = torch.linalg.solve_triangular(
        system, beta * (v - faded * (k @ state)), upper=False, unitriangular=True
    )
    o = faded * (q @ state) + (between * (q @ k.mT)) @ corrections
    state *= faded[:, -1:]
    state += (k * between[:, -1, :, None]).mT @ corrections
    return o.transpose(0, 1)
