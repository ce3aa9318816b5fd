"""The family of Gemma 4: the text part, whose layers differ in their heads, and may share K and V."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastdecode.spart.checkpoints.config import (
    CheckpointError,
    Experts,
    MixtureNormNames,
    PerLayerEmbedding,
    PerLayerNames,
    Rope,
    WrongValue,
)
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
GEMMA4_NAMES = replace(
    GEMMA2_NAMES,
    block_scale="layer_scalar",
    per_layer=PerLayerNames(
        table="model.embed_tokens_per_layer",
        projection="model.per_layer_model_projection",
        norm="model.per_layer_projection_norm",
        gate="per_layer_input_gate",
        out="per_layer_projection",
        post_norm="post_per_layer_input_norm",
    ),
)
#: The MLP of the dense models is a shared expert here.
GEMMA4_MOE_NAMES = replace(
    GEMMA4_NAMES,
    router="router.proj",
    expert_up=("experts.{e}.gate_proj", "experts.{e}.up_proj"),
    expert_down="experts.{e}.down_proj",
    expert_scale="router.per_expert_scale",
    shared_up=GEMMA4_NAMES.up,
    shared_down=GEMMA4_NAMES.down,
    mixture_norms=MixtureNormNames(
        router="router.scale",
        experts="pre_feedforward_layernorm_2",
        experts_post="post_feedforward_layernorm_2",
        shared_post="post_feedforward_layernorm_1",
    ),
)


def gemma4(config: ConfigJson) -> dict[str, Any]:
    """The text part. Gemma4UnifiedTextConfig has other defaults, and no experts or embeddings of layers."""
    if (seeing := config.raw.get("use_bidirectional_attention")) not in (None, "vision"):  # "vision" is of images
        raise CheckpointError(
            f"config.json: 'use_bidirectional_attention' is {seeing!r}; tokens here see none behind them"
        )
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
    shares = [kv_layer != layer for layer, kv_layer in enumerate(kv_layers)]
    size, doubled = config.size("intermediate_size"), config.flag("use_double_wide_mlp", False) and any(shares)
    per_layer = None if unified else _per_layer(config)
    experts = _experts(config) if not unified and config.flag("enable_moe_block", False) else None
    if experts is not None and doubled:
        raise CheckpointError("config.json: 'use_double_wide_mlp' is not supported beside 'enable_moe_block'")
    names = GEMMA4_MOE_NAMES if experts else GEMMA4_NAMES
    return {
        **biases_of(config),
        "intermediate_size": size,
        "mlp_sizes": tuple(2 * size if shared else size for shared in shares) if doubled else (),
        "experts": experts,
        "per_layer": per_layer,
        "n_kv_heads": heads[0][1],
        "head_size": heads[0][2],
        "options": LayerOptions(
            heads=tuple(heads) if len(set(heads)) > 1 else (),
            kv_layers=kv_layers if any(shares) else (),
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
        # Checkpoints may have K and V of layers that share those of others.
        "names": replace(
            names, aside=tuple(name for i, shared in enumerate(shares) if shared for name in _kv_names(i))
        ),
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


def _kv_names(layer: int) -> tuple[str, ...]:
    """The names of the parameters of a layer's K and V."""
    return tuple(f"model.layers.{layer}.self_attn.{name}" for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm."))


def _per_layer(config: ConfigJson) -> PerLayerEmbedding | None:
    size = config.size("hidden_size_per_layer_input", 256, least=0)
    rows, vocabulary = config.size("vocab_size_per_layer_input", 262144), config.size("vocab_size")
    if size and rows < vocabulary:
        raise WrongValue(f"config.json: 'vocab_size_per_layer_input' is {rows}, less than 'vocab_size' {vocabulary}")
    return PerLayerEmbedding(rows, size) if size else None


def _experts(config: ConfigJson) -> Experts:
    return Experts(
        config.size("num_experts"),
        config.size("top_k_experts"),
        config.size("moe_intermediate_size"),
        renormalise=True,
        router_scale=config.size("hidden_size") ** -0.5,
        shared_size=config.size("intermediate_size"),
    )


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
