"""BlockOps: the decoder's operations between products. torch computes them on every device, kernels/decoder on a CPU,
and cuda_ops.py on a GPU.

On a CPU a layer's norms, RoPE and gate are some twenty small operations of torch, each of which reads and writes the
rows once and costs microseconds before it begins. The native operations are four.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F

from fastdecode.kernels import _native
from fastdecode.spart.checkpoints.config import ModelConfig
from fastdecode.spart.decoder.rope import Angles, apply_rope
from fastdecode.spart.decoder.weights import Layer, Norm
from fastdecode.spart.prefill.heads import heads_in, kv_heads_in
from fastdecode.spart.ranks.reduction import Reduction
from fastdecode.spart.served import ACT_NAMES, act_code, address_of
from fastdecode.spart.shape import Heads
from fastdecode.spart.threads import pool_threads


class RowHeads:
    """The heads of a layer in the memory of a step's exchange: the rows of `q` [n, elements] begin with the layer's Q
    heads, and those of `kv` [n, elements] with its K heads, then V heads. Rows may be any number of elements apart."""

    def __init__(self, q: torch.Tensor, kv: torch.Tensor, heads: Heads):
        self.q, self.kv, self.heads = q, kv, heads

    @cached_property
    def q_heads(self) -> torch.Tensor:
        """[n, q_heads, head_size]."""
        return heads_in(self.q, 0, self.heads.n_q, self.heads.k_size)

    @cached_property
    def k_heads(self) -> torch.Tensor:
        """[n, kv_heads, head_size]."""
        return kv_heads_in(self.kv, self.heads)[0]

    @cached_property
    def v_heads(self) -> torch.Tensor:
        """[n, kv_heads, head_size]."""
        return kv_heads_in(self.kv, self.heads)[1]


def split_gate(qkv: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a projection in which each Q head is followed by its gate -> Q, K and V, and the gates
    [n, q_heads * head_size]."""
    width = heads.n_q * heads.k_size
    q, gate = qkv[:, : 2 * width].unflatten(1, (heads.n_q, 2, -1)).unbind(2)
    return torch.cat([q.flatten(1), qkv[:, 2 * width :]], dim=1), gate.flatten(1)


class BlockOps:
    """The operations in torch."""

    #: The dtype of RoPE's cos and sin.
    angle_dtype: torch.dtype

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        self.angle_dtype = dtype
        self._config = config
        self._norm, self._activate = make_norm(config), make_activation(config)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The normalised rows of x [n, hidden_size]."""
        return self._norm(x, norm)

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add a block's output y to the residual stream x, both [n, hidden_size], and return x's normalised rows."""
        x.add_(y, alpha=self._config.residual_scale)
        return self._norm(x, norm)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The input [n, width] of an MLP's `down` from the output of its `up`; `x` may be overwritten."""
        return self._activate(x)

    def write_heads(self, qkv: torch.Tensor, layer: Layer, angles: Angles | None, out: RowHeads) -> None:
        """Write the heads of qkv [n, (q_heads + 2 * kv_heads) * head_size] to `out`, after the layer's norms and RoPE,
        if there are `angles`. `qkv` may be overwritten."""
        n_q, n_kv, size, *_ = layer.heads
        q, k, v = qkv.view(len(qkv), -1, size).split([n_q, n_kv, n_kv], dim=1)
        norms = layer.q_norm, layer.k_norm, layer.v_norm
        q, k, v = map(self.norm_heads, (q, k, v), norms)
        if angles is not None:
            apply_rope(q, angles.q_cos, angles.q_sin, out=out.q_heads)
            apply_rope(k, angles.cos, angles.sin, out=out.k_heads)
        else:
            out.q_heads.copy_(q)
            out.k_heads.copy_(k)
        out.v_heads.copy_(v)

    def norm_heads(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMS norm of every head of x [n, heads, head_size] with one weight [head_size] (Qwen3), or of a row's heads as
        one with a weight [heads * head_size] (OLMo 2). Without a weight it is x itself."""
        if weight is None:
            return x
        whole = x.reshape(len(x), -1, len(weight))
        return F.rms_norm(whole, weight.shape, weight, self._config.norm_eps).view(x.shape)

    def norm_parts(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm of rows x [n, width] that are parts of other rows, by a weight [width]."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, interleaved: bool) -> None:
        """Turn the heads x [n, heads, size] into `out` by RoPE's cos and sin [n, 1, size / 2]. The pairs of x are
        neighbours, if `interleaved`, else halves of a head; those of `out` are halves."""
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        out_a, out_b = out.chunk(2, dim=-1)
        out_a.copy_(a * cos - b * sin)
        out_b.copy_(b * cos + a * sin)


class VectorOps:
    """kernels/decoder's operations on rows of one dtype on a CPU: [..., width] tensors, C-contiguous."""

    def __init__(self, dtype: torch.dtype):
        """Raises ValueError for a dtype that the CPU does not support."""
        self.dtype = dtype
        self._native = _native.RowOps(act_code(dtype))

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether this CPU has operations on rows of a dtype."""
        return _native.RowOps.supports(act_code(dtype))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """Add scale * y to x, if `y` is given; then return x / sqrt(mean(x^2) + eps) * weight [width]."""
        out = torch.empty_like(x)
        width = len(weight)
        assert x.is_contiguous() and x.dtype is weight.dtype is self.dtype and x.shape[-1] == width
        assert y is None or (y.is_contiguous() and y.dtype is self.dtype and y.shape == x.shape)
        self._native.norm(
            x.data_ptr(),
            address_of(y),
            scale,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            x.numel() // width,
            width,
            pool_threads(),
        )
        return out

    def gate(self, x: torch.Tensor, gelu: bool = False) -> torch.Tensor:
        """The rows x [..., 2 * width] are gate, up -> silu(gate) * up, or with `gelu` that of GELU by tanh."""
        assert x.is_contiguous() and x.dtype is self.dtype
        width = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], width)
        self._native.gate(x.data_ptr(), out.data_ptr(), out.numel() // width, width, gelu, pool_threads())
        return out

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, interleaved: bool) -> None:
        """See BlockOps.turn; `cos` and `sin` are fp32."""
        assert x.dtype is out.dtype is self.dtype and x.stride(2) == out.stride(2) == 1
        assert all(angle.dtype is torch.float32 and angle.is_contiguous() for angle in (cos, sin))
        self._native.turn(
            (x.data_ptr(), x.stride(0), x.stride(1)),
            (out.data_ptr(), out.stride(0), out.stride(1)),
            cos.data_ptr(),
            sin.data_ptr(),
            len(x),
            x.shape[1],
            cos.shape[-1],
            interleaved,
            pool_threads(),
        )

    def write_heads(self, qkv: torch.Tensor, layer: Layer, angles: Angles, out: RowHeads, eps: float) -> None:
        """See BlockOps.write_heads; `eps` is that of the heads' norms, and `angles` are fp32."""
        assert qkv.is_contiguous() and qkv.dtype is out.q.dtype is out.kv.dtype is self.dtype
        assert all(x.dtype is torch.float32 and x.is_contiguous() for x in angles)
        self._native.rope(
            qkv.data_ptr(),
            address_of(layer.q_norm),
            address_of(layer.k_norm),
            address_of(layer.v_norm),
            eps,
            angles.addresses,
            out.q.data_ptr(),
            out.q.stride(0),
            out.kv.data_ptr(),
            out.kv.stride(0),
            len(qkv),
            layer.heads.n_q,
            layer.heads.n_kv,
            layer.heads.k_size,
            layer.q_norm is not None and len(layer.q_norm) > layer.heads.k_size,
            angles.cos.shape[-1],
            pool_threads(),
        )


class NativeBlockOps(BlockOps):
    """The operations on a CPU: kernels/decoder computes RMS norms, RoPE, and the gates of SiLU and of GELU by tanh."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        """Raises ValueError for a dtype that VectorOps does not support."""
        super().__init__(config, dtype)
        self.vectors = VectorOps(dtype)
        self._rms = config.norm == "rms"
        self.gelu = gates_by(config, "gelu_pytorch_tanh", "gelu_new")
        #: Whether kernels/decoder has the gate of the model's MLPs; that of its experts.
        self.gates = self.gelu or gates_by(config, "silu")
        self.gates_experts = self.gates or (config.experts is not None and config.experts.clamped_swiglu is not None)
        self.angle_dtype = torch.float32
        self.act_dtype = ACT_NAMES[dtype]

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self._rms and norm.weight is not None:
            return self.vectors.rms_norm(x, norm.weight, self._config.norm_eps)
        return super().norm(x, norm)

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self._rms and norm.weight is not None:
            return self.vectors.rms_norm(x, norm.weight, self._config.norm_eps, y, self._config.residual_scale)
        return super().add_norm(x, y, norm)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return self.vectors.gate(x, self.gelu) if self.gates else super().activate(x)

    def norm_parts(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.vectors.rms_norm(x.contiguous(), weight, eps)

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, interleaved: bool) -> None:
        self.vectors.turn(x, cos, sin, out, interleaved)

    def write_heads(self, qkv: torch.Tensor, layer: Layer, angles: Angles | None, out: RowHeads) -> None:
        if angles is None:
            super().write_heads(qkv, layer, angles, out)
        else:
            self.vectors.write_heads(qkv, layer, angles, out, self._config.norm_eps)


def gates_by(config: ModelConfig, *activations: str) -> bool:
    """Whether the MLPs of a model compute act(gate) * up with one of these activations."""
    clamped = config.experts is not None and config.experts.clamped_swiglu is not None
    return config.gated and config.activation in activations and not clamped


#: Activation function by the name that config.json gives it. A function may overwrite its argument.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": partial(F.silu, inplace=True),
    "relu": F.relu_,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


def make_norm(config: ModelConfig) -> Callable[[torch.Tensor, Norm], torch.Tensor]:
    """The model's norm: a function of x [n, hidden_size] and its Norm that returns the normalised rows.

    torch computes the statistics in fp32 for every dtype.
    """
    shape, eps = (config.hidden_size,), config.norm_eps
    if config.norm == "rms":
        return lambda x, norm: F.rms_norm(x, shape, norm.weight, eps)
    return lambda x, norm: F.layer_norm(x, shape, norm.weight, norm.bias, eps)


def make_activation(config: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that makes the input of `down` from the output of `up`, in MLPs and experts."""
    if config.experts is not None and config.experts.clamped_swiglu is not None:
        return partial(clamped_swiglu, *config.experts.clamped_swiglu)
    activation = ACTIVATIONS[config.activation]
    return partial(gated, activation) if config.gated else activation


def gated(activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The rows x [n, 2 * width] are gate, up -> activation(gate) * up [n, width]."""
    gate, up = x.chunk(2, dim=1)
    return activation(gate).mul_(up)


def clamped_swiglu(alpha: float, limit: float, x: torch.Tensor) -> torch.Tensor:
    """The activation of gpt-oss's experts; x as in `gated`."""
    gate, up = x.chunk(2, dim=1)
    gate = gate.clamp(max=limit)
    return up.clamp(-limit, limit).add_(1).mul_(gate * torch.sigmoid(gate * alpha))


def norm_whole(qkv: torch.Tensor, layer: Layer, config: ModelConfig, reduction: Reduction | None = None) -> Layer:
    """Normalise all Q heads of each row of qkv as one, and all K heads, in place. Returns the layer without its norms.
    `reduction` sums over ranks, each of which has some of the heads: as many ranks have each K head. Raises RankError.
    """
    assert layer.q_norm is not None and layer.k_norm is not None
    weights = layer.q_norm, layer.k_norm
    heads = qkv[:, : sum(map(len, weights))].split([*map(len, weights)], dim=1)
    means = torch.cat([x.float().square().mean(1, keepdim=True) for x in heads], dim=1)
    if reduction is not None:
        counts = torch.tensor([[*map(len, weights)]], dtype=torch.float32)
        sums = reduction.sum_(torch.cat([means * counts, counts]))
        means = sums[:-1] / sums[-1:]
    factors = (means + config.norm_eps).rsqrt()
    for x, factor, weight in zip(heads, factors.split(1, dim=1), weights, strict=True):
        x.copy_(x.float() * factor * weight)
    return replace(layer, q_norm=None, k_norm=None)
