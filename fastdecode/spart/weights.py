"""A model's parameters on its device, in the shapes the decoder multiplies with.

Every parameter is allocated once, empty, and filled in place by the loader from the tensors named in its
`TensorTarget`s. Matrices of a checkpoint that multiply the same rows are one parameter here: Q over K over V, gate
over up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fastdecode.spart.config import ModelConfig
from fastdecode.transports.base import ACT_DTYPES, Hello

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """Where a checkpoint's tensor goes: `target` is a view into a parameter, of the tensor's own shape."""

    name: str
    target: torch.Tensor


class Linear:
    """y = x Wᵀ + b. `weight` is [out, in] as in the checkpoint, `bias` [out] or None."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> [n, out]."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A Linear for the CPU whose weight oneDNN has put into the order its kernels read.

    F.linear packs the weight anew at every call. For the few rows of a decode step that makes it 1.4 times slower in
    bf16, and several times for a wide LM head.
    """

    __slots__ = ("_bias", "_packed")

    _ROWS = 32  # the batch that the order is chosen for; any other works

    def __init__(self, linear: Linear):
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, self._ROWS)
        self._bias = linear.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> [n, out]."""
        n = len(x)
        if n == (rows := known_rows(n)):
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        padded = x.new_zeros(rows, x.shape[1])
        padded[:n] = x
        return torch.ops.mkldnn._linear_pointwise(padded, self._packed, self._bias, "none", [], "")[:n]


def known_rows(n: int) -> int:
    """`n` rounded up so that there are 16 sizes an octave: up to 32 rows exactly, beyond by at most a sixteenth.

    oneDNN compiles a kernel, of 0.7 MB and in some milliseconds, for every number of rows it meets, and keeps a
    thousand of them. Steps have any number of rows.
    """
    step = 1 << max(0, (n - 1).bit_length() - 5)
    return -(-n // step) * step


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PackedLinear works here: oneDNN's own check of the CPU for 16-bit dtypes."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


@dataclass(slots=True)
class Norm:
    """Parameters [hidden]; both None: only normalised. RMS norms have no bias."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(slots=True)
class Layer:
    """One transformer block. `qkv` gives Q heads, K heads, V heads; `up` gives gate, then up, if the MLP is gated."""

    attention_norm: Norm
    qkv: Linear | PackedLinear
    q_norm: torch.Tensor | None  # [head_size]
    k_norm: torch.Tensor | None
    o: Linear | PackedLinear
    mlp_norm: Norm
    up: Linear | PackedLinear
    down: Linear | PackedLinear


@dataclass(slots=True)
class Weights:
    embedding: torch.Tensor  # [vocab, embed_size]
    positions: torch.Tensor | None  # [position_offset + max_positions, hidden]
    project_in: Linear | None
    layers: list[Layer]
    final_norm: Norm | None
    project_out: Linear | None
    head: Linear | PackedLinear

    def pack(self) -> None:
        """Make PackedLinears of the blocks' linears and the head, one after another: only one weight is there twice.

        A tied head becomes a matrix of its own.
        """
        for layer in self.layers:
            for name in ("qkv", "o", "up", "down"):
                setattr(layer, name, PackedLinear(getattr(layer, name)))
        self.head = PackedLinear(self.head)


@dataclass(slots=True)
class Model:
    """A loaded checkpoint."""

    config: ModelConfig
    weights: Weights
    device: torch.device
    dtype: torch.dtype  # of weights and activations
    parameters: int  # numbers in the checkpoint's matrices and vectors, a tied head counted once

    @property
    def act_dtype(self) -> str:
        """Activation dtype of the links, of ACT_DTYPES: what the S-Part computes in, so that nothing is converted."""
        return next(name for name in ACT_DTYPES if TORCH_DTYPES[name] is self.dtype)

    @property
    def act_torch_dtype(self) -> torch.dtype:
        return self.dtype

    def hello(self, n_slots: int, max_rows: int, kv_dtype: str, kv_bytes: int | None, max_seqs: int) -> Hello:
        """What to ask of an R-node; the arguments are the fields of Geometry and Hello that the model does not fix."""
        return Hello(
            geometry=self.config.hello_geometry(n_slots, max_rows, self.act_dtype),
            kv_dtype=kv_dtype,
            windows=self.config.windows,
            softmax_scale=self.config.softmax_scale,
            kv_bytes=kv_bytes,
            max_seqs=max_seqs,
        )


class Allocation:
    """Empty parameters for a configuration, and the targets that a checkpoint's tensors fill.

    `head` is separate from the embedding only if `own_head`: a checkpoint may bring a head though its config says tied.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, own_head: bool):
        self._options = {"device": device, "dtype": dtype}
        self.targets: list[TensorTarget] = []
        self.weights = _opt(self, config, own_head) if config.rope is None else _llama_like(self, config, own_head)

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self.matrix(name, size)

    def matrix(self, name: str, *shape: int) -> torch.Tensor:
        target = torch.empty(shape, **self._options)
        self.targets.append(TensorTarget(name, target))
        return target

    def linear(self, names: list[str], outs: list[int], width: int, bias: bool) -> Linear:
        """One product for the linears `names` with `outs[i]` output features each, stacked in that order."""
        weight = torch.empty(sum(outs), width, **self._options)
        vector = torch.empty(sum(outs), **self._options) if bias else None
        for name, part in zip(names, weight.split(outs), strict=True):
            self.targets.append(TensorTarget(f"{name}.weight", part))
        if vector is not None:
            for name, part in zip(names, vector.split(outs), strict=True):
                self.targets.append(TensorTarget(f"{name}.bias", part))
        return Linear(weight, vector)

    def norm(self, name: str, config: ModelConfig) -> Norm:
        if not config.norm_affine:
            return Norm(None, None)
        weight = self.vector(f"{name}.weight", config.hidden_size)
        bias = self.vector(f"{name}.bias", config.hidden_size) if config.norm == "layer" else None
        return Norm(weight, bias)

    def attention(self, name: str, out_name: str, c: ModelConfig) -> tuple[Linear, Linear]:
        q_size, kv_size = c.n_q_heads * c.head_size, c.n_kv_heads * c.head_size
        names = [f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"]
        qkv = self.linear(names, [q_size, kv_size, kv_size], c.hidden_size, c.qkv_bias)
        return qkv, self.linear([f"{name}.{out_name}"], [c.hidden_size], q_size, c.o_bias)


def _llama_like(a: Allocation, c: ModelConfig, own_head: bool) -> Weights:
    """Llama, Mistral, Qwen2, Qwen3."""
    embedding = a.matrix("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    layers = []
    for i in range(c.n_layers):
        prefix = f"model.layers.{i}."
        qkv, o = a.attention(f"{prefix}self_attn", "o_proj", c)
        gate_and_up = [f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"]
        layers.append(
            Layer(
                attention_norm=a.norm(f"{prefix}input_layernorm", c),
                qkv=qkv,
                q_norm=a.vector(f"{prefix}self_attn.q_norm.weight", c.head_size) if c.qk_norm else None,
                k_norm=a.vector(f"{prefix}self_attn.k_norm.weight", c.head_size) if c.qk_norm else None,
                o=o,
                mlp_norm=a.norm(f"{prefix}post_attention_layernorm", c),
                up=a.linear(gate_and_up, [c.intermediate_size] * 2, c.hidden_size, c.mlp_bias),
                down=a.linear([f"{prefix}mlp.down_proj"], [c.hidden_size], c.intermediate_size, c.mlp_bias),
            )
        )
    return Weights(
        embedding=embedding,
        positions=None,
        project_in=None,
        layers=layers,
        final_norm=a.norm("model.norm", c),
        project_out=None,
        head=Linear(a.matrix("lm_head.weight", c.vocab_size, c.hidden_size) if own_head else embedding),
    )


def _opt(a: Allocation, c: ModelConfig, own_head: bool) -> Weights:
    embedding = a.matrix("model.decoder.embed_tokens.weight", c.vocab_size, c.embed_size)
    projected = c.embed_size != c.hidden_size
    layers = []
    for i in range(c.n_layers):
        prefix = f"model.decoder.layers.{i}."
        qkv, o = a.attention(f"{prefix}self_attn", "out_proj", c)
        layers.append(
            Layer(
                attention_norm=a.norm(f"{prefix}self_attn_layer_norm", c),
                qkv=qkv,
                q_norm=None,
                k_norm=None,
                o=o,
                mlp_norm=a.norm(f"{prefix}final_layer_norm", c),
                up=a.linear([f"{prefix}fc1"], [c.intermediate_size], c.hidden_size, c.mlp_bias),
                down=a.linear([f"{prefix}fc2"], [c.hidden_size], c.intermediate_size, c.mlp_bias),
            )
        )
    decoder = "model.decoder."
    return Weights(
        embedding=embedding,
        positions=a.matrix(f"{decoder}embed_positions.weight", c.position_offset + c.max_positions, c.hidden_size),
        project_in=a.linear([f"{decoder}project_in"], [c.hidden_size], c.embed_size, False) if projected else None,
        layers=layers,
        final_norm=a.norm(f"{decoder}final_layer_norm", c) if c.final_norm else None,
        project_out=a.linear([f"{decoder}project_out"], [c.embed_size], c.hidden_size, False) if projected else None,
        head=Linear(a.matrix("lm_head.weight", c.vocab_size, c.embed_size) if own_head else embedding),
    )
