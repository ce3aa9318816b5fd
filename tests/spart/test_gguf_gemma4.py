"""GGUF files of Gemma 4: what their keys mean, and which are refused by name.

The logits are compared with those of transformers and llama.cpp in test_gguf_implied.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from models.checkpoints import VARIANTS, make_model
from models.gguf_keys import config_of_keys
from models.gguf_made import write_gguf

from fastdecode.spart import CheckpointError, ModelConfig, load_model
from fastdecode.spart.checkpoints.config import Rope


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.startswith("gemma4")])
def test_no_unused_tensor_is_reported(name, tmp_path, caplog):
    """K and V of layers that share those of others may be in a file."""

    def unused(writer: gguf.GGUFWriter) -> None:
        for module in ("attn_k", "attn_v", "attn_k_norm") if name == "gemma4-e" else ():
            writer.add_tensor(f"blk.5.{module}.weight", np.zeros((32, 64), np.float32))

    write_gguf(tmp_path / "m.gguf", make_model(name), "F32", more=unused)
    load_model(tmp_path / "m.gguf")
    assert "not used" not in caplog.text


# ---- metadata alone ----

KEYS: dict[str, Any] = {
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count_kv": [2, 2, 2, 1],
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "attention.shared_kv_layers": 0,
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": [True, True, True, False],
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32,
}
TURNED = [1.0] * 8 + [1e30] * 24


def metadata(
    path: Path, /, factors: list[float] | None = TURNED, v: tuple[int, ...] = (), **fields: Any
) -> ModelConfig:
    """The configuration of a file with other values of some keys. ...: without the key. `factors`: RoPE's divisors.
    `v`: layers that see all tokens and have V of their own."""
    tensors = {f"blk.{layer}.attn_v.weight": np.zeros((64, 64), np.float32) for layer in v}
    if factors is not None:
        tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    return config_of_keys(path, "gemma4", KEYS | fields, tensors)


def test_what_the_keys_mean(tmp_path):
    config = metadata(tmp_path / "m.gguf")
    assert config.rope == Rope(kind="proportional", fraction=0.25) and config.second_rope == Rope()
    assert (config.windows, config.norm_offset, config.logit_softcap) == ((16, 16, 16, 0), 0.0, 0.0)
    assert [tuple(config.heads_of(i)[:3]) for i in range(4)] == [(4, 2, 32)] * 3 + [(4, 1, 64)]
    fields = {"rope.freq_base": 1e6, "rope.freq_base_swa": 700.0, "final_logit_softcapping": 30.0}
    config = metadata(tmp_path / "m.gguf", v=(3,), **fields, **{"attention.head_count_kv": 2})
    assert (config.rope.theta, config.second_rope.theta, config.logit_softcap) == (1e6, 700.0, 30.0)
    assert [tuple(config.heads_of(i)[:3]) for i in range(4)] == [(4, 2, 32)] * 3 + [(4, 2, 64)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention.causal": False}, "the key 'gemma4.attention.causal' is not understood"),
        ({"rope.scaling.factor": 8.0}, "the key 'gemma4.rope.scaling.factor' is not understood"),
        ({"embedding_length_per_layer_input": ...}, "lacks the key 'gemma4.embedding_length_per_layer_input'"),
        ({"attention.sliding_window": "a"}, "'gemma4.attention.sliding_window' is 'a', not a positive whole number"),
        ({"attention.value_length": 32}, "'gemma4.attention.value_length' is 32, 'gemma4.attention.key_length' 64"),
        (
            {"rope.dimension_count_swa": 16},
            "'gemma4.rope.dimension_count_swa' is 16, 'gemma4.attention.key_length_swa'",
        ),
        ({"rope.freq_base_swa": -1.0}, "'gemma4.rope.freq_base_swa' is -1.0, not a positive number"),
        ({"attention.head_count_kv": "a"}, "'gemma4.attention.head_count_kv' is 'a', not a positive whole number"),
        (
            {"attention.head_count_kv": [2, 2, 2, 0]},
            "'gemma4.attention.head_count_kv' is 0, not a positive whole number",
        ),
        ({"attention.head_count_kv": [2, 2]}, "'gemma4.attention.head_count_kv' has 2 numbers for 4 layers"),
        ({"feed_forward_length": [96, 96, 96, 192]}, "'gemma4.feed_forward_length' has 96, 192 for layers of one type"),
        (
            {"feed_forward_length": [96, 96, 96, 97], "attention.shared_kv_layers": 1},
            "'gemma4.feed_forward_length' is 96, and 97 in layers that share K and V",
        ),
        ({"attention.shared_kv_layers": 5}, "'gemma4.attention.shared_kv_layers' is 5 of 4 layers"),
        ({"attention.sliding_window_pattern": 4}, "'gemma4.attention.sliding_window_pattern' is not a list of 4 truth"),
        ({"attention.sliding_window_pattern": [True] * 4}, "'gemma4.attention.sliding_window_pattern' gives the last"),
        ({"block_count": 10**6}, "a model cannot have 1000000 layers"),
        ({"factors": None}, "lacks the tensor 'rope_freqs.weight'"),
        ({"factors": [1.0] * 31}, "'rope_freqs.weight' does not fit the model's RoPE"),
        ({"factors": [1e30] * 8 + [1.0] * 24}, "'rope_freqs.weight' does not fit the model's RoPE"),
        ({"factors": [1.0] * 8 + [2.0] * 24}, "'rope_freqs.weight' does not fit the model's RoPE"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_named(fields, message, tmp_path):
    with pytest.raises(CheckpointError) as raised:
        metadata(tmp_path / "m.gguf", **fields)
    assert message in str(raised.value) and str(raised.value).count("m.gguf") == 1
