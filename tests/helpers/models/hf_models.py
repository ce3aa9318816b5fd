"""Tiny random models of many transformers types, for the transformers backend."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
_DRAFTING = {"num_nextn_predict_layers": 1}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: Latent attention: 24 elements a token, where the heads have 160.
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": None,
}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_DELTA = {
    "layer_types": _MIXED,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}
#: Index heads enough that no score is 0, as is that of a token all of whose products are negative: which of several
#: tokens with a score of 0 torch selects is not documented.
_INDEXED = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 32}

#: Attention, an MLP, and both again: once, twice and once.
_LOOPED = {
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"] * 2,
    "n_input_layers": 2,
    "n_recurrent_layers": 4,
    "n_output_layers": 2,
    "sliding_window": 16,
}

#: model type -> what its configuration has besides or instead of the common values; None takes a value away.
TYPES: dict[str, dict[str, Any]] = {
    "afmoe": {**_MOE},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "biogpt": {},
    "cohere": {},
    "cohere2": {"sliding_window": 16},
    "cwm": {},
    "deepseek_v2": {**_ROUTED, **_LATENT, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**_ROUTED, **_DRAFTING, **_LATENT, "n_group": 1, "topk_group": 1},
    "deepseek_v32": {**_ROUTED, **_DRAFTING, **_LATENT, **_INDEXED, "n_group": 1, "topk_group": 1},
    "diffllama": {},
    "dots1": {**_ROUTED, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": {"sliding_window": 16},
    "exaone_moe": {**_MOE, "sliding_window": 16},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma3_text": {"sliding_window": 16},
    "gemma3n_text": {
        "sliding_window": 16,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {
        "sliding_window": 16,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {**_ROUTED, **_DRAFTING},
    "glm4_moe_lite": {**_ROUTED, **_DRAFTING, **_LATENT, "n_group": 1, "topk_group": 1},
    "glm_moe_dsa": {
        **_ROUTED,
        **_DRAFTING,
        **_LATENT,
        **_INDEXED,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "shared", "full"],
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024, "head_dim": None},
    "gpt_neox": {},
    "granite": {},
    "granitemoe": {**_LOCAL},
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 32},
    "hy_v3": {**_MOE},
    "laguna": {**_MOE, "shared_expert_intermediate_size": 32},
    "nanochat": {},
    "ministral3": {},
    "solar_open": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "doge": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "jais2": {},
    "llama": {},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 48},
    "minicpm3": {**_LATENT},
    "minimax_m2": {**_LOCAL},
    "ministral": {"sliding_window": 16},
    "mistral": {"sliding_window": 16},
    "mixtral": {**_LOCAL},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "olmoe": {**_MOE},
    "opt": {"ffn_dim": 96, "do_layer_norm_before": True, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {**_LOCAL},
    "qwen2": {},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": {**_MOE},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {"attn_logit_softcapping": 2.0},
    "youtu": {**_LATENT},
    "gemma2": {"sliding_window": 16, "attn_logit_softcapping": 2.0},
    "gpt_oss": {**_LOCAL, "sliding_window": 16},
    "bloom": {},
    "mpt": {},
    "mamba": {},
    "qwen3_next": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {**_DELTA},
    "qwen3_5_moe_text": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 32, "intermediate_size": None},
    "olmo_hybrid": {"layer_types": _MIXED},
    "kimi_linear": {
        **_ROUTED,
        "num_experts": 4,
        **_LATENT,
        "layer_types": _MIXED,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "bailing_hybrid": {
        "num_experts": 16,  # in eight groups
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "layer_group_size": 2,
        "num_key_value_heads": 4,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **_LOCAL,
        **_MAMBA,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1, "mamba_dt_rank": 8},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_key_value_heads": 4,
        "num_mem_blocks": 1,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_d_state": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**_MOE, "layer_types": ["conv", "full_attention", "conv"]},
    "zaya": {"num_experts": 4, "moe_intermediate_size": 32},
    "minimax": {},
    "recurrent_gemma": {},
    "rwkv": {},
    "deepseek_v4": {},
    "axk1": {
        **_ROUTED,
        **_LATENT,
        "head_dim": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_group": 1,
        "topk_group": 1,
    },
    "cohere2_moe": {**_MOE, "sliding_window": 16},
    "dory": {**_LOOPED},
    "exaone": {},
    "granite_swa": {"sliding_window": 16},
    "hrm_text": {},
    "kolibri1": {**_LOCAL, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "lara_mini": {**_MOE, **_DELTA, "shared_expert_intermediate_size": 32},
    "lfm3": {},
    "mellum": {**_LOCAL, "moe_intermediate_size": 32, "sliding_window": 16},
    "zamba": {
        "num_hidden_layers": 6,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 8,
    },
    "xlstm": {},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "jetmoe": {"kv_channels": 16, "num_local_experts": 4},
    "openai-gpt": {"n_embd": 64, "n_layer": 3, "n_head": 4},
}


#: The types whose models ranks share.
SHARED = (
    "apertus",
    "arcee",
    "axk1",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_neox",
    "granite",
    "helium",
    "hunyuan_v1_moe",
    "jais2",
    "kolibri1",
    "llama",
    "mellum",
    "minicpm3",
    "ministral",
    "ministral3",
    "mistral",
    "nanochat",
    "nemotron",
    "olmo",
    "phi",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "starcoder2",
    "vaultgemma",
    "youtu",
)

#: Other models of these types, by model type and a word.
VARIANTS: dict[str, dict[str, Any]] = {
    "falcon/multi-query": {"num_kv_heads": None, "head_dim": None, "alibi": False},
    "falcon/alibi": {"num_kv_heads": None, "head_dim": None, "alibi": True},
    "dory/last loop": {**_LOOPED, "recurrent_kv_cache_mode": "last_loop"},
    "deepseek_v32/padded index heads": {**TYPES["deepseek_v32"], "index_head_dim": 20},
    "deepseek_v32/a page": {**TYPES["deepseek_v32"], "index_topk": 128},
    "glm_moe_dsa/a page": {**TYPES["glm_moe_dsa"], "index_topk": 128},
    "mpt/six heads": {"n_heads": 6, "d_model": 96, "hidden_size": None},
    "bamba/one group": {**TYPES["bamba"], "mamba_n_groups": 1},
    "granitemoehybrid/one group": {**TYPES["granitemoehybrid"], "mamba_n_groups": 1},
}


def make_config(name: str) -> Any:
    """The tiny configuration of a model type, or of a variant."""
    from transformers import AutoConfig

    values = {**_COMMON, **(TYPES.get(name) or VARIANTS.get(name) or {})}
    return AutoConfig.for_model(
        name.split("/")[0], **{name: value for name, value in values.items() if value is not None}
    )


@functools.cache
def save_model(model_type: str, directory: Path, spread: float = 0.0) -> Path:
    """A random checkpoint, with logits so far apart that rounding does not decide greedy tokens. The standard deviation
    of biases and of the weights of norms is `spread`."""
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(make_config(model_type), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 1.0 if "embed" in name else 1.2 * parameter.shape[-1] ** -0.5)
                elif spread:
                    parameter += spread * torch.randn(parameter.shape)
    model.generation_config.update(do_sample=False, eos_token_id=None, bos_token_id=1, pad_token_id=0)
    model.eval().save_pretrained(directory / model_type)
    return directory / model_type
