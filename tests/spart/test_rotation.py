"""Mini-batches that rotate over several S-nodes with a common R-node, against transformers on the same checkpoint."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch
from checkpoints import VARIANTS, make_checkpoint, reference
from spart_steps import GREEDY, linked, run, text

from fastdecode.daemon.data_path import DataPath
from fastdecode.engine.runner import Runner
from fastdecode.region.geometry import geometry_tuple
from fastdecode.region.region import Region
from fastdecode.spart import SPart, load_model
from fastdecode.spart.rotation import Rotation
from fastdecode.spart.step.batch import Chunk, StepBatch
from fastdecode.transports._native import Port

STEPS = 9


def joined(link) -> DataPath:
    """The link's data path, as another S-node has it."""
    region_fd, wake_fd = link.descriptors
    region = Region.from_peer(os.dup(region_fd), link.geometry)
    return DataPath(link.url, link.lease, region, Port(region.view, geometry_tuple(link.geometry), 50, wake_fd=wake_fd))


async def rotated(
    model, tmp_path, prompts: list[list[int]], s_nodes: int, hidden: list[torch.Tensor]
) -> list[list[int]]:
    """The texts of `prompts` after STEPS decode steps of `s_nodes` + 1 mini-batches. Each S-node is a thread here."""
    n = s_nodes + 1
    async with linked(model, tmp_path, n_slots=n) as [link]:
        links = [link, *(joined(link) for _ in range(s_nodes - 1))]
        sparts = [SPart(model, [link]) for link in links]
        texts = [list(prompt) for prompt in prompts]
        members = [range(slot, len(prompts), n) for slot in range(n)]
        for slot, sequences in enumerate(members):
            chunks = [Chunk(0, i, 1, 0, texts[i], True, GREEDY) for i in sequences]
            for i, sampled in zip(sequences, run(sparts[0].step(StepBatch(slot, chunks))).sampled, strict=True):
                texts[i].append(sampled.token)

        def batches(slot):
            def batch_of(step, drawn):
                last = [s.token for s in drawn] if drawn else [texts[i][-1] if step == 0 else 0 for i in members[slot]]
                lengths = [len(prompts[i]) + step for i in members[slot]]
                rows = zip(members[slot], lengths, last, strict=True)
                return StepBatch(slot, [Chunk(0, i, 1, at, [token], False, GREEDY) for i, at, token in rows])

            return batch_of

        runners = [Runner() for _ in range(s_nodes)]
        rotations = [Rotation(sparts[i], i, s_nodes, hidden[i]) for i in range(s_nodes)]
        outputs = await asyncio.gather(
            *(
                runners[i].submit(rotations[i].mini_batch(slot, STEPS, batches(slot)))
                for slot in range(n)
                for i in range(s_nodes)
            )
        )
        for slot in range(n):
            drawn = {
                k: s for output in outputs[slot * s_nodes : (slot + 1) * s_nodes] for k, s in output.sampled.items()
            }
            for step in range(STEPS):
                for i, sampled in zip(members[slot], drawn[step], strict=True):
                    texts[i].append(sampled.token)
        # The slots are idle at every S-node: any of them can run a step of its own.
        for spart in sparts:
            chunks = [Chunk(0, i, 1, len(texts[i]) - 1, texts[i][-1:], False, GREEDY) for i in members[0]]
            for i, sampled in zip(members[0], run(spart.step(StepBatch(0, chunks))).sampled, strict=True):
                texts[i].append(sampled.token)
        for runner in runners:
            runner.stop()
        for other in links[1:]:
            await other.close()
    return texts


@pytest.fixture
def deep(monkeypatch):
    """A checkpoint of a variant with so many layers."""

    def make(variant: str, layers: int):
        family, overrides, storage = VARIANTS[variant]
        name = f"{variant}-{layers}"
        monkeypatch.setitem(VARIANTS, name, (family, {**overrides, "num_hidden_layers": layers}, storage))
        return make_checkpoint(name)

    return make


PROMPTS = [text(n, seed=n) for n in (5, 130, 1, 40, 7, 64, 20)]


@pytest.mark.parametrize(
    ("variant", "layers", "s_nodes"),
    [("llama-gqa", 4, 2), ("llama-gqa", 5, 2), ("opt", 4, 2), ("opt-projected", 5, 2), ("llama-mha", 5, 3)],
)
async def test_tokens_equal_transformers(variant, layers, s_nodes, deep, tmp_path):
    """With an even number of layers two S-nodes draw the tokens of a mini-batch always at the same one, with an odd
    number in turns."""
    directory = deep(variant, layers)
    model, theirs = load_model(directory, dtype="fp32"), reference(directory)
    theirs.generation_config.eos_token_id = None
    hidden = torch.full((s_nodes + 1, 8, model.config.hidden_size), torch.nan)
    texts = await rotated(model, tmp_path, PROMPTS, s_nodes, [hidden] * s_nodes)
    for prompt, tokens in zip(PROMPTS, texts, strict=True):
        want = theirs.generate(torch.tensor([prompt]), max_new_tokens=len(tokens) - len(prompt), do_sample=False)
        assert tokens == want[0].tolist()


async def test_hidden_states_go_from_one_s_node_to_the_other(deep, tmp_path):
    """S-nodes whose hidden states do not reach each other give other tokens."""
    model = load_model(deep("llama-gqa", 4), dtype="fp32")
    apart = [torch.zeros(3, 8, model.config.hidden_size) for _ in range(2)]
    together = [apart[0].clone()] * 2
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    good = await rotated(model, tmp_path / "a", PROMPTS, 2, together)
    bad = await rotated(model, tmp_path / "b", PROMPTS, 2, apart)
    assert good != bad


def test_too_few_layers_are_refused():
    model = load_model(make_checkpoint("llama-gqa"), dtype="fp32")
    with pytest.raises(ValueError, match="3 layers cannot rotate over 2 S-nodes"):
        Rotation(SPart(model, []), 0, 2, torch.zeros(3, 8, 64))
