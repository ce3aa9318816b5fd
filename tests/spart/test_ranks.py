"""The ranks of a tensor-parallel S-Part, as threads of one process, against transformers on the whole checkpoint."""

from __future__ import annotations

import re

import pytest
from models.adapters_made import merged, save_adapter
from models.checkpoints import FAMILIES, MIXTURES, STATEFUL, make_checkpoint, make_model, reference
from models.gguf_made import tokenizer_fields, write_gguf
from models.quantised_checks import EXACT as QUANTISED_EXACT
from models.quantised_made import make, make_mxfp4
from models.spart_steps import EXACT, text
from ranks.in_threads import Ranks, error_of

from fastdecode.spart import CheckpointError
from fastdecode.spart.checkpoints.config_file import read_config
from fastdecode.spart.int4.balance import balance_for
from fastdecode.spart.lora.files import read_adapter
from fastdecode.spart.ranks.cut import why_not_shared

#: With two KV heads, two of four ranks have the same one. Three ranks have one or two of four heads, with states, too.
CASES = [
    *((variant, 4) for variant in (*FAMILIES, *MIXTURES, "llama-llama3", "granite-bias")),
    ("llama-mha", 3),
    ("llama-mqa", 2),
    *((variant, 2) for variant in STATEFUL),
    ("qwen3-next-dense", 3),
    ("qwen3-next-dense", 4),
    ("qwen3.5-last", 4),
]


@pytest.mark.parametrize(("variant", "n"), CASES)
async def test_logits_equal_transformers(variant, n, tmp_path):
    directory = make_checkpoint(variant)
    assert await error_of(Ranks(directory, n, dtype="fp32"), reference(directory), tmp_path) < EXACT


@pytest.mark.parametrize("name", ["gptq-4", "awq", "W8A16", "W4A16-asymmetric"])
async def test_quantised_files_equal_transformers_with_the_same_numbers(name, tmp_path):
    theirs = make(tmp_path / "m", name, "phi3")
    assert await error_of(Ranks(tmp_path / "m", 2, dtype="fp32"), theirs, tmp_path) < QUANTISED_EXACT


@pytest.mark.parametrize("variant", ["qwen3.5", "gpt-oss", "gemma4-e"])
async def test_gguf_files_equal_transformers(variant, tmp_path):
    """llama.cpp stores the V heads of states in another order, and each matrix of all experts in a tensor. The names of
    its tensors tell a rank which layer's heads to cut."""
    theirs = make_model(variant)
    write_gguf(tmp_path / "m.gguf", theirs, "F32")
    assert await error_of(Ranks(tmp_path / "m.gguf", 2, dtype="fp32"), theirs, tmp_path) < EXACT


async def test_quantised_heads_of_latent_attention_equal_transformers_with_the_same_numbers(tmp_path):
    theirs, fields = make_model("glm4-moe-lite"), tokenizer_fields(make_checkpoint("glm4-moe-lite"))
    write_gguf(tmp_path / "m.gguf", theirs, {"attn_k_b": "F16", "attn_v_b": "Q8_0", "": "F32"}, fields)
    assert await error_of(Ranks(tmp_path / "m.gguf", 2, dtype="fp32"), theirs, tmp_path) < QUANTISED_EXACT


async def test_mxfp4_experts_equal_transformers_with_the_same_numbers(tmp_path):
    theirs = reference(make_mxfp4(tmp_path / "m"))
    assert await error_of(Ranks(tmp_path / "m", 2, dtype="fp32"), theirs, tmp_path) < QUANTISED_EXACT


@pytest.mark.parametrize("variant", ["mistral", "qwen3.5-last"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
async def test_weights_that_are_rounded_at_load_lose_no_more_than_at_one_rank(weights, variant, tmp_path):
    directory = make_checkpoint(variant)
    one, four = [
        await error_of(Ranks(directory, n, dtype="fp32", weights=weights), reference(directory), tmp_path / str(n))
        for n in (1, 4)
    ]
    assert EXACT < four < 1.5 * one


@pytest.mark.parametrize(
    ("variant", "n"), [("llama-gqa", 4), ("phi3", 4), ("qwen3.5", 2), ("gemma3", 2), ("ernie4.5", 2)]
)
async def test_an_adapter_of_all_linears_equals_the_merged_model(variant, n, tmp_path):
    base = make_checkpoint(variant)
    adapter = save_adapter(base, tmp_path / "adapter", 1, r=4, target_modules="all-linear")
    ranks = Ranks(base, n, dtype="fp32", adapters=[read_adapter("a", adapter)])
    # float64: with AVX2, transformers' own fp32 is further from it than EXACT.
    assert await error_of(ranks, merged(base, adapter).double(), tmp_path, adapter=0) < EXACT


async def test_a_kv_cache_of_4_bits_loses_no_more_than_at_one_rank(tmp_path):
    directory, errors = make_checkpoint("llama-mha"), []
    for n in (1, 2):
        ranks = Ranks(directory, n, dtype="fp32")
        ranks.each(lambda model: balance_for(model, "int4", text(512, seed=9)), ranks.models)
        assert all(model.hadamard for model in ranks.models)
        errors.append(await error_of(ranks, reference(directory), tmp_path / str(n), kv_dtype="int4"))
    one, two = errors
    assert two == pytest.approx(one, rel=0.1)


def test_groups_that_are_torn_apart_are_refused_by_name(tmp_path):
    make(tmp_path / "m", "gptq-4-act-order")
    tensor = re.escape("'model.layers.0.mlp.down_proj.weight'")
    with pytest.raises(CheckpointError, match=f"2 ranks cannot share the tensor {tensor}: its inputs are in an order"):
        Ranks(tmp_path / "m", 2, dtype="fp32")


def test_models_that_ranks_cannot_share():
    for variant, n, why in (
        (
            "llama-gqa",
            3,
            "3 ranks cannot share the 4 query heads and 2 KV heads .*; possible numbers of ranks are 2, 4",
        ),
        ("qwen3.5", 4, "and the 2 K heads of the layers with states, of .*; possible numbers of ranks are 2"),
        ("gpt-oss", 2, None),
    ):
        reason = why_not_shared(read_config(make_checkpoint(variant)), n)
        assert reason is None if why is None else re.search(why, reason)
