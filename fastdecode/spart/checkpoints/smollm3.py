"""The family of SmolLM3, some of whose layers have no RoPE."""

from __future__ import annotations

from typing import Any

from fastdecode.spart.checkpoints.config import CheckpointError, Rope, WrongValue
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.llama_like import biases_of, equal_heads, llama_like, typed_windows, window_of


def smollm3(config: ConfigJson) -> dict[str, Any]:
    """The defaults are those of SmolLM3Config."""
    unturned = _layers_without_rope(config)
    return {
        **llama_like(config, 4, equal_heads(config), 32768, theta=2e6),
        **biases_of(config),
        "mlp_bias": config.flag("mlp_bias", False),
        "windows": _windows(config, unturned),
        "second_rope": Rope(kind="none") if unturned else None,
        "second_rope_layers": unturned,
        "tied": config.flag("tie_word_embeddings", True),
    }


def _layers_without_rope(config: ConfigJson) -> frozenset[int]:
    """`no_rope_layers` has 1 for a layer with RoPE. Without it every `no_rope_layer_interval`-th layer has none."""
    n_layers, turned = config.size("num_hidden_layers"), config.raw.get("no_rope_layers")
    if turned is None:
        every = config.size("no_rope_layer_interval", 4)
        return frozenset(range(every - 1, n_layers, every))
    if not isinstance(turned, list) or len(turned) < n_layers or any(each not in (0, 1) for each in turned):
        raise WrongValue(f"config.json: 'no_rope_layers' is {turned!r}, not 0 or 1 for each of {n_layers} layers")
    return frozenset(i for i in range(n_layers) if not turned[i])


def _windows(config: ConfigJson, unturned: frozenset[int]) -> tuple[int, ...]:
    n_layers, types = config.size("num_hidden_layers"), config.raw.get("layer_types")
    window = window_of(config) if config.flag("use_sliding_window", False) else 0
    if types is None:
        return tuple(window if i in unturned else 0 for i in range(n_layers))
    if not window and isinstance(types, list) and "sliding_attention" in types:
        raise CheckpointError("config.json: 'layer_types' has 'sliding_attention', and no key sets a window")
    return typed_windows(types, window, n_layers)
