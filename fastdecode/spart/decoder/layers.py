"""Norms and activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from fastdecode.spart.checkpoints.config import ModelConfig
from fastdecode.spart.decoder.weights import Norm

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


def norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of every head of x [n, heads, head_size] with one weight [head_size] (the QK norm of Qwen3)."""
    return F.rms_norm(x, weight.shape, weight, eps)
