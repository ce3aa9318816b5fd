"""ERNIE 4.5: its router, which of its layers have experts, and which keys are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from models.checkpoints import make_checkpoint, reference

from fastdecode.spart import CheckpointError, ModelConfig, load_model
from fastdecode.spart.checkpoints.families import make_config


def config_of(name: str = "ernie4.5-moe", **changes: Any) -> ModelConfig:
    """The configuration of a checkpoint with three layers and other values of some keys. ...: without the key."""
    raw = json.loads((make_checkpoint(name) / "config.json").read_text()) | changes
    return make_config({key: value for key, value in raw.items() if value is not ...})


@pytest.mark.parametrize("name", ["ernie4.5-moe", "ernie4.5-moe-layers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_router_is_that_of_transformers(name, dtype):
    """The second one's scores are divided by no less than 0.9."""
    ours, theirs = load_model(make_checkpoint(name), dtype=dtype), reference(make_checkpoint(name))
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        shares, chosen = ours.weights.blocks[1].mlp.choose(x)
        _, wanted, experts = theirs.model.layers[1].mlp.gate(x)
    order, theirs_order = chosen.argsort(dim=1), experts.argsort(dim=1)
    assert torch.equal(chosen.gather(1, order), experts.gather(1, theirs_order))
    torch.testing.assert_close(shares.gather(1, order).to(dtype), wanted.gather(1, theirs_order))


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, {0}),
        ({"moe_layer_start_index": ..., "moe_layer_end_index": ..., "moe_layer_interval": ...}, {0}),
        ({"moe_layer_start_index": 0}, set()),
        ({"moe_layer_end_index": 1}, {0, 2}),
        ({"moe_layer_interval": 2}, {0, 2}),
    ],
    ids=str,
)
def test_layers_without_experts(changes, dense):
    assert config_of(**changes).experts.dense_layers == dense


def test_keys_that_are_absent_have_the_defaults_of_the_class():
    absent = ("moe_k", "moe_num_experts", "moe_intermediate_size", "moe_num_shared_experts", "moe_norm_min")
    common = ("rms_norm_eps", "tie_word_embeddings", "num_key_value_heads", "rope_parameters")
    config = config_of(**dict.fromkeys((*absent, *common), ...))
    experts = config.experts
    assert (experts.n, experts.used, experts.intermediate_size, experts.shared_size) == (64, 6, 1536, 3072)
    assert (experts.least_sum, config.n_kv_heads, config.head_size) == (1e-12, 4, 16)
    assert (config.norm_eps, config.tied, config.rope.theta) == (1e-5, True, 500000.0)
    config = config_of("ernie4.5", **dict.fromkeys((*common, "head_dim", "use_bias"), ...), max_position_embeddings=...)
    assert (config.n_kv_heads, config.head_size, config.qkv_bias, config.max_positions) == (2, 128, False, 131072)
    config = config_of("ernie4.5", num_key_value_heads=None, head_dim=None)
    assert (config.n_kv_heads, config.head_size) == (4, 16)


def test_the_names_that_the_class_gives_its_keys_too_are_read():
    experts = config_of(moe_num_experts=..., num_experts=5, moe_k=..., num_experts_per_tok=2).experts
    assert (experts.n, experts.used) == (5, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bias": True}, "'use_bias' is set, which is not supported for mixtures"),
        ({"moe_norm_min": 0}, "'moe_norm_min' is 0.0, not a positive"),
        ({"moe_layer_end_index": -2}, "'moe_layer_end_index' is -2, not a whole number"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(**changes)
