"""The families of Gemma 1, 2 and 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.llama_like import (
    LLAMA_NAMES,
    biases_of,
    llama_like,
    ropes_by_type,
    typed_windows,
    window_of,
)
from fastdecode.transports.base import LayerOptions

GEMMA2_NAMES = replace(
    LLAMA_NAMES,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
#: What Gemma3TextConfig says of keys that the published configuration of Gemma 3 4B lacks.
GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def gemma(config: ConfigJson) -> dict[str, Any]:
    """The activation has two keys, and "gelu" in the first is an old name of GELU by tanh."""
    if config.raw.get("hidden_act") == "gelu":
        config = ConfigJson(config.raw | {"hidden_act": "gelu_pytorch_tanh"})
    activation = config.activation("hidden_act", "gelu_pytorch_tanh")
    other = config.raw.get("hidden_activation") or activation  # which some versions of transformers prefer
    if other != activation:
        raise CheckpointError(f"config.json: 'hidden_act' is {activation!r}, 'hidden_activation' {other!r}")
    return {**_common(config, 16, 8192), "activation": activation}


def gemma2(config: ConfigJson) -> dict[str, Any]:
    common = _with_post_norms(config, 8192, 2)
    cap = softcap(config, "attn_logit_softcapping", 50.0)
    softcaps = (cap,) * len(common["windows"]) if cap else ()
    return {
        **common,
        "options": LayerOptions(softcaps=softcaps),
        "logit_softcap": softcap(config, "final_logit_softcapping", 30.0),
    }


def gemma3(config: ConfigJson) -> dict[str, Any]:
    """The text part."""
    if softcap(config, "attn_logit_softcapping"):  # which transformers ignores, though its configuration has it
        cap = config.raw["attn_logit_softcapping"]
        raise CheckpointError(f"config.json: 'attn_logit_softcapping' is {cap!r}, which is not supported for Gemma 3")
    bases = config.number("rope_theta", 1e6), config.number("rope_local_base_freq", 1e4)
    rope, windowed_rope = ropes_by_type(config, 131072, *bases)
    plain = ConfigJson(config.raw | {"rope_scaling": None, "rope_parameters": None})
    common = _with_post_norms(plain, 131072, 6)
    return {
        **common,
        "rope": rope,
        "second_rope": windowed_rope,
        "second_rope_layers": frozenset(i for i, window in enumerate(common["windows"]) if window),
        "qk_norm": True,
        "logit_softcap": softcap(config, "final_logit_softcapping"),
    }


def _common(config: ConfigJson, kv_heads: int, max_positions: int) -> dict[str, Any]:
    """What all of them have in common. `kv_heads` and `max_positions` are the defaults of absent keys."""
    if config.raw.get("use_bidirectional_attention"):
        raise CheckpointError("config.json: 'use_bidirectional_attention' is set; tokens here see none behind them")
    return {
        **llama_like(config, kv_heads, 256, max_positions),
        **biases_of(config),
        "norm_offset": 1.0,
        "embed_scale": config.size("hidden_size") ** 0.5,
        "tied": config.flag("tie_word_embeddings", True),
    }


def _with_post_norms(config: ConfigJson, max_positions: int, pattern: int) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common. `pattern`: where no key says so, every `pattern`-th layer sees all tokens."""
    n_layers = config.size("num_hidden_layers")
    types = config.raw.get("layer_types")
    if types is None:
        pattern = config.size("sliding_window_pattern", pattern)
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(n_layers)]
    windowed = isinstance(types, list) and "sliding_attention" in types
    window = window_of(config, 4096) if windowed else 0
    if windowed and not window:
        raise CheckpointError("config.json: 'sliding_window' is null, and layers have a sliding window")
    return {
        **_common(config, 4, max_positions),
        "windows": typed_windows(types, window, n_layers),
        "softmax_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "activation": config.activation("hidden_activation", "gelu_pytorch_tanh"),
        "post_norms": True,
        "names": GEMMA2_NAMES,
    }


def softcap(config: ConfigJson, name: str, absent: float | None = None) -> float:
    """The cap under a key, 0 for null. `absent` is the default of an absent key; None means null."""
    return 0.0 if config.raw.get(name, absent) is None else config.number(name, absent or 0.0)
