"""The family of Gemma 4: the text part, whose layers differ in their heads, and may share K and V."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.spart.checkpoints.config import CheckpointError, Rope, WrongValue
from fastdecode.spart.checkpoints.config_json import ConfigJson
from fastdecode.spart.checkpoints.gemma import GEMMA2_NAMES, softcap
from fastdecode.spart.checkpoints.llama_like import biases_of, checked_types
from fastdecode.transports.base import LayerOptions

#: What Gemma4TextConfig says of absent keys that are read for every family.
GEMMA4_DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_FULL, _WINDOWED = _ROPES
#: The keys of a layer in `per_layer_config`.
_OF_A_LAYER = {"head_dim", "num_key_value_heads"}
GEMMA4_NAMES = replace(GEMMA2_NAMES, block_scale="layer_scalar")


def gemma4(config: ConfigJson) -> dict[str, Any]:
    """The text part. Gemma4UnifiedTextConfig has other defaults, and no experts or embeddings of layers."""
    if config.raw.get("use_bidirectional_attention") == "all":
        raise CheckpointError("config.json: 'use_bidirectional_attention' is 'all'; tokens here see none behind them")
    unified = config.raw.get("model_type") == "gemma4_unified_text"
    n_layers = config.size("num_hidden_layers")
    types = config.raw.get("layer_types")
    if types is None:
        types = [_FULL if (i + 1) % 6 == 0 else _WINDOWED for i in range(n_layers)]
    types = [*checked_types(types, _ROPES, n_layers)[:-1], _FULL]  # transformers makes the last one so
    window = config.size("sliding_window", 1024 if unified else 512)
    max_positions = config.size("max_position_embeddings", 262144 if unified else 131072)
    heads, kv_layers = _heads(config, types), _kv_layers(config, types)
    for layer, kv_layer in enumerate(kv_layers):
        if heads[layer][1:] != heads[kv_layer][1:]:
            raise WrongValue(
                f"config.json: the heads of layer {layer} differ from those of layer {kv_layer}, whose K "
                "and V it shares"
            )
    windowed = frozenset(i for i, kind in enumerate(types) if kind == _WINDOWED)
    full = frozenset(range(n_layers)) - windowed
    if not unified:
        for name in ("enable_moe_block", "hidden_size_per_layer_input"):
            if config.raw.get(name, name == "hidden_size_per_layer_input"):
                raise CheckpointError(f"config.json: {name!r} is not supported")
    if config.flag("use_double_wide_mlp", False):
        raise CheckpointError("config.json: 'use_double_wide_mlp' is not supported")
    return {
        **biases_of(config),
        "intermediate_size": config.size("intermediate_size"),
        "n_kv_heads": heads[0][1],
        "head_size": heads[0][2],
        "options": LayerOptions(
            heads=tuple(heads) if len(set(heads)) > 1 else (),
            kv_layers=kv_layers if kv_layers != tuple(range(n_layers)) else (),
        ),
        "max_positions": max_positions,
        "windows": tuple(window if i in windowed else 0 for i in range(n_layers)),
        "softmax_scale": 1.0,
        "rope": _rope(config, _FULL, max_positions),
        "second_rope": _rope(config, _WINDOWED, max_positions) if windowed else None,
        "second_rope_layers": windowed,
        "k_as_v_layers": full if config.flag("attention_k_eq_v", False) else frozenset(),
        "activation": config.activation("hidden_activation", "gelu_pytorch_tanh"),
        "norm": "rms",
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "post_norms": True,
        "qk_norm": True,
        "v_norm": True,
        "tied": config.flag("tie_word_embeddings", True),
        "embed_size": config.size("hidden_size"),
        "embed_scale": config.size("hidden_size") ** 0.5,
        "logit_softcap": softcap(config, "final_logit_softcapping"),
        "names": GEMMA4_NAMES,
    }


def _heads(config: ConfigJson, types: list[str]) -> list[tuple[int, int, int, int]]:
    """LayerOptions.heads of all layers. transformers writes what its layers differ in as `per_layer_config`; in the
    published checkpoints, keys of their own describe the layers that see all tokens."""
    own = config.table("per_layer_config")
    if "per_layer_config" not in config.raw:
        full = {"head_dim": config.size("global_head_dim", 512)}
        if config.flag("attention_k_eq_v", False) and config.raw.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = config.size("num_global_key_value_heads")
        own = {str(i): full for i, kind in enumerate(types) if kind == _FULL}
    n_q = config.size("num_attention_heads")
    common = {"head_dim": config.size("head_dim", 256), "num_key_value_heads": config.size("num_key_value_heads", 4)}
    heads = []
    for layer in range(len(types)):
        changed = ConfigJson(own).table(str(layer))
        if others := sorted(changed.keys() - _OF_A_LAYER):
            raise CheckpointError(f"config.json: 'per_layer_config' has {others[0]!r}, which is not supported")
        of_layer = ConfigJson(common | changed)
        size = of_layer.size("head_dim")
        heads.append((n_q, of_layer.size("num_key_value_heads"), size, size))
    return heads


def _kv_layers(config: ConfigJson, types: list[str]) -> tuple[int, ...]:
    """LayerOptions.kv_layers: each of the last layers shares K and V of the last one before them of its type."""
    n_layers, n_shared = len(types), config.size("num_kv_shared_layers", 0, least=0)
    own = types[: max(0, n_layers - n_shared)]
    if missing := set(types) - set(own):
        raise CheckpointError(
            f"config.json: 'num_kv_shared_layers' is {n_shared}, so that no layer of type {missing.pop()!r} has K and V"
        )
    last = {kind: i for i, kind in enumerate(own)}
    return (*range(len(own)), *(last[kind] for kind in types[len(own) :]))


def _rope(config: ConfigJson, kind: str, max_positions: int) -> Rope:
    """RoPE of the layers of a type. Only the proportional one turns a part of each head."""
    tables = ConfigJson(config.table("rope_parameters") or _ROPES)
    if others := sorted(tables.raw.keys() - _ROPES.keys()):
        raise CheckpointError(f"config.json: 'rope_parameters' has {others[0]!r}, which is no type of layers")
    table = tables.table(kind)
    if not table:
        raise CheckpointError(f"config.json: 'rope_parameters' lacks {kind!r}")
    raw = config.raw | {"rope_scaling": None, "partial_rotary_factor": None, "rope_parameters": table}
    return ConfigJson(raw).rope(max_positions, partial=table.get("rope_type") == "proportional")
