"""Rotary embeddings and their scalings, against the rotary embeddings of transformers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engines.real_engine import real_engine
from engines.token_stream import greedy, submit, tokens_of
from models.checkpoints import VOCAB_SIZE, make_checkpoint, reference
from models.greedy import is_greedy
from transformers import AutoConfig, LlamaForCausalLM, Phi3ForCausalLM

from fastdecode.spart import CheckpointError
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.decoder.rope import RotaryEmbedding, apply_rope

SHORT, LONG = [1.0 + 0.01 * i for i in range(32)], [1.0 + 0.5 * i for i in range(32)]
#: RoPE's parameters, each for heads of 64.
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    "yarn, all keys": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 30.0,
        "beta_slow": 2.0,
        "truncate": False,
        "attention_factor": 1.3,
    },
    "yarn without a ramp, as in Kimi K2": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 256,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
    "longrope, all keys": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 256,
        "factor": 3.0,
        "attention_factor": 1.1,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
}


def config_of(model_type: str, scaling: dict[str, Any]) -> Any:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    rope = {"rope_type": "default", "rope_theta": 5e5, **scaling}
    rest = {"vocab_size": 64, "intermediate_size": 64, "pad_token_id": 0, "dtype": "float32"}
    return AutoConfig.for_model(model_type, **sizes, **rest, rope_parameters=rope)


def expected(model: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of a sequence of this length."""
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
    return cos[0], sin[0]


@pytest.mark.quick
@pytest.mark.parametrize("length", [200, 2048], ids=["short", "long"])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_are_transformers(name, length):
    config = config_of("llama", SCALINGS[name])
    wanted = expected(LlamaForCausalLM._from_config(config), length)
    assert_angles(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, length, wanted)


@pytest.mark.parametrize("length", [200, 2048], ids=["short", "long"])
@pytest.mark.parametrize("kind", ["default", "longrope", "su", "yarn"])
def test_angles_of_phi3_are_transformers_by_every_name_of_longrope(kind, length):
    """Phi-3 may turn only the first elements of each head by RoPE."""
    scaling = {"partial_rotary_factor": 0.75, "short_factor": SHORT[:24], "long_factor": LONG[:24]}
    config = config_of("phi3", scaling if kind == "default" else SCALINGS["longrope"] | scaling)
    config.rope_parameters["original_max_position_embeddings"] = config.original_max_position_embeddings = 256
    wanted = expected(Phi3ForCausalLM._from_config(config), length)
    raw = config.to_dict() | {"architectures": ["Phi3ForCausalLM"]}
    raw["rope_parameters"] = raw["rope_parameters"] | {"rope_type": kind}
    assert_angles(raw, length, wanted)


def assert_angles(raw: dict[str, Any], length: int, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    config = make_config(raw)
    rope = config.rope
    embedding = RotaryEmbedding(rope, config.head_size, torch.device("cpu"), torch.float32)
    is_long = bool(rope.long_factors) and length > rope.original_max_positions
    ours = embedding.angles(torch.arange(length), torch.full((length,), int(is_long)) if rope.long_factors else None)
    for got, want in zip(ours[:2], wanted, strict=True):
        assert 2 * got.shape[-1] == want.shape[-1] == rope.width(config.head_size)
        # In fp32 the angle at position 2000 is known to 1e-4.
        torch.testing.assert_close(got[:, 0], want[:, : got.shape[-1]], atol=3e-4, rtol=0)


def test_angles_are_transformers_at_positions_in_any_order():
    config = config_of("llama", SCALINGS["llama3"])
    cos, sin = expected(LlamaForCausalLM._from_config(config), 20001)
    ours = make_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    embedding = RotaryEmbedding(ours.rope, ours.head_size, torch.device("cpu"), torch.float32)
    for positions in ([0], [16383], [16384, 1], [3, 20000], [4999], list(range(900, 1200))):
        for got, want in zip(embedding.angles(torch.tensor(positions))[:2], (cos, sin), strict=True):
            torch.testing.assert_close(got[:, 0], want[positions, : got.shape[-1]], atol=3e-3, rtol=0)


def test_the_rest_of_a_head_is_copied():
    x, out = torch.randn(3, 2, 16), torch.empty(3, 2, 16)
    cos, sin = torch.zeros(3, 1, 4), torch.ones(3, 1, 4)
    apply_rope(x, cos, sin, out=out)
    assert torch.equal(out, torch.cat([-x[..., 4:8], x[..., :4], x[..., 8:]], dim=-1))


def test_a_scaling_that_phi3_does_not_have_is_refused():
    raw = config_of("phi3", {}).to_dict() | {"architectures": ["Phi3ForCausalLM"]}
    raw["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(CheckpointError, match="'linear' is not supported for Phi-3"):
        make_config(raw)


def test_a_scaling_for_layers_of_one_type_is_refused_where_all_have_the_same():
    raw = config_of("llama", {}).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    raw["rope_parameters"] = {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
    with pytest.raises(CheckpointError, match="RoPE for layers of type 'full_attention' alone is not supported"):
        make_config(raw)


async def test_sequences_on_both_sides_of_longropes_limit_equal_transformers(tmp_path):
    """transformers computes a whole sequence with the factors of its length, so K and V of the two are not shared."""
    directory = make_checkpoint("phi3-longrope")  # trained on 256 positions
    common = torch.randint(3, VOCAB_SIZE, (240,)).tolist()
    requests = [(common, 8), (common, 40), (common[:200], 56), (common[:200], 57), (common * 2, 8), (common[:9], 4)]
    judge = reference(directory)
    async with real_engine(directory, tmp_path, prefix_cache=True) as engine:
        for _ in range(2):  # the second time from the prefix cache
            outputs = await asyncio.gather(*(tokens_of(submit(engine, prompt, greedy(n))) for prompt, n in requests))
            for (prompt, n), tokens in zip(requests, outputs, strict=True):
                assert len(tokens) == n and is_greedy(judge, prompt, tokens)
        assert engine.stats.totals.prefix_hits > 0
