"""The family of GLM-4.5, 4.6 and 4.7 (GLM-4-MoE), and the text part of GLM-4.5V."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.spart.checkpoints.config import CheckpointError, Experts, MTPNames, TensorNames
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.llama_like import LLAMA_NAMES, equal_heads, llama_like

GLM4_MOE_NAMES = replace(
    LLAMA_NAMES,
    router="mlp.gate",
    router_correction="mlp.gate.e_score_correction_bias",
    expert_up=("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    expert_down="mlp.experts.{e}.down_proj",
    shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)


def glm4_moe(config: ConfigJson) -> dict[str, Any]:
    for name in ("n_group", "topk_group"):
        if (groups := config.size(name, 1)) != 1:
            raise CheckpointError(f"config.json: {name!r} is {groups}; experts in several groups are not supported")
    fraction = config.number("partial_rotary_factor", 0.5)
    config = ConfigJson(config.raw | {"partial_rotary_factor": fraction})
    sees = config.raw.get("model_type") == "glm4v_moe_text"
    return {
        **llama_like(config, 8, equal_heads(config), 65536 if sees else 131072, norm_eps=1e-5, partial=True),
        "qkv_bias": config.flag("attention_bias", sees),
        "qk_norm": config.flag("use_qk_norm", False),
        "experts": _experts(config),
        "names": with_head(GLM4_MOE_NAMES, config.size("num_hidden_layers")),
    }


def _experts(config: ConfigJson) -> Experts:
    n_layers, size = config.size("num_hidden_layers"), config.size("moe_intermediate_size", 1408)
    return Experts(
        config.size("n_routed_experts", 128),
        config.size("num_experts_per_tok", 8),
        size,
        renormalise=config.flag("norm_topk_prob", True),
        sigmoid=True,
        single_router=True,
        scale=config.number("routed_scaling_factor", 1.0),
        dense_layers=frozenset(range(min(config.size("first_k_dense_replace", 1, least=0), n_layers))),
        shared_size=size * config.size("n_shared_experts", 1, least=0),
    )


def with_head(names: TensorNames, n_layers: int) -> TensorNames:
    """The names in a checkpoint of `n_layers` layers, behind which the MTP head stands as one more."""
    head = f"model.layers.{n_layers}."
    mtp = MTPNames(
        block=head,
        fc=f"{head}eh_proj",
        embedding_norm=f"{head}enorm",
        hidden_norm=f"{head}hnorm",
        final_norm=f"{head}shared_head.norm",
    )
    return replace(names, mtp=mtp, aside=(head,))
