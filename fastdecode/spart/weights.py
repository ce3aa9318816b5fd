"""A model's parameters on its device, in the shapes that the decoder multiplies with.

Every parameter is allocated once, empty. The loader fills it in place from the checkpoint's tensors, which the
`TensorTarget`s name. Matrices that multiply the same rows are stacked into one parameter: Q over K over V, gate over
up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fastdecode.spart.config import ModelConfig
from fastdecode.spart.served import ServedModel


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """Where the checkpoint's tensor `name` goes. `target` is a view into a parameter and has the tensor's shape."""

    name: str
    target: torch.Tensor


class Linear:
    """y = x Wᵀ + b. `weight` is [out, in], as in the checkpoint; `bias` is [out] or None."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> [n, out]."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A Linear for the CPU whose weight lies in the order that oneDNN's kernels read.

    F.linear packs the weight again at every call. For the few rows of a decode step that takes 1.4 times as long in
    bf16, and several times as long for a wide LM head.
    """

    __slots__ = ("_bias", "_packed")

    _ROWS = 32  # the number of rows that the order is best for; it is right for any number

    def __init__(self, linear: Linear):
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, self._ROWS)
        self._bias = linear.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in] -> [n, out]."""
        n, rows = len(x), known_rows(len(x))
        if n != rows:
            padded = x.new_zeros(rows, x.shape[1])
            padded[:n] = x
            x = padded
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y if n == rows else y[:n]


def known_rows(n: int) -> int:
    """`n` rounded up to one of 16 sizes an octave: n <= 32 stays as it is, a larger n grows by at most a sixteenth.

    oneDNN compiles a kernel for every number of rows that it meets and keeps a thousand of them; each takes some
    milliseconds and 0.7 MB. Without rounding, steps would have hundreds of different numbers of rows.
    """
    step = 1 << max(0, (n - 1).bit_length() - 5)
    return -(-n // step) * step


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """True if PackedLinear works on this device with this dtype. oneDNN itself says whether the CPU has 16-bit
    dtypes."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


@dataclass(slots=True)
class Norm:
    """The parameters of a norm, [hidden_size]. Both None: rows are only normalised. RMS norms have no bias."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(slots=True)
class Layer:
    """One transformer block. The rows of `qkv` are Q heads, K heads, V heads; those of `up` are gate, up if it is
    gated."""

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
    """All parameters of a model. A tied `head` has the embedding as its weight."""

    embedding: torch.Tensor  # [vocab, embed_size]
    positions: torch.Tensor | None  # [position_offset + max_positions, hidden_size]
    project_in: Linear | None
    layers: list[Layer]
    final_norm: Norm | None
    project_out: Linear | None
    head: Linear | PackedLinear

    def pack(self) -> None:
        """Replace the blocks' linears and the head by PackedLinears, one by one, so that only one weight exists twice.

        A tied head becomes a matrix of its own.
        """
        for layer in self.layers:
            for name in ("qkv", "o", "up", "down"):
                setattr(layer, name, PackedLinear(getattr(layer, name)))
        assert isinstance(self.head, Linear), "the weights are packed already"
        self.head = PackedLinear(self.head)


@dataclass(slots=True)
class Model(ServedModel):
    """A loaded checkpoint."""

    config: ModelConfig
    weights: Weights
    device: torch.device
    dtype: torch.dtype  # of weights and activations
    parameters: int  # how many numbers the checkpoint has; a tied head counts once

    @property
    def shape(self) -> ModelConfig:
        return self.config


class Allocation:
    """Empty parameters for a configuration, and the targets that a checkpoint's tensors fill.

    `own_head`: the LM head is a parameter of its own. A checkpoint may bring a head though its config says tied, so
    this is not ModelConfig.tied.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, own_head: bool):
        self.targets: list[TensorTarget] = []
        self._config = c = config
        self._device, self._dtype = device, dtype
        names = c.names
        embedding = self._matrix(names.embedding, c.vocab_size, c.embed_size)
        positions = c.position_offset + c.max_positions
        self.weights = Weights(
            embedding=embedding,
            positions=self._matrix(names.positions, positions, c.hidden_size) if names.positions else None,
            project_in=self._projection(names.project_in, c.hidden_size, c.embed_size),
            layers=[self._layer(names.block.replace("{i}", str(i))) for i in range(c.n_layers)],
            final_norm=self._norm(names.final_norm) if c.final_norm else None,
            project_out=self._projection(names.project_out, c.embed_size, c.hidden_size),
            head=Linear(self._matrix(names.head, c.vocab_size, c.embed_size) if own_head else embedding),
        )

    def _layer(self, block: str) -> Layer:
        """The parameters of the block whose tensors' names begin with `block`."""
        c, names = self._config, self._config.names
        q_size, kv_size = c.n_q_heads * c.head_size, c.n_kv_heads * c.head_size
        qkv, up = [f"{block}{name}" for name in names.qkv], [f"{block}{name}" for name in names.up]
        up_sizes = [c.intermediate_size] * (2 if c.gated else 1)
        return Layer(
            attention_norm=self._norm(f"{block}{names.attention_norm}"),
            qkv=self._linear(qkv, [q_size, kv_size, kv_size], c.hidden_size, c.qkv_bias),
            q_norm=self._empty(f"{block}{names.q_norm}.weight", c.head_size) if c.qk_norm else None,
            k_norm=self._empty(f"{block}{names.k_norm}.weight", c.head_size) if c.qk_norm else None,
            o=self._linear([f"{block}{names.o}"], [c.hidden_size], q_size, c.o_bias),
            mlp_norm=self._norm(f"{block}{names.mlp_norm}"),
            up=self._linear(up, up_sizes, c.hidden_size, c.mlp_bias),
            down=self._linear([f"{block}{names.down}"], [c.hidden_size], c.intermediate_size, c.mlp_bias),
        )

    def _empty(self, name: str, *shape: int) -> torch.Tensor:
        """A parameter that the tensor `name` fills."""
        target = torch.empty(shape, device=self._device, dtype=self._dtype)
        self.targets.append(TensorTarget(name, target))
        return target

    def _matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._empty(f"{name}.weight", rows, columns)

    def _projection(self, name: str | None, out: int, width: int) -> Linear | None:
        """A projection between embedding and hidden size; None if these are equal."""
        if out == width:
            return None
        assert name is not None, "the family's TensorNames has no projection"
        return self._linear([name], [out], width)

    def _norm(self, name: str) -> Norm:
        c = self._config
        if not c.norm_affine:
            return Norm(None, None)
        weight = self._empty(f"{name}.weight", c.hidden_size)
        return Norm(weight, self._empty(f"{name}.bias", c.hidden_size) if c.norm == "layer" else None)

    def _linear(self, names: Sequence[str], outs: list[int], width: int, bias: bool = False) -> Linear:
        """One matrix for the linears `names`, stacked in that order; the i-th has outs[i] output features.

        A single name means that the checkpoint stores the whole stack as one tensor.
        """
        outs = outs if len(names) == len(outs) else [sum(outs)]
        weight = torch.empty(sum(outs), width, device=self._device, dtype=self._dtype)
        vector = torch.empty(sum(outs), device=self._device, dtype=self._dtype) if bias else None
        for name, part in zip(names, torch.split(weight, outs), strict=True):
            self.targets.append(TensorTarget(f"{name}.weight", part))
        if vector is not None:
            for name, part in zip(names, torch.split(vector, outs), strict=True):
                self.targets.append(TensorTarget(f"{name}.bias", part))
        return Linear(weight, vector)
