"""MiniMax-M2: what its configuration means, and which keys are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from models.checkpoints import make_checkpoint

from fastdecode.spart import CheckpointError, ModelConfig
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.checkpoints.quantisation import parse_quantisation

#: A configuration in the form of MiniMax-M2's, with keys that its own code reads and MiniMaxM2Config lacks.
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "attn_type_list": [1] * 62,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}


def config_of(**changes: Any) -> ModelConfig:
    """The configuration of the checkpoint with other values of some keys. ...: without the key."""
    raw = json.loads((make_checkpoint("minimax-m2") / "config.json").read_text()) | changes
    return make_config({key: value for key, value in raw.items() if value is not ...})


def test_a_configuration_with_the_keys_of_its_own_code():
    config = make_config(MINIMAX_M2)
    assert (config.n_layers, config.head_size, config.n_kv_heads) == (62, 128, 8)
    assert (config.rope.theta, config.rope.width(128), config.whole_qk_norm) == (5e6, 64, True)
    experts = config.experts
    assert (experts.n, experts.used, experts.intermediate_size, experts.shared_size) == (256, 8, 1536, 0)
    assert (experts.sigmoid, experts.renormalise, experts.scale) == (True, True, 1.0)
    assert config.quantisation == parse_quantisation(MINIMAX_M2["quantization_config"])


def test_keys_that_are_absent_have_the_defaults_of_the_class():
    absent = ("num_local_experts", "num_experts_per_tok", "head_dim", "intermediate_size", "rope_parameters")
    config = config_of(**dict.fromkeys(absent, ...), num_key_value_heads=..., num_attention_heads=48)
    experts = config.experts
    assert (experts.n, experts.used, experts.intermediate_size) == (256, 8, 1536)
    assert (config.head_size, config.n_kv_heads, config.rope.theta, config.rope.fraction) == (128, 8, 5e6, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "'scoring_func' is 'softmax'; only 'sigmoid' is supported"),
        ({"use_qk_norm": False}, "'use_qk_norm' is False; only True is supported"),
        ({"qk_norm_type": "per_head"}, "'qk_norm_type' is 'per_head'; only 'per_layer' is supported"),
        ({"shared_intermediate_size": 8}, "'shared_intermediate_size' is 8; only 0 is supported"),
        ({"sliding_window": 8}, "'sliding_window' is 8; only None is supported"),
        ({"attn_type_list": [1, 0, 1]}, r"'attn_type_list' is \[1, 0, 1\]; only layers of type 1 are supported"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(**changes)
