"""SmolLM3: which of its layers have RoPE and windows, and which keys are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from models.checkpoints import make_checkpoint

from fastdecode.spart import CheckpointError, ModelConfig
from fastdecode.spart.checkpoints.config import Rope
from fastdecode.spart.checkpoints.families import make_config


def config_of(**changes: Any) -> ModelConfig:
    """The configuration of a checkpoint with three layers and other values of some keys. ...: without the key."""
    raw = json.loads((make_checkpoint("smollm3") / "config.json").read_text()) | changes
    return make_config({key: value for key, value in raw.items() if value is not ...})


@pytest.mark.parametrize(
    ("changes", "without_rope"),
    [
        ({"no_rope_layers": None}, {1}),  # the checkpoint has an interval of 2
        ({"no_rope_layers": None, "no_rope_layer_interval": ...}, set()),  # which is 4
        ({"no_rope_layers": None, "no_rope_layer_interval": 1}, {0, 1, 2}),
        ({"no_rope_layers": [0, 1, 0, 0]}, {0, 2}),
    ],
    ids=str,
)
def test_layers_without_rope(changes, without_rope):
    config = config_of(**changes)
    assert config.second_rope_layers == without_rope
    assert config.second_rope == (Rope(kind="none") if without_rope else None)


def test_windows_are_those_of_layers_without_rope_unless_types_say_otherwise():
    window = {"use_sliding_window": True, "sliding_window": 16}
    assert config_of(**window, layer_types=...).windows == (0, 16, 0)
    assert config_of(**window, layer_types=["sliding_attention"] * 3).windows == (16, 16, 16)
    assert config_of(sliding_window=16, layer_types=...).windows == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_rope_layers": [1, 0]}, r"'no_rope_layers' is \[1, 0\], not 0 or 1 for each of 3 layers"),
        ({"no_rope_layers": [1, 0, 2]}, "'no_rope_layers' is"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "'no_rope_layer_interval' is 0, not a positive"),
        ({"layer_types": ["sliding_attention"] * 3}, "'layer_types' has 'sliding_attention', and no key sets a window"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention' is not one of"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(**changes)
