"""The families with latent attention: DeepSeek-V2 and V3 (and R1, Kimi K2, Moonlight), and GLM-4.7-Flash."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from fastdecode.region.contract import HEAD_SIZE_UNIT, MAX_HEAD_SIZE
from fastdecode.spart.checkpoints.config import CheckpointError, Experts, Latent, LatentNames, Rope
from fastdecode.spart.checkpoints.config_json import ConfigJson, attention_factor
from fastdecode.spart.checkpoints.glm import GLM4_MOE_NAMES, first_dense, routed_experts, with_head, with_shared
from fastdecode.spart.checkpoints.llama_like import checked_types
from fastdecode.transports.base import LayerOptions

_LATENT_NAMES = LatentNames(
    q="self_attn.q_proj",
    q_a="self_attn.q_a_proj",
    q_a_norm="self_attn.q_a_layernorm",
    q_b="self_attn.q_b_proj",
    kv_a="self_attn.kv_a_proj_with_mqa",
    kv_a_norm="self_attn.kv_a_layernorm",
    kv_b="self_attn.kv_b_proj",
)
DEEPSEEK_NAMES = replace(GLM4_MOE_NAMES, qkv=(), latent=_LATENT_NAMES)


def deepseek_v2(config: ConfigJson) -> dict[str, Any]:
    if config.flag("mlp_bias", False):
        raise CheckpointError("config.json: 'mlp_bias' is set, which is not supported for DeepSeek-V2")
    if config.raw.get("norm_topk_prob"):  # which DeepSeek's code and transformers understand differently
        raise CheckpointError("config.json: 'norm_topk_prob' is set, which is not supported for DeepSeek-V2")
    config.require(scoring_func="softmax", moe_layer_freq=1, rope_interleave=True)
    experts = Experts(
        config.size("n_routed_experts", 64),
        config.size("num_experts_per_tok"),
        config.size("moe_intermediate_size", 1407),
        renormalise=False,
        single_router=True,
        scale=config.number("routed_scaling_factor", 1.0),
    )
    method = config.raw.get("topk_method", "greedy")
    if method == "group_limited_greedy":
        groups, used = config.size("n_group"), config.size("topk_group")
        experts = replace(experts, groups=groups, used_groups=used)
    elif method != "greedy":
        raise CheckpointError(f"config.json: 'topk_method' is {method!r}, not 'greedy' or 'group_limited_greedy'")
    return {
        **_common(config, _latent(config), max_positions=2048),
        "experts": with_shared(config, experts, first_dense(config, 0), n_shared=2),
        "names": replace(DEEPSEEK_NAMES, router_correction=None),
    }


def deepseek_v3(config: ConfigJson) -> dict[str, Any]:
    config.require(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    experts = routed_experts(config, n=256, used=8, size=2048, scale=2.5, groups=8, used_groups=4)
    return {
        **_common(config, _latent(config), max_positions=4096),
        "experts": with_shared(config, experts, first_dense(config, 3)),
        "names": with_head(DEEPSEEK_NAMES, config.size("num_hidden_layers")),
    }


def glm4_moe_lite(config: ConfigJson) -> dict[str, Any]:
    n_layers, latent = config.size("num_hidden_layers"), _latent(config, k_size=192, v_size=256, q_rank=768)
    config.require(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    experts = routed_experts(config, n=64, used=4, size=1536, scale=1.8)
    types = config.raw.get("mlp_layer_types")
    if types is None:
        config.require(first_k_dense_replace=1)
        types = ["dense", *["sparse"] * (n_layers - 1)]
    types = checked_types(types, ("dense", "sparse"), n_layers, "mlp_layer_types")
    dense = frozenset(i for i, kind in enumerate(types) if kind == "dense")
    return {
        **_common(config, latent, max_positions=202752, norm_eps=1e-5),
        "experts": with_shared(config, experts, dense),
        "names": with_head(DEEPSEEK_NAMES, n_layers),
    }


def _latent(config: ConfigJson, k_size: int = 128, v_size: int = 128, q_rank: int = 1536) -> Latent:
    """The sizes of latent attention. The arguments are the defaults of absent keys."""
    without_q = config.raw.get("q_lora_rank", q_rank) is None  # null is not the default
    return Latent(
        rank=config.size("kv_lora_rank", 512),
        k_size=config.size("qk_nope_head_dim", k_size),
        rope_size=config.size("qk_rope_head_dim", 64),
        v_size=config.size("v_head_dim", v_size),
        q_rank=0 if without_q else config.size("q_lora_rank", q_rank),
        interleaved=config.flag("rope_interleave", True),
    )


def _common(config: ConfigJson, latent: Latent, max_positions: int, norm_eps: float = 1e-6) -> dict[str, Any]:
    """The fields that all of them have in common. `max_positions` and `norm_eps` are the defaults of absent keys."""
    n_q, n_layers = config.size("num_attention_heads"), config.size("num_hidden_layers")
    max_positions = config.size("max_position_embeddings", max_positions)
    bias = config.flag("attention_bias", False)
    if bias and not latent.q_rank:
        raise CheckpointError("config.json: 'attention_bias' is set and 'q_lora_rank' is null, which is not supported")
    size = latent.row_size
    if latent.rank % HEAD_SIZE_UNIT or size % HEAD_SIZE_UNIT or size > MAX_HEAD_SIZE:
        raise CheckpointError(
            f"config.json: 'kv_lora_rank' is {latent.rank}, 'qk_rope_head_dim' {latent.rope_size}; both must be "
            f"multiples of {HEAD_SIZE_UNIT}, together at most {MAX_HEAD_SIZE}"
        )
    rope = config.rope(max_positions)
    return {
        "intermediate_size": config.size("intermediate_size"),
        "n_kv_heads": 1,
        "head_size": size,
        "v_in_k": True,
        "latent": latent,
        "options": LayerOptions(heads=((n_q, 1, size, latent.rank),) * n_layers),
        "max_positions": max_positions,
        "windows": (0,) * n_layers,
        "softmax_scale": _softmax_scale(config, latent, rope),
        "rope": rope,
        "activation": config.activation("hidden_act", "silu"),
        "norm": "rms",
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        "qkv_bias": bias,
        "o_bias": bias,
        "tied": config.flag("tie_word_embeddings", False),
        "embed_size": config.size("hidden_size"),
    }


def _softmax_scale(config: ConfigJson, latent: Latent, rope: Rope) -> float:
    """YaRN's scale of scores stands here where `mscale_all_dim` takes it out of cos and sin, with which K would be
    scaled in part only."""
    table = config.rope_table()
    scale, kind = 1.0, table.get("rope_type") or table.get("type") or "default"
    if kind != "default" and table.get("mscale_all_dim"):
        numbers = ConfigJson(table)
        scale = attention_factor(numbers.number("factor", rope.factor), numbers.number("mscale_all_dim", 1.0))
    return scale * scale / math.sqrt(latent.q_size)
