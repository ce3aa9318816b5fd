"""Tokens that an MTP head drafts, against a head of transformers' modules."""

from __future__ import annotations

import pytest
import torch
from models.checkpoints import make_checkpoint
from models.mtp_made import make_head
from models.spart_steps import GREEDY, linked, run, text

from fastdecode.spart import SPart, load_model
from fastdecode.spart.checkpoints.config import CheckpointError
from fastdecode.spart.step.batch import Chunk, StepBatch

PASSES = 3


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "qwen3.5-moe"])
async def test_the_drafts_are_those_of_the_head(name, tmp_path):
    """A prompt by the S-node in two chunks, then decoding rows and a chunk that the R-node attends to."""
    directory = make_checkpoint(name)
    head = make_head(directory)
    model = load_model(head.save(directory, tmp_path / "m"), device="cpu", dtype=torch.float32, mtp=PASSES)
    tokens = text(150, 3)
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=4)
        asked = []

        def step(n, prefill, sample=True):
            pos = step.pos
            after = None if sample else tokens[pos + n]
            chunk = Chunk(
                0, 0, 1, pos, tokens[pos : pos + n], prefill, GREEDY if sample else None, 150, state=1, following=after
            )
            [sampled] = run(spart.step(StepBatch(0, [chunk], drafts=PASSES))).sampled
            step.pos += n
            if sample:
                tokens[step.pos :] = [sampled.token]
                asked.append((list(tokens), list(sampled.drafts)))

        step.pos = 0
        step(70, True, sample=False)
        step(80, True)
        for _ in range(4):
            step(1, False)
        tokens += text(20, 4)
        step(21, False)
        step(1, False)
    assert [drafts for _, drafts in asked] == [head.drafts(before, PASSES) for before, _ in asked]


async def test_only_the_drafts_that_are_wanted_are_made(tmp_path):
    directory = make_checkpoint("qwen3.5")
    head = make_head(directory)
    model = load_model(head.save(directory, tmp_path / "m"), device="cpu", dtype=torch.float32, mtp=PASSES)
    tokens = text(40, 5)
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=4)
        for wanted in (0, 2, 0, 0, 1, 3):
            pos = 0 if len(tokens) == 40 else len(tokens) - 1
            chunk = Chunk(0, 0, 1, pos, tokens[pos:], pos == 0, GREEDY, 40, state=1)
            [sampled] = run(spart.step(StepBatch(0, [chunk], drafts=wanted))).sampled
            tokens.append(sampled.token)
            assert list(sampled.drafts) == head.drafts(tokens, wanted)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(CheckpointError, match=r"no MTP head to draft tokens: it lacks the tensor 'mtp\.pre_fc_norm"):
        load_model(make_checkpoint("qwen3.5"), device="cpu", mtp=1)
    with pytest.raises(CheckpointError, match="an MTP head of LlamaForCausalLM is not supported"):
        load_model(make_checkpoint("llama-gqa"), device="cpu", mtp=1)
