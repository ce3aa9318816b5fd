"""The family of Ministral 3 and Devstral Small 2, which scale queries by their position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.spart.checkpoints.config import CheckpointError, Rope
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.llama_like import llama_like, window_of

#: What Ministral3Config says of a checkpoint without a table for RoPE.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral3(config: ConfigJson) -> dict[str, Any]:
    common = llama_like(config, 8, 128, 262144, window_of(config), norm_eps=1e-5, scaling=_ROPE)
    return {**common, "rope": _with_query_scale(common["rope"], ConfigJson(config.rope_table(_ROPE)))}


def _with_query_scale(rope: Rope, table: ConfigJson) -> Rope:
    """`rope` with what its table in config.json says of the scale of queries."""
    if table.raw.get("llama_4_scaling_beta") in (None, 0):
        return rope
    beta, name = table.number("llama_4_scaling_beta", 0.0), "original_max_position_embeddings"
    trained_on = rope.original_max_positions or table.size(name, 0, least=0)
    if not trained_on:
        raise CheckpointError(f"config.json: 'llama_4_scaling_beta' is {beta:g}, and RoPE has no {name!r}")
    return replace(rope, query_beta=beta, original_max_positions=trained_on)
