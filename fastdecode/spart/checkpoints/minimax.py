"""The family of MiniMax-M2 and its successors M2.x."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.spart.checkpoints.config import CheckpointError, Experts
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.llama_like import LLAMA_NAMES, llama_like

MINIMAX_M2_NAMES = replace(
    LLAMA_NAMES,
    router="block_sparse_moe.gate",
    router_correction="block_sparse_moe.e_score_correction_bias",
    expert_up=("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    expert_down="block_sparse_moe.experts.{e}.w2",
)


def minimax_m2(config: ConfigJson) -> dict[str, Any]:
    """The defaults are those of MiniMaxM2Config."""
    config.require(
        scoring_func="sigmoid",
        use_qk_norm=True,
        qk_norm_type="per_layer",
        use_routing_bias=True,
        shared_intermediate_size=0,
        sliding_window=None,
    )
    kinds = config.raw.get("attn_type_list") or []
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise CheckpointError(f"config.json: 'attn_type_list' is {kinds!r}; only layers of type 1 are supported")
    if "rotary_dim" in config.raw and "partial_rotary_factor" not in config.raw:
        fraction = config.size("rotary_dim") / config.size("head_dim", 128)
        config = ConfigJson(config.raw | {"partial_rotary_factor": fraction})
    config = ConfigJson({"intermediate_size": 1536} | config.raw)
    common = llama_like(config, 8, 128, 196608, theta=5e6, partial=True)
    return {
        **common,
        "qk_norm": True,
        "whole_qk_norm": True,
        "experts": Experts(
            config.size("num_local_experts", 256),
            config.size("num_experts_per_tok", 8),
            common["intermediate_size"],
            renormalise=True,
            sigmoid=True,
            single_router=True,
        ),
        "names": MINIMAX_M2_NAMES,
    }
