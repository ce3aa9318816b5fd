"""Tokens that an MTP head drafts, against a head of transformers' modules."""

from __future__ import annotations

import pytest
import torch
from models.checkpoints import make_checkpoint
from models.hf_models import VOCAB_SIZE, save_model
from models.mtp_made import make_head
from models.spart_steps import GREEDY, linked, run, text
from ranks.in_threads import HFRanks, Ranks

from fastdecode.spart import load_model, read_config
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.loader import block_linears
from fastdecode.spart.step.batch import Chunk, ScoreSpec, StepBatch

PASSES = 3
NATIVE = ("qwen3.5", "qwen3-next", "qwen3.5-moe", "glm4-moe", "glm4-moe-lite", "deepseek-v3")
OF_TRANSFORMERS = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")


def known(n, seed):
    """Tokens of every vocabulary."""
    return [3 + token % (VOCAB_SIZE - 3) for token in text(n, seed)]


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("name", [*NATIVE, *OF_TRANSFORMERS])
async def test_the_drafts_are_those_of_the_head(name, n_ranks, tmp_path):
    """A prompt by the S-node in two chunks, then decoding rows and a chunk that the R-node attends to. Where layers
    select tokens, the rows see more tokens than they select."""
    directory = make_checkpoint(name) if name in NATIVE else save_model(name, tmp_path)
    head = make_head(directory)
    path, tokens = head.save(directory, tmp_path / "m"), known(150, 3)
    ranks = (Ranks if name in NATIVE else HFRanks)(path, n_ranks, dtype=torch.float32, mtp=PASSES)
    async with ranks.sparts(tmp_path, "fp32") as sparts:
        asked = []

        def step(n, prefill, sample=True):
            pos = step.pos
            after = None if sample else tokens[pos + n]
            chunk = Chunk(
                0, 0, 1, pos, tokens[pos : pos + n], prefill, GREEDY if sample else None, 150, state=1, following=after
            )
            batch = StepBatch(0, [chunk], drafts=PASSES)
            [sampled] = ranks.each(lambda spart: run(spart.step(batch)), sparts)[0].sampled
            step.pos += n
            if sample:
                tokens[step.pos :] = [sampled.token]
                asked.append((list(tokens), list(sampled.drafts)))

        step.pos = 0
        step(70, True, sample=False)
        step(80, True)
        for _ in range(4):
            step(1, False)
        tokens += known(20, 4)
        step(21, False)
        step(1, False)
    assert [drafts for _, drafts in asked] == [head.drafts(before, PASSES) for before, _ in asked]


@pytest.mark.parametrize("name", ["qwen3.5", "glm_moe_dsa"])
async def test_only_the_drafts_that_are_wanted_are_made(name, tmp_path):
    """An R-node serves a layer for each draft, and one if there is none."""
    directory = make_checkpoint(name) if name in NATIVE else save_model(name, tmp_path)
    head = make_head(directory)
    backend = choose_backend("auto", head.save(directory, tmp_path / "m")).with_mtp(PASSES)
    model = backend.load(torch.device("cpu"), torch.float32)
    tokens = known(40, 5)
    async with linked(model, tmp_path) as links:
        spart = backend.make_spart(model, links, state_slots=4)
        for wanted in (0, 2, 0, 0, 1, 3):
            pos = 0 if len(tokens) == 40 else len(tokens) - 1
            chunk = Chunk(0, 0, 1, pos, tokens[pos:], pos == 0, GREEDY, 40, state=1)
            before = (await links[0].stats())["calls"]
            [sampled] = run(spart.step(StepBatch(0, [chunk], drafts=wanted))).sampled
            calls = (await links[0].stats())["calls"] - before
            assert calls == model.config.n_layers - PASSES + max(1, wanted)
            tokens.append(sampled.token)
            assert list(sampled.drafts) == head.drafts(tokens, wanted)


def test_adapters_do_not_change_a_head_among_the_layers():
    config = read_config(make_checkpoint("glm4-moe"))
    assert block_linears(config.with_mtp(2)) == block_linears(config)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(CheckpointError, match=r"no MTP head to draft tokens: it lacks the tensor 'mtp\.pre_fc_norm"):
        load_model(make_checkpoint("qwen3.5"), device="cpu", mtp=1)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'model\.layers\.3\.enorm\.weight'"):
        load_model(make_checkpoint("glm4-moe"), device="cpu", mtp=1)
    with pytest.raises(CheckpointError, match="an MTP head of LlamaForCausalLM is not supported"):
        load_model(make_checkpoint("llama-gqa"), device="cpu", mtp=1)


async def test_ranks_draw_the_same_token_after_a_prompt_that_is_scored(tmp_path):
    directory = make_checkpoint("deepseek-v3")
    path, tokens = make_head(directory).save(directory, tmp_path / "m"), known(40, 3)
    ranks = Ranks(path, 2, dtype=torch.float32, mtp=1)
    drawn = []
    async with ranks.sparts(tmp_path, "fp32") as sparts:
        for i, score in enumerate((None, ScoreSpec(tokens[1:], 1))):
            chunk = Chunk(0, i, 1, 0, tokens, True, GREEDY, len(tokens), score=score)
            [sampled] = ranks.each(lambda spart, c=chunk: run(spart.step(StepBatch(0, [c], drafts=1))), sparts)[
                0
            ].sampled
            drawn.append(sampled.token)
    assert drawn[0] == drawn[1]
