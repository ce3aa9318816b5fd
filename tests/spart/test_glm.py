"""GLM-4-MoE: its router, what the configurations of its checkpoints mean, and its GGUF files against llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.checkpoints import make_checkpoint, make_model, reference
from models.gguf_keys import config_of_keys
from models.gguf_made import tokenizer_fields, write_gguf
from models.llama_cpp_checks import last_logits, logits_of_llama_cpp, needs_llama_cpp
from models.spart_steps import text

from fastdecode.spart import CheckpointError, ModelConfig, load_model
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.checkpoints.quantisation import parse_quantisation

VARIANTS = ("glm4-moe", "glm4-moe-qk-norm")
#: What the published config.json of GLM-4.6 in FP8 says, without what is read for every family alike.
GLM_4_6 = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "dtype": "bfloat16",
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    },
}


def config_of(**changes: Any) -> ModelConfig:
    """The configuration of a variant's checkpoint with other values of some keys. ...: without the key."""
    raw = json.loads((make_checkpoint("glm4-moe") / "config.json").read_text()) | changes
    return make_config({key: value for key, value in raw.items() if value is not ...})


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_router_computes_in_fp32_and_is_corrected_only_to_choose(name, dtype):
    ours, theirs = (
        load_model(make_checkpoint(name), dtype=dtype).weights.blocks[-1].mlp,
        reference(make_checkpoint(name)),
    )
    gate = theirs.model.layers[-1].mlp.gate
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        shares, chosen = ours.choose(x)
        _, wanted, experts = gate(x)
        gate.e_score_correction_bias.zero_()
        uncorrected = gate(x)[2].sort(dim=1).values
    order, theirs_order = chosen.argsort(dim=1), experts.argsort(dim=1)
    assert torch.equal(chosen.gather(1, order), experts.gather(1, theirs_order))
    torch.testing.assert_close(shares.gather(1, order), wanted.gather(1, theirs_order))
    assert (chosen.gather(1, order) != uncorrected).any(dim=1).float().mean() > 0.2


def test_sigmoids_that_are_all_zero_leave_no_nan():
    mixture = load_model(make_checkpoint("glm4-moe"), dtype="fp32").weights.blocks[-1].mlp
    with torch.inference_mode():
        mixture._router.abs_()
        assert torch.equal(mixture.choose(torch.full((1, 64), -1e4))[0], torch.zeros(1, 3))


def test_a_published_configuration():
    config = make_config(GLM_4_6)
    assert (config.n_layers, config.head_size, config.rope.theta, config.rope.fraction) == (92, 128, 1e6, 0.5)
    assert (config.qk_norm, config.qkv_bias, config.o_bias, config.norm_eps) == (True, True, False, 1e-5)
    experts = config.experts
    assert (experts.n, experts.used, experts.intermediate_size, experts.shared_size) == (160, 8, 1536, 1536)
    assert (experts.scale, experts.renormalise, experts.dense_layers) == (2.5, True, frozenset({0, 1, 2}))
    assert config.quantisation == parse_quantisation(GLM_4_6["quantization_config"])


def test_keys_that_are_absent_have_the_defaults_of_the_class():
    absent = (
        *("n_group", "topk_group", "n_shared_experts", "norm_topk_prob", "first_k_dense_replace", "attention_bias"),
        *("use_qk_norm", "routed_scaling_factor", "n_routed_experts", "moe_intermediate_size", "num_experts_per_tok"),
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = config_of(**dict.fromkeys(absent, ...), head_dim=..., rope_parameters=rope)
    experts = config.experts
    assert (experts.n, experts.used, experts.intermediate_size, experts.shared_size) == (128, 8, 1408, 1408)
    assert (experts.scale, experts.renormalise, experts.dense_layers) == (1.0, True, frozenset({0}))
    assert (config.head_size, config.qkv_bias, config.qk_norm, config.rope.fraction) == (16, False, False, 0.5)
    assert config_of(first_k_dense_replace=9).experts.dense_layers == frozenset({0, 1, 2})
    assert config_of(n_shared_experts=0).experts.shared_size == 0


def test_the_defaults_of_a_text_part_are_those_of_its_own_class():
    text = {key: value for key, value in GLM_4_6.items() if key not in ("max_position_embeddings", "attention_bias")}
    whole = {"architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe"}
    config = make_config(whole | {"text_config": text | {"model_type": "glm4v_moe_text"}})
    assert (config.max_positions, config.qkv_bias) == (65536, True)
    assert config_of(max_position_embeddings=...).max_positions == 131072


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 4}, "1 of 4 groups of 6 experts cannot be chosen"),
        ({"routed_scaling_factor": 0}, "'routed_scaling_factor' is 0.0, not a positive"),
        ({"first_k_dense_replace": -1}, "'first_k_dense_replace' is -1, not a whole number"),
        ({"num_experts_per_tok": 7}, "7 experts for each token of 6"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(**changes)


# -- GGUF -------------------------------------------------------------------------------------------------------------


@needs_llama_cpp
@pytest.mark.parametrize("name", VARIANTS)
async def test_logits_are_those_of_llama_cpp(name, tmp_path):
    path, tokens = tmp_path / "m.gguf", text(50)
    write_gguf(path, make_model(name), "F32", tokenizer_fields(make_checkpoint(name), "glm4"))
    got, want = await last_logits(path, tokens, tmp_path), logits_of_llama_cpp(path, tokens)
    assert (got - want).abs().max() < 3e-3 * want.std()
    assert got.argmax(1).tolist() == want.argmax(1).tolist()


def metadata(path: Path, factors: int = 0, **fields: int | float | bool) -> ModelConfig:
    """The configuration of a file with these keys beside the sizes. `factors` is the number of RoPE's divisors, 0 for
    none."""
    keys = {"attention.head_count_kv": 2, "attention.key_length": 32, "expert_count": 4, "expert_used_count": 2}
    tensors = {"rope_freqs.weight": np.full(factors, 2, np.float32)} if factors else None
    return config_of_keys(path, "glm4moe", keys | fields, tensors)


def test_what_llama_cpp_takes_for_granted(tmp_path):
    config = metadata(tmp_path / "m.gguf")
    experts = config.experts
    assert (experts.renormalise, experts.scale, experts.dense_layers) == (False, 1.0, frozenset())
    assert (config.rope.fraction, config.qk_norm, config.n_layers) == (1.0, False, 4)
    fields = {"expert_weights_norm": True, "expert_weights_scale": 2.5, "leading_dense_block_count": 1}
    fields |= {"rope.dimension_count": 16, "expert_gating_func": 0, "expert_shared_count": 2, "nextn_predict_layers": 1}
    config = metadata(tmp_path / "m.gguf", **fields, **{"expert_feed_forward_length": 48})
    experts = config.experts
    assert (experts.renormalise, experts.scale, experts.dense_layers) == (True, 2.5, frozenset({0}))
    assert (config.rope.fraction, config.n_layers, experts.shared_size) == (0.5, 3, 96)


def test_divisors_of_frequencies_leave_the_rest_of_a_head_as_it_is(tmp_path):
    rope = metadata(tmp_path / "m.gguf", 8, **{"rope.dimension_count": 16}).rope
    assert (rope.kind, rope.fraction, rope.factors) == ("factors", 0.5, (2.0,) * 8)
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' does not fit the model's RoPE"):
        metadata(tmp_path / "m.gguf", 16, **{"rope.dimension_count": 16})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_gating_func": 1}, r"m\.gguf: 'glm4moe\.expert_gating_func' is 1, not 2"),
        ({"nextn_predict_layers": 9}, r"'glm4moe\.block_count' is -5, not a positive whole number"),
        ({"rope.dimension_count": 10**6}, "a partial_rotary_factor of 31250 is not supported"),
        ({"expert_unheard": 1}, r"the key 'glm4moe\.expert_unheard' is not understood"),
    ],
    ids=str,
)
def test_keys_of_a_file_that_are_not_understood_are_named(fields, message, tmp_path):
    with pytest.raises(CheckpointError, match=message) as raised:
        metadata(tmp_path / "m.gguf", **fields)
    assert str(raised.value).count("m.gguf") == 1
