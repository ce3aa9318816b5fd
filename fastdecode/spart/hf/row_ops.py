"""Norms and MLPs of a transformers model by kernels/decoder, on a CPU.

A module is replaced only if the C function gives the results of the module's own code for random rows, so no table of
models says which norm or activation each of them has.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from fastdecode.spart.decoder.block_ops import VectorOps
from fastdecode.spart.hf.linears import LinearModule

#: Rows of the trial, and the relative difference that roundings may make; another formula makes a larger one.
_ROWS = 3
_ROUNDINGS = 0.02


def use_row_ops(module: Any, dtype: torch.dtype) -> None:
    """Let RMS norms, and MLPs with a SiLU gate, of a model on a CPU use the vector operations for `dtype`, where this
    CPU has them."""
    if not VectorOps.supports(dtype):
        return
    ops = VectorOps(dtype)
    for child in list(module.modules()):
        if len(inspect.signature(child.forward).parameters) > 1:  # such as a norm that multiplies its rows by a gate
            continue
        if _is_norm(child):
            _try(child, child.weight.shape[0], dtype, _norm(ops, child))
        elif _is_mlp(child):
            _try(child, child.gate_proj.in_features, dtype, _mlp(ops, child))


def _is_norm(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "RMSNorm" in type(module).__name__ and isinstance(weight, torch.Tensor) and weight.ndim == 1


def _norm(ops: VectorOps, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    eps: float = getattr(module, "variance_epsilon", None) or getattr(module, "eps", 0.0) or 0.0
    original = type(module).forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not ops.dtype or module.weight.dtype is not ops.dtype:
            return original(module, x)  # type: ignore[no-any-return]
        return ops.rms_norm(x.contiguous(), module.weight, eps)

    return forward


def _is_mlp(module: torch.nn.Module) -> bool:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, LinearModule) and isinstance(up, LinearModule) and isinstance(down, torch.nn.Module)):
        return False
    return gate.product is up.product and "silu" in type(getattr(module, "act_fn", None)).__name__.lower()


def _mlp(ops: VectorOps, module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    product = module.gate_proj.product
    return lambda x: module.down_proj(ops.gate(product.whole(x)))


def _try(module: Any, width: int, dtype: torch.dtype, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let a module of rows [1, n, width] compute with `forward` if both give the same."""
    x = torch.randn(1, _ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    with contextlib.suppress(TypeError, ValueError, RuntimeError, AttributeError):  # a module that wants more than rows
        want, got = module(x), forward(x)
        alike = isinstance(want, torch.Tensor) and want.dtype is got.dtype and want.shape == got.shape
        if alike and (want.float() - got.float()).norm() <= _ROUNDINGS * want.float().norm():
            module.forward = forward
