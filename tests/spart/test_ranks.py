"""The ranks of a tensor-parallel S-Part, as threads of one process, against transformers on the whole checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models.adapters_made import merged, save_adapter
from models.checkpoints import FAMILIES, MIXTURES, STATEFUL, make_checkpoint, make_model, reference
from models.gguf_made import write_gguf
from models.quantised_checks import EXACT as QUANTISED_EXACT
from models.quantised_made import make, make_mxfp4
from models.spart_steps import EXACT, GREEDY, linked, run, text

from fastdecode.spart import CheckpointError, SPart, load_model
from fastdecode.spart.checkpoints.config_file import read_config
from fastdecode.spart.int4.balance import balance_for
from fastdecode.spart.lora.files import read_adapter
from fastdecode.spart.ranks.cut import why_not_shared
from fastdecode.spart.ranks.reduction import Reduction, create_segment
from fastdecode.spart.ranks.share import Share
from fastdecode.spart.step.batch import Chunk, StepBatch

LENGTHS = [1, 17, 64, 130]
STEPS = 8


class Ranks:
    """A model that `n` ranks share, each in a thread of its own."""

    def __init__(self, directory, n, **options):
        segment, logits = create_segment(n), torch.zeros(1 << 22, dtype=torch.uint8)
        shares = [Share(i, n, Reduction(segment, i, n), logits) for i in range(n)]
        os.close(segment)
        self.threads = ThreadPoolExecutor(n)
        self.models = self.each(lambda share: load_model(directory, share=share, **options), shares)

    def each(self, work, *of_ranks):
        """Do the same at all ranks at once."""
        return list(self.threads.map(work, *of_ranks))

    @contextlib.asynccontextmanager
    async def sparts(self, tmp_path, kv_dtype):
        """The S-Parts of the ranks, each with a link to an R-node of its own."""
        async with contextlib.AsyncExitStack() as stack:
            found = []
            for i, model in enumerate(self.models):
                (directory := tmp_path / str(i)).mkdir(parents=True)
                links = await stack.enter_async_context(linked(model, directory, kv_dtype=kv_dtype))
                found.append(SPart(model, links, state_slots=len(LENGTHS) + 1))
            yield found
        self.threads.shutdown()


async def decoded(ranks, tmp_path, adapter=None, kv_dtype="fp32"):
    """Prompts in one step, the longest in two, then tokens one by one: the tokens and logits of each sequence."""
    texts = [text(n, seed=n) for n in LENGTHS]
    logits = [[] for _ in texts]
    async with ranks.sparts(tmp_path, kv_dtype) as sparts:
        first = [Chunk(0, len(texts), 1, 0, text(90), True, None, prompt_length=150, state=len(texts))]
        chunks = [
            Chunk(0, i, 1, 0, tokens, True, GREEDY, adapter=adapter, state=i) for i, tokens in enumerate(texts)
        ] + first
        for _ in range(STEPS):
            batch = StepBatch(0, chunks)
            outputs = ranks.each(lambda spart: run(spart.step(batch, keep_logits=True)), sparts)  # noqa: B023
            for tokens, sampled, found, row in zip(texts, outputs[0].sampled, logits, outputs[0].logits, strict=False):
                tokens.append(sampled.token)
                found.append(row.clone())
            chunks = [
                Chunk(0, i, 1, len(tokens) - 1, tokens[-1:], False, GREEDY, adapter=adapter, state=i)
                for i, tokens in enumerate(texts)
            ]
    return texts, logits


async def error_of(ranks, theirs, tmp_path, **options) -> float:
    """The largest error in standard deviations of the logits of `theirs`."""
    errors = []
    for tokens, found in zip(*await decoded(ranks, tmp_path, **options), strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([tokens])).logits[0, -STEPS - 1 : -1]
        errors.append(((torch.stack(found) - want).abs().max() / want.std()).item())
    return max(errors)


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


async def test_gguf_files_of_layers_with_states_equal_transformers(tmp_path):
    """llama.cpp stores the V heads in another order."""
    theirs = make_model("qwen3.5")
    write_gguf(tmp_path / "m.gguf", theirs, "F32")
    assert await error_of(Ranks(tmp_path / "m.gguf", 2, dtype="fp32"), theirs, tmp_path) < EXACT


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


@pytest.mark.parametrize(("variant", "n"), [("llama-gqa", 4), ("phi3", 4), ("qwen3.5", 2)])
async def test_an_adapter_of_all_linears_equals_the_merged_model(variant, n, tmp_path):
    base = make_checkpoint(variant)
    adapter = save_adapter(base, tmp_path / "adapter", 1, r=4, target_modules="all-linear")
    ranks = Ranks(base, n, dtype="fp32", adapters=[read_adapter("a", adapter)])
    assert await error_of(ranks, merged(base, adapter), tmp_path, adapter=0) < EXACT


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
