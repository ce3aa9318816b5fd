"""The families of OLMo 2 and 3, which normalise the outputs of sublayers in place of their inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.llama_like import (
    LLAMA_NAMES,
    biases_of,
    equal_heads,
    llama_like,
    ropes_by_type,
    typed_windows,
    window_of,
)

OLMO2_NAMES = replace(
    LLAMA_NAMES,
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)


def olmo2(config: ConfigJson) -> dict[str, Any]:
    return {
        **llama_like(config, None, equal_heads(config), 2048, norm_eps=1e-5),
        **biases_of(config),
        "qk_norm": True,
        "whole_qk_norm": True,
        "post_norms": True,
        "names": OLMO2_NAMES,
    }


def olmo3(config: ConfigJson) -> dict[str, Any]:
    """Layers with a window have a RoPE without scaling."""
    n_layers, types = config.size("num_hidden_layers"), config.raw.get("layer_types")
    if types is None:
        types = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(n_layers)]
    window = window_of(config, 4096)
    if not window and isinstance(types, list) and "sliding_attention" in types:
        raise CheckpointError("config.json: 'sliding_window' is null, and layers have a sliding window")
    theta = config.number("rope_theta", 500000.0)
    rope, windowed_rope = ropes_by_type(config, 2048, theta, theta)
    common = olmo2(ConfigJson(config.raw | {"rope_scaling": None, "rope_parameters": None}))
    windows = typed_windows(types, window, n_layers)
    return {
        **common,
        "windows": windows,
        "rope": rope,
        "second_rope": windowed_rope,
        "second_rope_layers": frozenset(i for i, size in enumerate(windows) if size),
    }
