"""GGUF files of architectures that imply what no key says, against transformers and llama.cpp."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.checkpoints import VARIANTS, VOCAB_SIZE, make_checkpoint, make_model
from models.gguf_keys import config_of_keys
from models.gguf_made import tokenizer_fields, write_gguf
from models.llama_cpp_checks import last_logits, logits_of_llama_cpp, needs_llama_cpp
from models.spart_steps import EXACT, text

from fastdecode.spart import CheckpointError, ModelConfig, read_config
from fastdecode.spart.checkpoints.config import Rope
from fastdecode.spart.decoder import layer_pass
from fastdecode.spart.decoder.block_ops import ACTIVATIONS, BlockOps

#: What llama.cpp takes for granted: every sixth layer of Gemma 3 sees all tokens, every second one of Gemma 2, layers
#: with a window have 10,000 as the base of RoPE, and scores are divided by the root of the head size. Every fourth
#: layer of SmolLM3 has no RoPE. YaRN's mscale is 1 for Ministral 3. Logits of a Gemma 4 without a cap are capped at 30,
#: which is not the model that such a file was made of.
_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
IMPLIED: dict[str, dict[str, Any]] = {
    "gemma": {"attention_bias": False},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None, "rope": _ROPE},
    "gemma4": {},
    "gemma4-e": {
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 32,  # a block of a quantised type
        "final_logit_softcapping": 4.0,
    },
    "gemma4-moe": {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 4.0},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "ministral3": {},
    "seed-oss": {},
    "olmo2": {},
    "olmo3": {},
    "minimax-m2": {},
    "ernie4.5": {},
    "ernie4.5-moe": {},
}


@pytest.fixture(params=IMPLIED)
def model(request, monkeypatch):
    """A model of transformers."""
    family, config, storage = VARIANTS[request.param]
    monkeypatch.setitem(VARIANTS, request.param, (family, config | IMPLIED[request.param], storage))
    return make_model(request.param)


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "gemma4"])
def test_files_without_a_dtype_of_their_own_are_computed_in_bf16(name, tmp_path):
    """Activations of Gemma may exceed the range of fp16."""
    write_gguf(tmp_path / "m.gguf", make_model(name), "F16")
    assert read_config(tmp_path / "m.gguf").dtype == "bf16"


async def test_logits_are_those_of_transformers(model, tmp_path):
    write_gguf(tmp_path / "m.gguf", model, "F32")
    tokens = text(50)
    got = await last_logits(tmp_path / "m.gguf", tokens, tmp_path)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0, -9:]
    assert (got - want).abs().max() < EXACT * want.std()


@pytest.mark.parametrize("model", ["gemma4", "gemma4-e", "gemma4-moe"], indirect=True)
async def test_logits_of_quantised_files(model, tmp_path):
    kinds = {"ffn_down": "Q8_0", "attn_k": "Q4_1", "per_layer_token": "Q5_0", "": "Q4_0"}
    write_gguf(tmp_path / "m.gguf", model, kinds, fused=True)
    tokens = text(50)
    got = await last_logits(tmp_path / "m.gguf", tokens, tmp_path)
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0, -9:]
    assert (got - want).abs().max() < 5e-3 * want.std()  # activations have 15 bits


@needs_llama_cpp
async def test_logits_are_those_of_llama_cpp(model, tmp_path, monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "gelu_pytorch_tanh", _gelu_of_a_table)
    monkeypatch.setattr(layer_pass, "make_block_ops", lambda config, _, dtype: BlockOps(config, dtype))
    write_gguf(tmp_path / "m.gguf", model, "F32", tokenizer_fields(make_checkpoint("llama-gqa")))
    tokens = text(50)
    got = await last_logits(tmp_path / "m.gguf", tokens, tmp_path)
    want = logits_of_llama_cpp(tmp_path / "m.gguf", tokens)
    assert (got - want).abs().max() < 3e-3 * want.std()
    assert got.argmax(1).tolist() == want.argmax(1).tolist()


def _gelu_of_a_table(x: torch.Tensor) -> torch.Tensor:
    """GELU as llama.cpp has it on a CPU, a table by numbers in fp16. Without it the logits differ six times as much."""
    return F.gelu(x.half().float(), approximate="tanh").half().float()


# ---- metadata alone ----


def config_of(path: Path, architecture: str, n_layers: int, **fields: int | float | str) -> ModelConfig:
    """The configuration of a file with these keys beside the sizes."""
    sizes = {"block_count": n_layers, "attention.key_length": 32}
    return config_of_keys(path, architecture, sizes | fields)


def test_the_largest_models_scale_scores_by_the_hidden_size(tmp_path):
    """The published ones of 27 billion parameters, which llama.cpp knows by their number of layers."""
    for architecture, n_layers in (("gemma2", 46), ("gemma3", 62)):
        config = config_of(tmp_path / "m.gguf", architecture, n_layers)
        assert config.softmax_scale == pytest.approx((96 // 4) ** -0.5)
        assert config_of(tmp_path / "m.gguf", architecture, n_layers - 1).softmax_scale == pytest.approx(32**-0.5)


def test_what_keys_say_goes_before_what_is_implied(tmp_path):
    config = config_of(tmp_path / "m.gguf", "gemma2", 3)
    assert (config.windows, config.options.softcaps, config.logit_softcap) == ((4096, 0, 4096), (50.0,) * 3, 30.0)
    fields = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0, "attention.sliding_window": 8}
    config = config_of(tmp_path / "m.gguf", "gemma2", 3, **fields)
    assert (config.windows, config.options.softcaps, config.logit_softcap) == ((8, 0, 8), (5.0,) * 3, 6.0)
    config = config_of(tmp_path / "m.gguf", "gemma3", 3)
    assert (config.windows, config.rope) == ((0, 0, 0), Rope())  # llama.cpp takes no window from the architecture
    fields = {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2, "rope.freq_base_swa": 700.0}
    config = config_of(tmp_path / "m.gguf", "gemma3", 3, **fields, **{"rope.freq_base": 800.0})
    assert (config.windows, config.rope, config.second_rope) == ((8, 0, 8), Rope(800.0), Rope(700.0))
    assert config.norm_offset == 0 and config.embed_scale == pytest.approx(96**0.5)


def test_files_of_mistral_3_have_llama_cpps_defaults_and_those_of_ministral_3_a_scale_of_queries(tmp_path):
    config = config_of(tmp_path / "m.gguf", "mistral3", 3)
    assert (config.rope, config.n_kv_heads, config.head_size) == (Rope(), 4, 32)
    scale = {"attention.temperature_scale": 0.25}
    with pytest.raises(CheckpointError, match=r"'mistral3\.attention\.temperature_scale' is 0\.25, and RoPE has no"):
        config_of(tmp_path / "m.gguf", "mistral3", 3, **scale)
    yarn: dict[str, Any] = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn["rope.scaling.original_context_length"] = 128
    rope = config_of(tmp_path / "m.gguf", "mistral3", 3, **yarn).rope
    assert (rope.query_beta, rope.attention_factor) == (0.0, pytest.approx(0.1 * math.log(4) + 1))
    rope = config_of(
        tmp_path / "m.gguf", "mistral3", 3, **yarn, **scale, **{"rope.scaling.yarn_log_multiplier": 1.0}
    ).rope
    assert (rope.query_beta, rope.original_max_positions, rope.attention_factor) == (0.25, 128, 1.0)


def test_what_is_not_understood_is_named(tmp_path):
    for key in ("gemma3.attn_logit_softcapping", "gemma2.rope.freq_base_swa", "gemma.attention.sliding_window"):
        architecture, _, rest = key.partition(".")
        with pytest.raises(CheckpointError, match=re.escape(f"the key {key!r} is not understood")):
            config_of(tmp_path / "m.gguf", architecture, 3, **{rest: 8})
    message = re.escape("'gemma2.attention.sliding_window_pattern' is 0, not a positive whole number")
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path / "m.gguf", "gemma2", 3, **{"attention.sliding_window_pattern": 0})
