"""The family of GLM-4.5, 4.6 and 4.7 (GLM-4-MoE), and the text part of GLM-4.5V."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.spart.checkpoints.config import Experts, MTPNames, TensorNames
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
    fraction = config.number("partial_rotary_factor", 0.5)
    config = ConfigJson(config.raw | {"partial_rotary_factor": fraction})
    sees = config.raw.get("model_type") == "glm4v_moe_text"
    return {
        **llama_like(config, 8, equal_heads(config), 65536 if sees else 131072, norm_eps=1e-5, partial=True),
        "qkv_bias": config.flag("attention_bias", sees),
        "qk_norm": config.flag("use_qk_norm", False),
        "experts": with_shared(config, routed_experts(config, n=128, used=8, size=1408), first_dense(config, 1)),
        "names": with_head(GLM4_MOE_NAMES, config.size("num_hidden_layers")),
    }


def routed_experts(
    config: ConfigJson, n: int, used: int, size: int, scale: float = 1.0, groups: int = 1, used_groups: int = 1
) -> Experts:
    """Experts that are chosen by corrected sigmoids, of which no layer is without and none are shared. The arguments
    are the defaults of absent keys."""
    return Experts(
        config.size("n_routed_experts", n),
        config.size("num_experts_per_tok", used),
        config.size("moe_intermediate_size", size),
        renormalise=config.flag("norm_topk_prob", True),
        sigmoid=True,
        single_router=True,
        scale=config.number("routed_scaling_factor", scale),
        groups=config.size("n_group", groups),
        used_groups=config.size("topk_group", used_groups),
        group_best=2,
    )


def with_shared(config: ConfigJson, experts: Experts, dense: frozenset[int], n_shared: int = 1) -> Experts:
    """`experts` with the dense layers and the shared experts, whose number is `n_shared` where the key is absent."""
    shared = experts.intermediate_size * config.size("n_shared_experts", n_shared, least=0)
    return replace(experts, dense_layers=dense, shared_size=shared)


def first_dense(config: ConfigJson, default: int) -> frozenset[int]:
    """The dense layers, which are the first ones."""
    n_layers = config.size("num_hidden_layers")
    return frozenset(range(min(config.size("first_k_dense_replace", default, least=0), n_layers)))


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
