"""What the configurations of Llama and its many relatives have in common, for the functions of the families."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastdecode.spart.checkpoints.config import CheckpointError, Rope, TensorNames
from fastdecode.spart.checkpoints.config_json import ConfigJson

LLAMA_NAMES = TensorNames(
    embedding="model.embed_tokens",
    block="model.layers.{i}.",
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    o="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    final_norm="model.norm",
)


def llama_like(
    config: ConfigJson,
    kv_heads: int | None,
    head_size: int,
    max_positions: int,
    window: int = 0,
    norm_eps: float = 1e-6,
    **rope: Any,
) -> dict[str, Any]:
    """The fields that Llama and its relatives have in common. The arguments are the defaults of absent keys, but for
    `window`, which all layers have, and `rope`, further arguments of ConfigJson.rope. `kv_heads` None: as many as there
    are query heads."""
    max_positions = config.size("max_position_embeddings", max_positions)
    head_size = config.size("head_dim", head_size)
    return {
        "intermediate_size": config.size("intermediate_size"),
        "n_kv_heads": config.size("num_key_value_heads", kv_heads or config.size("num_attention_heads")),
        "head_size": head_size,
        "max_positions": max_positions,
        "windows": (window,) * config.size("num_hidden_layers"),
        "softmax_scale": head_size**-0.5,
        "rope": config.rope(max_positions, **rope),
        "activation": config.activation("hidden_act", "silu"),
        "norm": "rms",
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        "tied": config.flag("tie_word_embeddings", False),
        "embed_size": config.size("hidden_size"),
        "names": LLAMA_NAMES,
    }


def equal_heads(config: ConfigJson) -> int:
    """The head size of a config.json without `head_dim`."""
    return max(1, config.size("hidden_size") // config.size("num_attention_heads"))


def biases_of(config: ConfigJson, default: bool = False) -> dict[str, bool]:
    """Whether attention's projections have biases."""
    return dict.fromkeys(("qkv_bias", "o_bias"), config.flag("attention_bias", default))


def window_of(config: ConfigJson, absent: int | None = None) -> int:
    """`sliding_window`: 0 means full attention. `absent` is the default of an absent key; None and null mean 0."""
    return 0 if config.raw.get("sliding_window", absent) is None else config.size("sliding_window", absent)


def ropes_by_type(config: ConfigJson, max_positions: int, full_base: float, window_base: float) -> tuple[Rope, Rope]:
    """RoPE of the layers that see all tokens, and of those with a sliding window. The arguments are the defaults of
    absent keys.

    transformers 5 writes a table for each type of layers in `rope_parameters`; 4 wrote `rope_scaling`, which is of the
    layers that see all tokens.
    """
    tables = ConfigJson(config.table("rope_parameters"))
    full, local = (tables.table(kind) for kind in ("full_attention", "sliding_attention"))
    if others := sorted(tables.raw.keys() - {"full_attention", "sliding_attention"}):
        raise CheckpointError(f"config.json: 'rope_parameters' has {others[0]!r}, which is no type of layers")
    full = {"rope_theta": full_base, **full, **config.table("rope_scaling")}
    local = {"rope_theta": window_base, **local}
    max_positions = config.size("max_position_embeddings", max_positions)
    rope, windowed_rope = (
        ConfigJson(config.raw | {"rope_scaling": None, "rope_parameters": table}).rope(max_positions)
        for table in (full, local)
    )
    return rope, windowed_rope


def typed_windows(types: Any, window: int, n_layers: int) -> tuple[int, ...]:
    """The windows of layers whose `layer_types` are `types`."""
    sizes = {"full_attention": 0, "sliding_attention": window}
    return tuple(sizes[kind] for kind in checked_types(types, sizes, n_layers))


def checked_types(types: Any, known: Collection[str], n_layers: int, name: str = "layer_types") -> list[str]:
    """The types of `n_layers` layers under the key `name`. Raises CheckpointError for one that is not `known`."""
    if not isinstance(types, list) or len(types) < n_layers:
        raise CheckpointError(f"config.json: {name!r} is {types!r}, not a list of the {n_layers} layers' types")
    for kind in types:
        if not isinstance(kind, str) or kind not in known:
            raise CheckpointError(f"config.json: layer type {kind!r} is not one of {', '.join(known)}")
    return types[:n_layers]
