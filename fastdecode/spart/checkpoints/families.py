"""Model families: how a checkpoint's config.json becomes a ModelConfig. docs/adding-a-model.md adds one step by step.

A family is a function that reads config.json and returns the fields of ModelConfig in which the family differs, among
them the names of its tensors. A key that is absent from config.json has the default of the family's configuration class
in transformers. A key that would change the model's output and is not understood is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastdecode.spart.checkpoints.config import (
    CheckpointError,
    DeltaNames,
    DeltaRule,
    Experts,
    ModelConfig,
    MTPNames,
    TensorNames,
    UnknownArchitecture,
    WrongValue,
    check_layers,
)
from fastdecode.spart.checkpoints.config_json import ConfigJson, token_ids
from fastdecode.spart.checkpoints.deepseek import deepseek_v2, deepseek_v3, glm4_moe_lite
from fastdecode.spart.checkpoints.ernie import ernie4_5, ernie4_5_moe
from fastdecode.spart.checkpoints.gemma import GEMMA3_DEFAULTS, gemma, gemma2, gemma3
from fastdecode.spart.checkpoints.gemma4 import GEMMA4_DEFAULTS, gemma4
from fastdecode.spart.checkpoints.glm import glm4_moe
from fastdecode.spart.checkpoints.llama_like import (
    LLAMA_NAMES,
    biases_of,
    checked_types,
    equal_heads,
    llama_like,
    typed_windows,
    window_of,
)
from fastdecode.spart.checkpoints.minimax import minimax_m2
from fastdecode.spart.checkpoints.ministral3 import ministral3
from fastdecode.spart.checkpoints.olmo import olmo2, olmo3
from fastdecode.spart.checkpoints.quantisation import parse_quantisation
from fastdecode.spart.checkpoints.smollm3 import smollm3


def make_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """`raw` is config.json, `generation` is generation_config.json. Raises CheckpointError."""
    config = ConfigJson(raw)
    architecture, family = _family(config)
    if family != architecture:
        config = _text_part(config)
    config = ConfigJson(_DEFAULTS.get(family, {}) | config.raw)
    n_blocks = config.size("num_hidden_layers")
    check_layers(n_blocks)  # before a list has an element for each
    fields = FAMILIES[family](config)
    if family != architecture:
        fields["names"] = replace(fields["names"], aside=("",))
    delta: DeltaRule | None = fields.get("delta")
    return ModelConfig(
        architecture=architecture,
        dtype=config.dtype(),
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        n_layers=n_blocks - (len(delta.blocks) if delta else 0),
        n_q_heads=config.size("num_attention_heads"),
        eos_token_ids=token_ids("eos_token_id", config.raw, generation or {}),
        suppressed=token_ids("suppress_tokens", generation or {}),
        bos_token_id=config.raw.get("bos_token_id"),
        quantisation=parse_quantisation(config.table("quantization_config")),
        **fields,
    )


def _family(config: ConfigJson) -> tuple[str, str]:
    """The architecture of a checkpoint and the family that serves it, which for a model of several modes is that of its
    text part. Raises CheckpointError."""
    names, kind = config.architectures(), str(config.raw.get("model_type"))
    if kind in _OTHER_TENSORS:
        raise UnknownArchitecture(f"checkpoints of type {kind!r} are not known, whose tensors have names of their own")
    for name in names:
        if name in FAMILIES:
            if _letters(kind) in {_letters(family) for family in FAMILIES} - {_letters(name)}:
                raise WrongValue(
                    f"config.json: 'architectures' has {name!r}, and 'model_type' is {kind!r}, another model's"
                )
            return name, name
    text = config.table("text_config")
    if not text and kind in _EARLY_VISION:
        text = config.raw
    if names and (family := TEXT_PARTS.get(str(text.get("model_type")))):
        return names[0], family
    found = ", ".join(names) or f"none (model_type {config.raw.get('model_type')!r})"
    raise UnknownArchitecture(
        f"unknown architecture {found}; known are {', '.join(FAMILIES)}, and text parts of these types"
    )


def _letters(name: str) -> str:
    """What an architecture's name and its `model_type` have in common."""
    return name.removesuffix("ForCausalLM").replace("_", "").lower()


def _text_part(config: ConfigJson) -> ConfigJson:
    """The configuration of the text part of a model that has others too."""
    common = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "eos_token_id")
    text = config.table("text_config") or config.raw
    return ConfigJson(text | {name: config.raw[name] for name in common if name in config.raw})


# -- Llama and its relatives ------------------------------------------------------------------------------------------


def _llama(config: ConfigJson) -> dict[str, Any]:
    biases = {**biases_of(config), "mlp_bias": config.flag("mlp_bias", False)}
    return biases | llama_like(config, None, equal_heads(config), 2048)


def _mistral(config: ConfigJson) -> dict[str, Any]:
    return llama_like(config, 8, equal_heads(config), 131072, window=window_of(config, 4096))


def _seed_oss(config: ConfigJson) -> dict[str, Any]:
    return {
        **llama_like(config, 8, 128, 524288),
        "qkv_bias": config.flag("attention_bias", True),
        "o_bias": config.flag("attention_out_bias", False),
        "mlp_bias": config.flag("mlp_bias", False),
    }


def _qwen_window(config: ConfigJson) -> int:
    return window_of(config, 4096) if config.flag("use_sliding_window", False) else 0


def _qwen_windows(config: ConfigJson) -> tuple[int, ...]:
    window, n_layers = _qwen_window(config), config.size("num_hidden_layers")
    if not window:
        return (0,) * n_layers
    types = config.raw.get("layer_types")
    if types is None:
        first = config.size("max_window_layers", 28, least=0)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(n_layers)]
    return typed_windows(types, window, n_layers)


def _qwen2(config: ConfigJson) -> dict[str, Any]:
    common = llama_like(config, None, equal_heads(config), 32768)
    return {**common, "windows": _qwen_windows(config), "qkv_bias": True}


def _qwen3(config: ConfigJson) -> dict[str, Any]:
    common = llama_like(config, None, 128, 32768)
    return {**common, **biases_of(config), "windows": _qwen_windows(config), "qk_norm": True}


PHI3_NAMES = replace(LLAMA_NAMES, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))


def _phi3(config: ConfigJson) -> dict[str, Any]:
    """Phi-3 and Phi-4. "su" and "yarn" are old names of LongRoPE in such a checkpoint."""
    raw = dict(config.raw)
    for name in ("rope_scaling", "rope_parameters"):
        table = config.table(name)
        kind = table.get("rope_type") or table.get("type") or "default"
        if kind in ("su", "yarn"):
            raw[name] = {**table, "rope_type": "longrope"}
        elif kind not in ("default", "longrope"):
            raise CheckpointError(f"RoPE scaling {kind!r} is not supported for Phi-3; known are default, longrope")
    trained_on = config.size("original_max_position_embeddings", 4096)
    config = ConfigJson(raw | {"original_max_position_embeddings": trained_on})
    common = llama_like(config, None, equal_heads(config), 4096, window_of(config), norm_eps=1e-5, partial=True)
    return {**common, "names": PHI3_NAMES}


# -- mixtures of experts ----------------------------------------------------------------------------------------------

MIXTRAL_NAMES = replace(
    LLAMA_NAMES,
    router="block_sparse_moe.gate",
    expert_up=("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    expert_down="block_sparse_moe.experts.{e}.w2",
)
QWEN3_MOE_NAMES = replace(
    LLAMA_NAMES,
    router="mlp.gate",
    expert_up=("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    expert_down="mlp.experts.{e}.down_proj",
)
GPT_OSS_NAMES = replace(
    LLAMA_NAMES,
    sinks="self_attn.sinks",
    router="mlp.router",
    expert_up=("mlp.experts.gate_up_proj",),
    expert_down="mlp.experts.down_proj",
)
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _experts(config: ConfigJson, n: int, used: int, intermediate_size: int, **options: Any) -> Experts:
    """`n` and `used` are the defaults of absent keys."""
    key = "num_experts" if "num_experts" in config.raw else "num_local_experts"  # transformers writes both
    return Experts(config.size(key, n), config.size("num_experts_per_tok", used), intermediate_size, **options)


def _mixtral(config: ConfigJson) -> dict[str, Any]:
    common = llama_like(config, 8, equal_heads(config), 131072, window_of(config), norm_eps=1e-5, theta=1e6)
    experts = _experts(config, 8, 2, common["intermediate_size"], renormalise=True)
    return {**common, "experts": experts, "names": MIXTRAL_NAMES}


def _qwen3_moe(config: ConfigJson) -> dict[str, Any]:
    common = llama_like(config, 4, equal_heads(config), 32768, window=_qwen_window(config))
    size = config.size("moe_intermediate_size", 768)
    renormalise = config.flag("norm_topk_prob", config.raw.get("model_type") == "qwen3_vl_moe_text")
    experts = _experts(config, 128, 8, size, renormalise=renormalise, dense_layers=_dense_layers(config))
    return {**common, **biases_of(config), "qk_norm": True, "experts": experts, "names": QWEN3_MOE_NAMES}


def _dense_layers(config: ConfigJson) -> frozenset[int]:
    every, dense = config.size("decoder_sparse_step", 1), config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise WrongValue(f"config.json: 'mlp_only_layers' is {dense!r}, not a list of layers")
    return frozenset(i for i in range(config.size("num_hidden_layers")) if i in dense or (i + 1) % every)


def _gpt_oss(config: ConfigJson) -> dict[str, Any]:
    common = llama_like(config, 8, 64, 131072, norm_eps=1e-5, theta=150000.0, scaling=_GPT_OSS_ROPE)
    n_layers, size = len(common["windows"]), common["intermediate_size"]
    types = config.raw.get("layer_types") or ["sliding_attention", "full_attention"] * n_layers
    swiglu = config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)
    return {
        **common,
        **biases_of(config, default=True),
        "windows": typed_windows(types, window_of(config, 128), n_layers),
        "experts": _experts(config, 128, 4, size, renormalise=True, bias=True, clamped_swiglu=swiglu),
        "names": GPT_OSS_NAMES,
    }


def _granite(config: ConfigJson) -> dict[str, Any]:
    return {
        **_llama(config),
        "softmax_scale": config.number("attention_multiplier", 1.0),
        "embed_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logit_divisor": config.number("logits_scaling", 1.0),
    }


# -- gated delta rule -------------------------------------------------------------------------------------------------

_QWEN3_5_DELTA = DeltaNames(
    inputs=tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
    conv="linear_attn.conv1d",
    decay="linear_attn.A_log",
    decay_bias="linear_attn.dt_bias",
    norm="linear_attn.norm",
    out="linear_attn.out_proj",
)
QWEN3_5_NAMES = replace(
    QWEN3_MOE_NAMES,
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
    delta=_QWEN3_5_DELTA,
    mtp=MTPNames(
        block="mtp.layers.0.",
        fc="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        final_norm="mtp.norm",
    ),
    aside=("mtp.",),
)
QWEN3_NEXT_NAMES = replace(
    QWEN3_5_NAMES, delta=replace(_QWEN3_5_DELTA, inputs=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"))
)


def _qwen3_5(config: ConfigJson, kv_heads: int = 4, by_head: bool = False) -> dict[str, Any]:
    """Qwen3.5, and what Qwen3-Next and the mixtures have in common with it. `kv_heads` is the default."""
    fraction = config.number("partial_rotary_factor", 0.25)
    config = ConfigJson(config.raw | {"partial_rotary_factor": fraction})
    delta = _delta_rule(config, by_head)
    return {
        **biases_of(config),
        **llama_like(config, kv_heads, 256, 32768, partial=True),
        "windows": (0,) * (config.size("num_hidden_layers") - len(delta.blocks)),
        "delta": delta,
        "norm_offset": 1.0,
        "output_gate": True,
        "qk_norm": True,
        "names": QWEN3_NEXT_NAMES if by_head else QWEN3_5_NAMES,
    }


def _delta_rule(config: ConfigJson, by_head: bool) -> DeltaRule:
    n_blocks, every = config.size("num_hidden_layers"), config.size("full_attention_interval", 4)
    types = config.raw.get("layer_types")
    if types is None:
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n_blocks)]
    types = checked_types(types, ("full_attention", "linear_attention"), n_blocks)
    delta = DeltaRule(
        blocks=frozenset(i for i, kind in enumerate(types) if kind == "linear_attention"),
        k_heads=config.size("linear_num_key_heads", 16),
        v_heads=config.size("linear_num_value_heads", 32),
        k_size=config.size("linear_key_head_dim", 128),
        v_size=config.size("linear_value_head_dim", 128),
        kernel=config.size("linear_conv_kernel_dim", 4),
        by_head=by_head,
    )
    if delta.kernel < 2:
        raise CheckpointError("config.json: 'linear_conv_kernel_dim' is 1; only 2 and more are supported")
    if delta.v_heads % delta.k_heads:
        raise CheckpointError(f"{delta.v_heads} linear V heads are not a multiple of {delta.k_heads} linear K heads")
    return delta


def _qwen3_5_moe(config: ConfigJson) -> dict[str, Any]:
    size = config.size("moe_intermediate_size", 512)
    shared = config.size("shared_expert_intermediate_size", 512)
    return {
        **_qwen3_5(ConfigJson({"intermediate_size": size} | config.raw), kv_heads=2),
        "experts": _experts(config, 256, 8, size, renormalise=True, shared_size=shared),
    }


def _qwen3_next(config: ConfigJson) -> dict[str, Any]:
    size, shared = (config.size(f"{name}_intermediate_size", 512) for name in ("moe", "shared_expert"))
    renormalise, dense = config.flag("norm_topk_prob", True), _dense_layers(config)
    experts = _experts(config, 512, 10, size, renormalise=renormalise, dense_layers=dense, shared_size=shared)
    config = ConfigJson({"intermediate_size": 5632} | config.raw)
    return {**_qwen3_5(config, kv_heads=2, by_head=True), "experts": experts}


# -- OPT --------------------------------------------------------------------------------------------------------------

OPT_NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    block="model.decoder.layers.{i}.",
    attention_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
    final_norm="model.decoder.final_layer_norm",
    project_out="model.decoder.project_out",
)


def _opt(config: ConfigJson) -> dict[str, Any]:
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    if hidden % heads:
        raise CheckpointError(f"hidden size {hidden} is not a multiple of {heads} heads")
    norm_first = config.flag("do_layer_norm_before", True)
    return {
        "intermediate_size": config.size("ffn_dim", 3072),
        "n_kv_heads": heads,
        "head_size": hidden // heads,
        "max_positions": config.size("max_position_embeddings", 2048),
        "windows": (0,) * config.size("num_hidden_layers"),
        "softmax_scale": (hidden // heads) ** -0.5,
        "rope": None,
        "position_offset": 2,
        "activation": config.activation("activation_function", "relu"),
        "gated": False,
        "norm": "layer",
        "norm_eps": 1e-5,
        "norm_first": norm_first,
        "norm_affine": config.flag("layer_norm_elementwise_affine", True),
        # Checkpoints fine-tuned before transformers 4.20.1 lack it (facebookresearch/metaseq#164).
        "final_norm": norm_first and not config.flag("_remove_final_layer_norm", False),
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), config.flag("enable_bias", True)),
        "tied": config.flag("tie_word_embeddings", True),
        "embed_size": config.size("word_embed_proj_dim", hidden),
        "names": OPT_NAMES,
    }


#: The families by their names in config.json's `architectures`. Each function returns the fields in which its family
#: differs.
FAMILIES: dict[str, Callable[[ConfigJson], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Phi3ForCausalLM": _phi3,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "GptOssForCausalLM": _gpt_oss,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "GraniteForCausalLM": _granite,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4UnifiedForCausalLM": gemma4,
    "SmolLM3ForCausalLM": smollm3,
    "Ministral3ForCausalLM": ministral3,
    "SeedOssForCausalLM": _seed_oss,
    "Glm4MoeForCausalLM": glm4_moe,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Ernie4_5ForCausalLM": ernie4_5,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe,
    "OPTForCausalLM": _opt,
}
#: The defaults of absent keys that are read for every family alike; those without one must be there.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": GEMMA3_DEFAULTS,
    "Gemma4ForCausalLM": GEMMA4_DEFAULTS,
    "Gemma4UnifiedForCausalLM": GEMMA4_DEFAULTS,
}

#: Types that transformers makes models of a known family of, though their tensors have other names.
_OTHER_TENSORS = frozenset(["exaone"])
#: Types whose text part may have no table of its own in config.json.
_EARLY_VISION = frozenset(["qwen2_vl", "qwen2_5_vl"])
#: The families that serve the text parts of models of several modes, by the `model_type` of the text part.
TEXT_PARTS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
}
