"""The families with latent attention: their routers, and what the configurations of their checkpoints mean."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import make_checkpoint, make_model, reference
from models.gguf_keys import config_of_keys
from models.gguf_made import tokenizer_fields, write_gguf
from models.llama_cpp_checks import last_logits, logits_of_llama_cpp, needs_llama_cpp
from models.spart_steps import EXACT, text

from fastdecode.kernels._native import page_bytes
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.region.geometry import geometry_tuple
from fastdecode.spart import CheckpointError, ModelConfig, load_model
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.loader import block_linears

#: A configuration in the form of Kimi K2's, with keys that DeepSeek's own code reads and transformers does not.
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "eos_token_id": 163585,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def config_of(name: str, **changes: Any) -> ModelConfig:
    """The configuration of a variant's checkpoint with other values of some keys. ...: without the key."""
    raw = json.loads((make_checkpoint(name) / "config.json").read_text()) | changes
    return make_config({key: value for key, value in raw.items() if value is not ...})


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite-halves"])
def test_the_router_chooses_the_experts_of_the_best_groups(name):
    ours = load_model(make_checkpoint(name), dtype="fp32").weights.blocks[-1].mlp
    gate = reference(make_checkpoint(name)).model.layers[-1].mlp.gate
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        shares, chosen = ours.choose(x)
        _, wanted, experts = gate(x)
        gate.num_group = gate.topk_group = 1
        ungrouped = gate(x)[2].sort(dim=1).values
    order, theirs_order = chosen.argsort(dim=1), experts.argsort(dim=1)
    assert torch.equal(chosen.gather(1, order), experts.gather(1, theirs_order))
    torch.testing.assert_close(shares.gather(1, order), wanted.gather(1, theirs_order))
    changed = (chosen.gather(1, order) != ungrouped).any(dim=1).float().mean()
    assert changed > 0.2 if name != "deepseek-v2-lite" else not changed


def test_latent_rows_are_stored_in_place_of_heads():
    config = config_of("deepseek-v3")
    assert config.heads_of(1) == (4, 1, 64 + 16, 64, True)
    page = page_bytes(geometry_tuple(config.hello_geometry(1, 1, "fp32")), 0, **config.options.stored(config.windows))
    assert page == config.n_layers * (64 + 16) * 4 * PAGE_TOKENS, "V is a part of K, so only K is stored"
    changed = {name.rpartition(".")[2] for name in block_linears(config)}
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"} <= changed
    assert "kv_b_proj" not in changed, "an adapter for a matrix that is absorbed is refused"


def test_a_configuration_of_kimi_k2():
    config = make_config(KIMI_K2)
    assert (config.n_layers, config.head_size, config.rope_head_size(False), config.row_sizes[1]) == (61, 576, 64, 576)
    assert (config.latent.q_rank, config.latent.k_size, config.latent.v_size) == (1536, 128, 128)
    assert (config.rope.kind, config.rope.theta, config.rope.attention_factor) == ("yarn", 50000.0, 1.0)
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)
    experts = config.experts
    assert (experts.n, experts.used, experts.groups, experts.scale) == (384, 8, 1, 2.827)
    assert (experts.dense_layers, experts.shared_size) == (frozenset({0}), 2048)
    assert config.quantisation.block == (128, 128)


_OF_EXPERTS = ("n_routed_experts", "moe_intermediate_size", "n_shared_experts", "routed_scaling_factor")
_OF_HEADS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@pytest.mark.parametrize("name", ["glm4-moe-lite", "deepseek-v2", "deepseek-v3"])
def test_keys_that_are_absent_have_the_defaults_of_the_class(name):
    from transformers import AutoConfig

    absent = (*_OF_EXPERTS, *_OF_HEADS, "n_group", "topk_group", "norm_topk_prob", "rope_interleave", "rms_norm_eps")
    absent += ("max_position_embeddings", "attention_bias", "first_k_dense_replace", "mlp_layer_types", "topk_method")
    used = {"num_experts_per_tok": 4}  # DeepSeek-V2 has no default
    config = config_of(name, **dict.fromkeys(absent, ...), **used)
    theirs = AutoConfig.for_model(name.replace("-", "_"), num_hidden_layers=3, **used)
    latent, experts = config.latent, config.experts
    assert (latent.rank, latent.q_rank, latent.k_size, latent.rope_size, latent.v_size) == (
        *(theirs.kv_lora_rank, theirs.q_lora_rank, theirs.qk_nope_head_dim),
        *(theirs.qk_rope_head_dim, theirs.v_head_dim),
    )
    assert latent.interleaved is getattr(theirs, "rope_interleave", True)
    assert (config.max_positions, config.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert (experts.n, experts.intermediate_size, experts.scale, experts.renormalise) == (
        *(theirs.n_routed_experts, theirs.moe_intermediate_size),
        *(theirs.routed_scaling_factor, theirs.norm_topk_prob),
    )
    assert (experts.groups, experts.used_groups) == (theirs.n_group or 1, theirs.topk_group or 1)
    assert experts.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    dense = {"glm4-moe-lite": 1}.get(name, getattr(theirs, "first_k_dense_replace", None))
    assert experts.dense_layers == frozenset(range(dense))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v3", {"kv_lora_rank": 568}, "'kv_lora_rank' is 568, 'qk_rope_head_dim' 16; .* together at most 576"),
        ("deepseek-v3", {"kv_lora_rank": 44}, "'kv_lora_rank' is 44, .* must be multiples of 8"),
        ("deepseek-v3", {"q_lora_rank": None}, "'attention_bias' is set and 'q_lora_rank' is null"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'; only 'sigmoid' is supported"),
        ("deepseek-v3", {"topk_method": "greedy"}, "'topk_method' is 'greedy'; only 'noaux_tc' is supported"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "'moe_layer_freq' is 2; only 1 is supported"),
        ("deepseek-v3", {"n_group": 5}, "2 of 5 groups of 12 experts cannot be chosen"),
        ("deepseek-v3", {"n_group": 12}, "2 of 12 groups of 12 experts cannot be chosen"),
        ("deepseek-v3", {"topk_group": 1}, "4 experts for each token of the 3 in 1 groups"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "'topk_method' is 'noaux_tc', not 'greedy' or"),
        ("deepseek-v2", {"norm_topk_prob": True}, "'norm_topk_prob' is set, which is not supported"),
        ("deepseek-v2", {"mlp_bias": True}, "'mlp_bias' is set, which is not supported"),
        ("deepseek-v2", {"n_group": None}, "config.json lacks 'n_group'"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense", "moe", "moe"]}, "layer type 'moe' is not one of dense, sparse"),
        ("glm4-moe-lite", {"mlp_layer_types": None, "first_k_dense_replace": 2}, "'first_k_dense_replace' is 2"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_named(name, changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(name, **changes)


# -- GGUF -------------------------------------------------------------------------------------------------------------


@needs_llama_cpp
@pytest.mark.parametrize("legacy", [False, True])
async def test_logits_are_those_of_llama_cpp(legacy, tmp_path):
    path, tokens, model = tmp_path / "m.gguf", text(50), make_model("glm4-moe-lite")
    write_gguf(path, model, "F32", tokenizer_fields(make_checkpoint("glm4-moe-lite"), "glm4"), legacy=legacy)
    got, want = await last_logits(path, tokens, tmp_path), logits_of_llama_cpp(path, tokens)
    assert (got - want).abs().max() < 3e-3 * want.std()
    assert got.argmax(1).tolist() == want.argmax(1).tolist()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("deepseek-v2-lite", "F32"),
        ("glm4-moe-lite", "Q8_0"),
        ("glm4-moe-lite", {"attn_k_b": "F16", "attn_v_b": "Q4_1", "": "Q8_0"}),
    ],
    ids=str,
)
async def test_logits_are_those_of_the_model_in_the_file(name, kind, tmp_path):
    path, tokens, model = tmp_path / "m.gguf", text(50), make_model(name)
    write_gguf(path, model, kind, tokenizer_fields(make_checkpoint(name), "glm4"))
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0, -9:]
    budget = EXACT if kind == "F32" else 5e-3  # products with quantised matrices have activations in 15 bits
    assert (await last_logits(path, tokens, tmp_path) - want).abs().max() < budget * want.std()


#: The keys of a file with latent attention.
KEYS = {
    "attention.head_count_kv": 1,
    "attention.key_length": 80,
    "attention.value_length": 64,
    "attention.kv_lora_rank": 64,
    "rope.dimension_count": 16,
    "expert_feed_forward_length": 48,
    "expert_count": 8,
    "expert_used_count": 2,
}


def metadata(path: Path, **fields: int | float | bool | str) -> ModelConfig:
    """The configuration of a file with other values of some keys."""
    return config_of_keys(path, "deepseek2", KEYS | fields)


def test_what_llama_cpp_takes_for_granted(tmp_path):
    config = metadata(tmp_path / "m.gguf", **{"attention.key_length_mla": 40, "attention.value_length_mla": 24})
    latent, experts = config.latent, config.experts
    assert (latent.rank, latent.rope_size, latent.k_size, latent.v_size, latent.q_rank) == (64, 16, 24, 24, 0)
    assert (latent.norm_eps, config.softmax_scale) == (pytest.approx(1e-5), 40**-0.5)
    assert (experts.sigmoid, experts.groups, experts.scale, experts.dense_layers) == (False, 1, 1.0, frozenset())
    groups = {"expert_group_count": 4, "expert_group_used_count": 2}
    experts = metadata(tmp_path / "m.gguf", **groups).experts
    assert (experts.groups, experts.used_groups, experts.group_best) == (4, 2, 1)
    experts = metadata(tmp_path / "m.gguf", **groups, expert_gating_func=2, expert_weights_norm=True).experts
    assert (experts.sigmoid, experts.groups, experts.group_best, experts.renormalise) == (True, 4, 2, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_gating_func": 3}, r"m\.gguf: 'deepseek2\.expert_gating_func' is 3, not 1 or 2"),
        ({"expert_weights_norm": True}, r"'deepseek2\.expert_weights_norm' is set, which is not supported"),
        ({"attention.kv_lora_rank": 1024}, r"'deepseek2\.attention\.kv_lora_rank' is 1024, .* at most 576"),
        ({"attention.temperature_scale": 0.1}, r"the key 'deepseek2\.attention\.temperature_scale' is not understood"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            r"'deepseek2\.rope\.scaling\.yarn_log_multiplier' is absent, and RoPE is scaled by 'yarn'",
        ),
    ],
    ids=str,
)
def test_keys_of_a_file_that_are_not_understood_are_named(fields, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        metadata(tmp_path / "m.gguf", **fields)


def test_a_file_without_an_embedding_holds_no_language_model(tmp_path):
    with pytest.raises(CheckpointError, match=r"m\.gguf holds no language model: it lacks 'token_embd\.weight'"):
        config_of_keys(tmp_path / "m.gguf", "deepseek2", KEYS, {"token_embd.weight": ...})
