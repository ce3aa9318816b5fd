"""Tiny random checkpoints of every family, made by transformers, with a tokenizer each.

    from models.checkpoints import VARIANTS, make_checkpoint
    directory = make_checkpoint("llama-gqa")

A variant is made once a session, for all processes. Its weights are wide enough that logits stand apart, so rounding
does not decide greedy tokens. Norms, biases and positions are random too, so that no mistake is hidden by a zero or a
one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from session_folder import made_once

VOCAB_SIZE = 384
MAX_POSITIONS = 1024

_SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Attention reads the keys and values of every token that came before.",
    "A node that has memory to spare keeps the cache; a node that computes keeps the weights.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "0123456789 + 42 = 123456831; x := f(y) {\n\treturn None\n}\n",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<s>", "</s>", "<pad>"]

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
#: Queries at positions from 32 on are scaled.
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 32.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.25,
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
    "partial_rotary_factor": 0.75,
}
_QWEN3_MOE = {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_GLM4_MOE = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "rope": {"partial_rotary_factor": 0.5},
}
#: Heads whose K, without RoPE, V and latent rows have different sizes.
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_YARN_OF_DEEPSEEK = {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3}
_MINIMAX_M2 = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "rope": {"partial_rotary_factor": 0.5},
}
_ERNIE4_5_MOE = {"num_key_value_heads": 2, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32}
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope": {"partial_rotary_factor": 0.5},
}
_GEMMA = {"num_key_value_heads": 2, "head_dim": 24, "sliding_window": 16, "query_pre_attn_scalar": 40}
_NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
_LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
#: The layers that see all tokens have larger heads, of which RoPE turns some pairs.
_GEMMA4 = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
_OLMO3_ROPE = {
    "full_attention": YARN | {"rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
}
_FOUR_K_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
_STATE_LAST = ["full_attention", "linear_attention", "full_attention", "linear_attention"]

#: name -> (family, config, how to store it)
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-mha": ("llama", {"num_key_value_heads": 4}, {}),
    "llama-gqa": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}, {"shards": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1, "head_dim": 24}, {}),
    "llama-llama3": ("llama", {"rope": _LLAMA3, "attention_bias": True, "mlp_bias": True}, {}),
    "llama-linear": ("llama", {"rope": {"rope_type": "linear", "factor": 2.0}}, {}),
    "llama-yarn": ("llama", {"rope": YARN}, {}),
    "llama-bf16": ("llama", {"num_key_value_heads": 2}, {"dtype": torch.bfloat16}),
    "llama-fp16": ("llama", {"num_key_value_heads": 2}, {"dtype": torch.float16}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 16}, {}),
    "mistral-full": ("mistral", {"num_key_value_heads": 2, "sliding_window": None}, {}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}, {}),
    "qwen2-window": (
        "qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        {},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}, {}),
    "phi3": ("phi3", {"num_key_value_heads": 2}, {}),
    "phi3-window": ("phi3", {"num_key_value_heads": 2, "sliding_window": 16}, {}),
    "phi3-longrope": ("phi3", {"rope": _LONGROPE, "original_max_position_embeddings": 256}, {}),
    "mixtral": ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 16}, {}),
    "qwen3-moe": ("qwen3_moe", {**_QWEN3_MOE, "norm_topk_prob": True}, {}),
    "qwen3-moe-dense": ("qwen3_moe", {**_QWEN3_MOE, "mlp_only_layers": [2], "decoder_sparse_step": 2}, {}),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 5,
            "sliding_window": 16,
            "rope": {**YARN, "truncate": False},
        },
        {},
    ),
    "qwen3-next": ("qwen3_next", {**_DELTA, **_QWEN3_MOE, "shared_expert_intermediate_size": 48}, {}),
    "qwen3-next-bf16": (
        "qwen3_next",
        {**_DELTA, **_QWEN3_MOE, "shared_expert_intermediate_size": 48},
        {"dtype": torch.bfloat16},
    ),
    "qwen3-next-dense": (
        "qwen3_next",
        {
            **(_DELTA | _QWEN3_MOE | _FOUR_K_HEADS),
            "num_key_value_heads": 4,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
        {},
    ),
    "qwen3.5": ("qwen3_5_text", {**_DELTA, "num_key_value_heads": 2, "tie_word_embeddings": True}, {}),
    "qwen3.5-last": (
        "qwen3_5_text",
        {**(_DELTA | _FOUR_K_HEADS), "num_key_value_heads": 1, "layer_types": _STATE_LAST},
        {},
    ),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**_DELTA, **_QWEN3_MOE, "shared_expert_intermediate_size": 48}, {}),
    "granite": (
        "granite",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
        {},
    ),
    "granite-bias": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, {}),
    # The root of the hidden size, which multiplies embeddings, is none of bf16's numbers.
    "gemma": (
        "gemma",
        {"hidden_size": 80, "num_key_value_heads": 1, "head_dim": 32, "attention_bias": True},
        {"dtype": torch.bfloat16},
    ),
    "gemma2": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        {},
    ),
    "gemma2-uncapped": (
        "gemma2",
        {
            **(_GEMMA | _NO_CAPS),
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
        {},
    ),
    "gemma3": ("gemma3_text", {**_GEMMA, "head_dim": 32, "layer_types": _LOCAL_GLOBAL, "rope": _GEMMA3_ROPE}, {}),
    "gemma3-capped": (
        "gemma3_text",
        {
            **_GEMMA,
            "rope": _GEMMA3_ROPE,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "hidden_activation": "silu",
        },
        {},
    ),
    "gemma4": (
        "gemma4_text",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 4.0},
        {},
    ),
    "gemma4-e": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE + 8,
        },
        {},
    ),
    "gemma4-moe": (
        "gemma4_text",
        {
            **_GEMMA4,
            "attention_bias": True,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": False,
            "hidden_activation": "silu",
        },
        {},
    ),
    "smollm3": ("smollm3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2}, {}),
    "smollm3-window": (
        "smollm3",
        {
            "num_key_value_heads": 2,
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        {},
    ),
    "ministral3": ("ministral3", {"num_key_value_heads": 2, "head_dim": 16, "rope": _MINISTRAL3_ROPE}, {}),
    "seed-oss": ("seed_oss", {"num_key_value_heads": 2, "head_dim": 24}, {}),
    "seed-oss-bias": (
        "seed_oss",
        {"num_key_value_heads": 2, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        {},
    ),
    "glm4-moe": ("glm4_moe", {**_GLM4_MOE, "attention_bias": True}, {}),
    "glm4-moe-qk-norm": (
        "glm4_moe",
        {
            **_GLM4_MOE,
            "use_qk_norm": True,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "n_group": 3,
            "topk_group": 2,
            "tie_word_embeddings": True,
            "rope": {"partial_rotary_factor": 0.25},
        },
        {},
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        {**_LATENT, "rope": {**_YARN_OF_DEEPSEEK, "mscale": 1.3}, "num_nextn_predict_layers": 1},
        {},
    ),
    "glm4-moe-lite-halves": (
        "glm4_moe_lite",
        {
            **_LATENT,
            "rope_interleave": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "routed_scaling_factor": 1.2,
            "tie_word_embeddings": True,
        },
        {"dtype": torch.bfloat16},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {**_LATENT, "topk_method": "group_limited_greedy", "rope": _YARN_OF_DEEPSEEK},
        {"dtype": torch.bfloat16},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.5},
        {"dtype": torch.bfloat16},
    ),
    "deepseek-v3": ("deepseek_v3", {**_LATENT, "attention_bias": True, "rope": _YARN_OF_DEEPSEEK}, {}),
    "deepseek-v3-dense": ("deepseek_v3", {**_LATENT, "first_k_dense_replace": 3, "q_lora_rank": None}, {}),
    "deepseek-v3-halves": (
        "deepseek_v3",
        {**_LATENT, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_shared_experts": 2},
        {},
    ),
    "minimax-m2": ("minimax_m2", _MINIMAX_M2, {}),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}, {}),
    "olmo2-bias": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True, "rope": _LLAMA3}, {}),
    "olmo3": (
        "olmo3",
        {"num_key_value_heads": 2, "sliding_window": 16, "layer_types": _LOCAL_GLOBAL, "rope": _OLMO3_ROPE},
        {},
    ),
    "ernie4.5": ("ernie4_5", {"num_key_value_heads": 2, "head_dim": 24}, {}),
    "ernie4.5-bias": (
        "ernie4_5",
        {"num_key_value_heads": None, "head_dim": None, "use_bias": True, "tie_word_embeddings": False},
        {},
    ),
    "ernie4.5-moe": ("ernie4_5_moe", {**_ERNIE4_5_MOE}, {}),
    "ernie4.5-moe-layers": (
        "ernie4_5_moe",
        {
            **_ERNIE4_5_MOE,
            "num_hidden_layers": 5,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 2,
            "moe_num_shared_experts": 0,
            "moe_norm_min": 0.9,
            "tie_word_embeddings": False,
        },
        {},
    ),
    "opt": ("opt", {}, {}),
    "opt-projected": ("opt", {"word_embed_proj_dim": 48, "do_layer_norm_before": False}, {}),
    "opt-old": ("opt", {"_remove_final_layer_norm": True, "enable_bias": False, "activation_function": "gelu"}, {}),
}

#: One of each family.
FAMILIES = (
    "llama-gqa",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "granite",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-e",
    "smollm3",
    "ministral3",
    "olmo2",
    "olmo3",
    "ernie4.5",
    "deepseek-v3-dense",
    "opt",
)
#: The ending of the buffer that changes which experts a router chooses.
CORRECTION = "e_score_correction_bias"
#: The ending of the buffer that multiplies the output of a block of Gemma 4.
BLOCK_SCALE = "layer_scalar"
BUFFERS = (CORRECTION, BLOCK_SCALE)
#: Models whose layers keep states.
STATEFUL = ("qwen3-next", "qwen3.5", "qwen3.5-last", "qwen3.5-moe")
#: Mixtures of experts. Rounding may give a token other experts, so they have no budgets for smaller formats.
MIXTURES = (
    *("mixtral", "gpt-oss", "glm4-moe", "minimax-m2", "ernie4.5-moe", "gemma4-moe"),
    *("glm4-moe-lite", "deepseek-v2", "deepseek-v3"),
)


def make_checkpoint(name: str, seed: int = 0) -> Path:
    """Directory of the variant `name` of VARIANTS: config.json, safetensors, generation_config.json, tokenizer.json."""
    _, _, storage = VARIANTS[name]

    def save(directory: Path) -> None:
        model = make_model(name, seed).to(storage.get("dtype", torch.float32))
        model.save_pretrained(directory, max_shard_size="64KB" if storage.get("shards") else "1GB")
        write_tokenizer(directory)

    return made_once(f"checkpoints/{name}-{seed}", save)


def make_model(name: str, seed: int = 0) -> Any:
    """The transformers model itself, fp32, in eval mode."""
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    family, overrides, _ = VARIANTS[name]
    config = _config(family, dict(overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("A_log"):
                    parameter.normal_(-3.0, 2.0)  # states that forget fast, and states that keep hundreds of tokens
                elif parameter.ndim == 1:
                    base = 1.0 if "norm" in parameter_name and parameter_name.endswith("weight") else 0.0
                    base = 1.0 if parameter_name.endswith("scale") else base  # of Gemma 4's routers and experts
                    parameter.normal_(base, 0.2)
                    if family.startswith("gemma4") and "q_norm" in parameter_name:
                        parameter.mul_(0.25)  # the scores have no scale but this weight
                elif "embed" in parameter_name:
                    scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)  # of Gemma
                    parameter.normal_(0.0, 1.0 / scale)
                else:  # keeps activations near one, and their logits a few units apart
                    parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
            for name, buffer in model.named_buffers():
                if name.endswith(BLOCK_SCALE):
                    buffer.normal_(1.0, 0.2)
                if name.endswith(CORRECTION):
                    buffer.normal_(0.0, 0.5)  # other experts than without it, whose scores are between 0 and 1
    model.generation_config.update(do_sample=False, eos_token_id=[1], bos_token_id=0, pad_token_id=2)
    return model.eval()


def reference(directory: Path) -> Any:
    """The checkpoint as transformers loads it in fp32."""
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def beside_vision(directory: Path, target: Path) -> Any:
    """Save the model of `directory` as the text part of one with a random vision part in `target`; returns it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = reference(directory)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2}  # Gemma's names
    tied, values, kind = text.config.tie_word_embeddings, text.config.to_dict(), text.config.model_type
    if kind == "glm4_moe":
        kind = values["model_type"] = "glm4v_moe_text"
        values["rope_parameters"]["mrope_section"] = [3, 3, 2]
    config = AutoConfig.for_model(
        kind.removesuffix("_text"),
        text_config=values,
        vision_config={**vision, "patch_size": 4},
        tie_word_embeddings=tied,
    )
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(target)
    return model


def several_modes(model_type: str, target: Path, text: Any = None) -> Any:
    """Save a random model of a type that has text and vision parts in `target`; returns it. `text` is the configuration
    of the text part; None: one like those of Llama."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as CLASSES

    make: Any = transformers.CONFIG_MAPPING[model_type]
    config = make() if text is None else make(text_config=text.to_dict(), tie_word_embeddings=text.tie_word_embeddings)
    if text is None:
        _make_small(config.get_text_config(), model_type)
    for name in {"num_hidden_layers", "depth"} & vars(config.vision_config or object).keys():
        setattr(config.vision_config, name, 1)
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES[model_type])._from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(target)
    return model


def _make_small(text: Any, model_type: str) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    more = {"vocab_size": VOCAB_SIZE, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32}
    more["num_experts_per_tok"] = 2
    limits = {"max_position_embeddings": MAX_POSITIONS, "layer_types": ["full_attention"] * 3, "pad_token_id": 2}
    for name, value in (sizes | more | limits).items():
        if getattr(text, name, None) is not None or name == "pad_token_id":
            setattr(text, name, value)
    if model_type.startswith("qwen"):
        text.rope_parameters["mrope_section"] = [2, 3, 3]


def _config(family: str, overrides: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    rope = overrides.pop("rope", None)
    if family == "opt":
        common |= {"ffn_dim": 128}
    else:
        if not any(kind in (rope or {}) for kind in _LOCAL_GLOBAL):  # else each type of layers has its own
            rope = {"rope_type": "default", "rope_theta": 10000.0, **(rope or {})}
        common |= {"intermediate_size": 96, "rope_parameters": rope}
    return AutoConfig.for_model(family, **(common | overrides))


def write_tokenizer(
    directory: Path, *, specials: tuple[str, ...] = (), plain: tuple[str, ...] = (), chat_template: str = CHAT_TEMPLATE
) -> Path:
    """A byte-level BPE of VOCAB_SIZE tokens that can spell anything; <s> is 0, </s> is 1.

    `specials` are further special tokens, and `plain` are added tokens that are none. Returns `directory`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(plain),
        special_tokens=[*_SPECIAL, *specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": MAX_POSITIONS,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory
