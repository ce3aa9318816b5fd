"""The families of ERNIE 4.5, whose RoPE turns neighbours of a head, and of its mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.spart.checkpoints.config import CheckpointError, Experts
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.llama_like import LLAMA_NAMES, equal_heads, llama_like

ERNIE4_5_MOE_NAMES = replace(
    LLAMA_NAMES,
    router="mlp.gate",
    router_correction="mlp.moe_statics.e_score_correction_bias",
    expert_up=("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    expert_down="mlp.experts.{e}.down_proj",
    shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
    aside=("model.mtp",),
)


def ernie4_5(config: ConfigJson) -> dict[str, Any]:
    """The defaults are those of Ernie4_5Config, in which null differs from an absent key."""
    nulls = {"num_key_value_heads": config.size("num_attention_heads"), "head_dim": equal_heads(config)}
    known = {name: value for name, value in nulls.items() if name in config.raw and config.raw[name] is None}
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), config.flag("use_bias", False))
    return {**_common(ConfigJson(config.raw | known), 2, 128), **biases}


def ernie4_5_moe(config: ConfigJson) -> dict[str, Any]:
    """The defaults are those of Ernie4_5_MoeConfig."""
    if config.flag("use_bias", False):
        raise CheckpointError("config.json: 'use_bias' is set, which is not supported for mixtures of ERNIE 4.5")
    return {
        **_common(config, 4, equal_heads(config)),
        "experts": _experts(config),
        "names": ERNIE4_5_MOE_NAMES,
    }


def _common(config: ConfigJson, kv_heads: int, head_size: int) -> dict[str, Any]:
    return {
        **llama_like(config, kv_heads, head_size, 131072, norm_eps=1e-5, theta=500000.0),
        "rope_interleaved": True,
        "tied": config.flag("tie_word_embeddings", True),
    }


def _experts(config: ConfigJson) -> Experts:
    n_layers, size = config.size("num_hidden_layers"), config.size("moe_intermediate_size", 1536)
    first, every = config.size("moe_layer_start_index", 1, least=0), config.size("moe_layer_interval", 1)
    last = config.raw.get("moe_layer_end_index", -1)
    last = n_layers - 1 if last in (-1, None) else config.size("moe_layer_end_index", least=0)
    mixtures = {i for i in range(first, min(last + 1, n_layers)) if (i + 1) % every == 0}
    n, used = ("num_experts", "num_experts_per_tok")  # other names that the class gives these keys
    return Experts(
        config.size(n if n in config.raw else "moe_num_experts", 64),
        config.size(used if used in config.raw else "moe_k", 6),
        size,
        renormalise=True,
        least_sum=config.number("moe_norm_min", 1e-12),
        single_router=True,
        correction_rows=1,
        dense_layers=frozenset(range(n_layers)) - mixtures,
        shared_size=size * config.size("moe_num_shared_experts", 2, least=0),
    )
