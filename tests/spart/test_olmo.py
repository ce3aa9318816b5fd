"""OLMo 2 and 3: which layers have windows and a scaled RoPE, in config.json and in GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import make_checkpoint, make_model
from models.gguf_made import write_gguf

from fastdecode.spart import CheckpointError, ModelConfig, read_config
from fastdecode.spart.checkpoints.config import Rope
from fastdecode.spart.checkpoints.families import make_config

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}


def config_of(**changes: Any) -> ModelConfig:
    """The configuration of a checkpoint of OLMo 3 with other values of some keys. ...: without the key."""
    raw = json.loads((make_checkpoint("olmo3") / "config.json").read_text()) | changes
    return make_config({key: value for key, value in raw.items() if value is not ...})


def test_keys_that_are_absent_have_the_defaults_of_the_class():
    absent = ("layer_types", "sliding_window", "rope_parameters", "num_key_value_heads", "rms_norm_eps")
    config = config_of(**dict.fromkeys(absent, ...), num_hidden_layers=5)
    assert config.windows == (4096, 4096, 4096, 0, 4096)
    assert (config.second_rope_layers, config.n_kv_heads, config.norm_eps) == (frozenset({0, 1, 2, 4}), 4, 1e-5)
    assert config.rope == config.second_rope == Rope(500000.0)


def test_the_scaling_of_transformers_4_is_that_of_layers_without_a_window():
    config = config_of(rope_parameters=..., rope_theta=700.0, rope_scaling=YARN)
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("yarn", 8.0, 700.0)
    assert config.second_rope == Rope(700.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": None}, "'sliding_window' is null, and layers have a sliding window"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention' is not one of"),
        ({"rope_parameters": YARN}, "'rope_parameters' has 'factor', which is no type of layers"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(**changes)


@pytest.mark.parametrize(
    ("fields", "windows", "theta"),
    [
        ({}, (0, 0, 0), None),
        ({"attention.sliding_window": 8}, (8, 8, 8), 10000.0),  # every fourth layer would have none
        ({"attention.sliding_window": 8, "attention.sliding_window_pattern": 2}, (8, 0, 8), 10000.0),
        ({"attention.sliding_window": 8, "rope.freq_base_swa": 600.0}, (8, 8, 8), 600.0),
    ],
    ids=str,
)
def test_windows_of_a_file(fields, windows, theta, tmp_path: Path):
    def more(writer):
        for key, value in fields.items():
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"olmo2.{key}", value)

    write_gguf(tmp_path / "m.gguf", make_model("olmo2"), "F32", more=more)
    config = read_config(tmp_path / "m.gguf")
    assert (config.windows, config.second_rope and config.second_rope.theta) == (windows, theta)
    assert config.rope == Rope()


def test_the_attention_factor_of_a_file_is_that_of_the_configuration(tmp_path: Path):
    """llama.cpp's converter writes config.json's number, which has YaRN's factor in it."""
    write_gguf(
        tmp_path / "m.gguf", make_model("olmo3"), "F32", more=lambda writer: writer.add_rope_scaling_attn_factors(1.25)
    )
    config = read_config(tmp_path / "m.gguf")
    assert (config.rope.kind, config.rope.attention_factor) == ("yarn", 1.25)
    assert config.second_rope == Rope(theta=500000.0)
