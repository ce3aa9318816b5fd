"""use_attention: lets the attention modules of a transformers model call an attention function of ours.

Most models call the function that is registered with transformers' attention interface. Falcon, MPT and BLOOM do not.
Their attention modules get a forward pass of ours, which computes Q, K and V with the module's own layers and calls the
attention function as the interface would. MPT and BLOOM add ALiBi's position biases (arXiv 2108.12409) to their scores:
`slopes_of` has the slopes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.hf.indexer import replace_indexer
from fastdecode.spart.hf.latent import absorb

#: An attention function as transformers' AttentionInterface calls it.
Attention = Callable[..., tuple[torch.Tensor, Any]]


def implementation(config: Any, name: str) -> str:
    """The attention implementation that a model of `config` is made with, to be split by the function `name`."""
    return "eager" if config.model_type in _SLOPES else name


def use_attention(model: Any, attention: Attention) -> None:
    """Let the attention modules of a model that needs it call `attention`, absorb the matrices of latent attention, and
    replace the indexers of trained sparse attention; other models stay as they are."""
    for module in list(model.modules()):
        absorb(module)
        replace_indexer(module)
        forward = _FORWARDS.get(type(module).__name__)
        if forward:
            module.forward = functools.partial(forward, module, attention)


def slopes_of(config: Any) -> bytes:
    """The slopes of a model's position biases as LayerOptions has them; empty for a model without. Raises
    CheckpointError."""
    slopes = _SLOPES.get(config.model_type, _no_slopes)(config)
    return b"" if slopes is None else slopes.to(torch.float32).numpy().astype("<f4").tobytes()


def _code_of(model_type: str) -> Any:
    return importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")


def _no_slopes(config: Any) -> None:
    return None


def _falcon_slopes(config: Any) -> None:
    if config.alibi:
        raise CheckpointError("Falcon models with ALiBi round their position biases to bf16, which is not supported")


def _mpt_slopes(config: Any) -> torch.Tensor:
    biases: torch.Tensor = _code_of("mpt").build_mpt_alibi_tensor(
        config.n_heads, 2
    )  # [heads, 1, 2], of the distances -1 and 0
    return -biases[:, 0, 0]


def _bloom_slopes(config: Any) -> torch.Tensor:
    biases: torch.Tensor = _code_of("bloom").build_alibi_tensor(
        torch.ones(1, 2), config.n_head, torch.float32
    )  # of positions 0 and 1
    return biases[:, 0, 1]


_SLOPES: dict[str, Callable[[Any], torch.Tensor | None]] = {
    "falcon": _falcon_slopes,
    "mpt": _mpt_slopes,
    "bloom": _bloom_slopes,
}


def _falcon(
    module: Any, attention: Attention, hidden: torch.Tensor, *_: Any, position_embeddings: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    q, k, v = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden)))
    if module.new_decoder_architecture:  # K and V are repeated for each query head of their group
        group = module.num_heads // module.num_kv_heads
        k, v = k[:, ::group], v[:, ::group]
    q, k = _code_of("falcon").apply_rotary_pos_emb(q, k, *position_embeddings)
    out, _ = attention(module, q, k, v, None, scaling=module.inv_norm_factor)
    return module.dense(out.flatten(2)), None


def _mpt(module: Any, attention: Attention, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    fused = module.Wqkv(hidden)
    if module.clip_qkv:
        fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = (x.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for x in fused.chunk(3, dim=2))
    out, _ = attention(module, q, k, v, None, scaling=module.softmax_scale)
    return module.out_proj(out.flatten(2)), None


def _bloom(
    module: Any, attention: Attention, hidden: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    q, k, v = module._reshape(module.query_key_value(hidden))
    out, _ = attention(module, q, k, v, None, scaling=module.inv_norm_factor)
    return module.dense(out.flatten(2)) + residual, None


_FORWARDS: dict[str, Callable[..., tuple[torch.Tensor, None]]] = {
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
    "BloomAttention": _bloom,
}
