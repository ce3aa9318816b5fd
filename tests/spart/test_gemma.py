"""Gemma: what the configurations of its checkpoints mean, and which keys are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from models.checkpoints import make_checkpoint
from models.spart_steps import text

from fastdecode.spart import CheckpointError, ModelConfig, load_model
from fastdecode.spart.checkpoints.config import Rope
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.decoder.layer_pass import DecoderLayers
from fastdecode.spart.int4.balance import _second_moments

#: The keys that the published config.json of Gemma 3 4B has.
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}


def config_of(variant: str, **changes: Any) -> ModelConfig:
    """The configuration of a variant's checkpoint with other values of some keys. ...: without the key."""
    raw = json.loads((make_checkpoint(variant) / "config.json").read_text()) | changes
    return make_config({key: value for key, value in raw.items() if value is not ...})


def test_what_a_published_configuration_lacks_are_the_defaults_of_its_class():
    config = make_config(GEMMA3_4B)
    assert config.architecture == "Gemma3ForConditionalGeneration"
    assert (config.n_q_heads, config.n_kv_heads, config.head_size, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.bos_token_id, config.eos_token_ids, config.tied) == (2, (1, 106), True)
    assert config.windows == tuple(0 if i % 6 == 5 else 1024 for i in range(34))
    assert config.rope == Rope(theta=1e6, kind="linear", factor=8.0)
    assert config.second_rope == Rope(theta=1e4)
    assert config.softmax_scale == 1 / 16


def test_without_types_of_layers_the_pattern_says_which_see_all_tokens():
    assert config_of("gemma2", layer_types=...).windows == (16, 0, 16)
    assert config_of("gemma3", layer_types=...).windows == (16, 16, 16)
    assert config_of("gemma3", layer_types=..., sliding_window_pattern=3).windows == (16, 16, 0)
    assert config_of("gemma3", layer_types=["full_attention"] * 3, sliding_window=None).windows == (0, 0, 0)


def test_caps_that_are_absent_have_the_defaults_of_the_family():
    config = config_of("gemma2", attn_logit_softcapping=..., final_logit_softcapping=...)
    assert (config.options.softcaps, config.logit_softcap) == ((50.0,) * 3, 30.0)
    config = config_of("gemma3", attn_logit_softcapping=..., final_logit_softcapping=...)
    assert (config.options.softcaps, config.logit_softcap) == ((), 0.0)


def test_the_activation_of_gemma_1_has_old_names():
    for changes in ({"hidden_act": "gelu"}, {"hidden_act": ...}, {"hidden_activation": None}):
        assert config_of("gemma", **changes).activation == "gelu_pytorch_tanh"


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        *(
            (variant, {"use_bidirectional_attention": True}, "bidirectional")
            for variant in ("gemma", "gemma2", "gemma3")
        ),
        ("gemma", {"hidden_activation": "silu"}, "'hidden_act' is 'gelu_pytorch_tanh', 'hidden_activation' 'silu'"),
        ("gemma2", {"sliding_window": None}, "'sliding_window' is null"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' is 0.0, not a positive"),
        ("gemma2", {"final_logit_softcapping": -1}, "'final_logit_softcapping' is -1.0, not a positive"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0, which is not supported"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention' is not one of"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "'rope_parameters' has 'rope_type'"),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "longrope", "short_factor": [1] * 16, "long_factor": [2] * 16}
                }
            },
            "LongRoPE there",
        ),
    ],
    ids=str,
)
def test_what_is_not_understood_is_named(variant, changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_of(variant, **changes)


def test_balanced_heads_are_turned_by_the_rope_of_their_layer():
    """A token of a text counts at a later position, too. The first layer has a window, the second one none."""
    model, tokens = load_model(make_checkpoint("gemma3"), dtype="fp32"), torch.tensor(text(30))
    assert [layer.second_rope for layer in model.weights.layers] == [True, False, True]
    later = torch.arange(30) * 11

    def keys(rope: Rope | None, second_rope: Rope | None) -> list[torch.Tensor]:
        layers = DecoderLayers(model)
        model.config, kept = replace(model.config, rope=rope, second_rope=second_rope), model.config
        with torch.inference_mode():
            moments = [of_keys for _, of_keys, _ in _second_moments(layers, tokens, later).values()]
        model.config = kept
        return moments

    rope, second = model.config.rope, model.config.second_rope
    found, by_rope, by_second = keys(rope, second), keys(rope, rope), keys(second, second)
    assert torch.equal(found[0], by_second[0]) and not torch.equal(found[0], by_rope[0])
    assert torch.equal(found[1], by_rope[1]) and not torch.equal(found[1], by_second[1])
