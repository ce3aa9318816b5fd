"""Ministral 3: what the configurations of its checkpoints say of the scale of queries."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from models.checkpoints import make_checkpoint
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from fastdecode.spart import CheckpointError, ModelConfig
from fastdecode.spart.checkpoints.config import Rope
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.decoder.rope import RotaryEmbedding

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}


def config_of(**changes: Any) -> ModelConfig:
    """The configuration of a checkpoint with other values of some keys. ...: without the key."""
    raw = json.loads((make_checkpoint("ministral3") / "config.json").read_text()) | changes
    return make_config({key: value for key, value in raw.items() if value is not ...})


def test_without_a_table_rope_is_that_of_the_configurations_class():
    rope = config_of(rope_parameters=...).rope
    assert rope == Rope(1e6, "yarn", factor=16.0, original_max_positions=16384, query_beta=0.1)


@pytest.mark.parametrize("beta", [{}, {"llama_4_scaling_beta": None}, {"llama_4_scaling_beta": 0}], ids=str)
def test_without_beta_queries_are_not_scaled(beta):
    rope = config_of(rope_parameters=YARN | beta).rope
    assert rope.query_beta == 0
    angles = RotaryEmbedding(rope, 24, torch.device("cpu"), torch.float32).angles(torch.tensor([500]))
    assert angles.q_cos is angles.cos and angles.q_sin is angles.sin


def test_queries_are_scaled_as_in_transformers():
    positions = torch.tensor([0, 63, 64, 127, 128, 16383, 16384, 70000])
    rope = config_of(rope_parameters=YARN | {"llama_4_scaling_beta": 0.3}).rope
    angles = RotaryEmbedding(rope, 24, torch.device("cpu"), torch.float32).angles(positions)
    scale = get_llama_4_attn_scale(positions[None], 0.3, 64)[0, 0, :, :, None]
    torch.testing.assert_close(angles.q_cos, angles.cos * scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(angles.q_sin, angles.sin * scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}], ids=str)
def test_queries_are_scaled_without_yarn_too(kind):
    rope = config_of(rope_parameters=YARN | kind | {"llama_4_scaling_beta": 0.3}).rope
    assert (rope.kind, rope.query_beta, rope.original_max_positions) == (kind["rope_type"], 0.3, 64)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (YARN | {"llama_4_scaling_beta": ""}, "'llama_4_scaling_beta' is '', not a number"),
        (YARN | {"llama_4_scaling_beta": -0.1}, "'llama_4_scaling_beta' is -0.1, not a positive number"),
        (YARN | {"llama_4_scaling_beta": "0.1"}, "'llama_4_scaling_beta' is '0.1', not a number"),
        ({"rope_type": "default", "llama_4_scaling_beta": 0.1}, "'llama_4_scaling_beta' is 0.1, and RoPE has no"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor of 0.5 is not supported here"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_named(table, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(rope_parameters=table)
