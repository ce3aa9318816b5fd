"""A model that ranks share, each in a thread of this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from models.spart_steps import GREEDY, linked, run, text

from fastdecode.spart import SPart, load_model
from fastdecode.spart.hf.decoder import HFSPart
from fastdecode.spart.hf.model import load_hf_model
from fastdecode.spart.ranks.reduction import Reduction, create_segment
from fastdecode.spart.ranks.share import Share
from fastdecode.spart.served import ServedModel
from fastdecode.spart.step.batch import Chunk, StepBatch

LENGTHS = [1, 17, 64, 130]
STEPS = 8


class Ranks:
    """`n` ranks of a model of the native decoder; one rank has the whole model."""

    make_spart: Callable[..., SPart] = SPart

    def __init__(self, directory: Path, n: int, **options: Any):
        """`options` of load_model."""
        segment, logits = create_segment(n), torch.zeros(1 << 22, dtype=torch.uint8)
        shares = [Share(i, n, Reduction(segment, i, n), logits) for i in range(n)] if n > 1 else [None]
        os.close(segment)
        self.threads = ThreadPoolExecutor(n)
        self.models: list[Any] = self.load(directory, shares, options)

    def load(self, directory: Path, shares: Sequence[Share | None], options: dict[str, Any]) -> list[ServedModel]:
        """The models of all ranks."""
        return self.each(lambda share: load_model(directory, share=share, **options), shares)

    def each(self, work: Callable[..., Any], *of_ranks: Any) -> list[Any]:
        """Do the same at all ranks at once."""
        return list(self.threads.map(work, *of_ranks))

    @contextlib.asynccontextmanager
    async def sparts(self, tmp_path: Path, kv_dtype: str) -> AsyncIterator[list[SPart]]:
        """The S-Parts of the ranks, each with a link to an R-node of its own."""
        async with contextlib.AsyncExitStack() as stack:
            found = []
            for i, model in enumerate(self.models):
                (directory := tmp_path / str(i)).mkdir(parents=True)
                links = await stack.enter_async_context(linked(model, directory, kv_dtype=kv_dtype))
                found.append(self.make_spart(model, links, state_slots=len(LENGTHS) + 1))
            yield found
        self.threads.shutdown()


class HFRanks(Ranks):
    """`n` ranks of a model of the transformers backend."""

    make_spart = HFSPart

    def load(self, directory: Path, shares: Sequence[Share | None], options: dict[str, Any]) -> list[ServedModel]:
        """One after another: transformers' loader changes functions of torch for all threads meanwhile."""
        return [load_hf_model(directory, share=share, **options) for share in shares]


async def decoded(
    ranks: Ranks, tmp_path: Path, adapter: int | None = None, kv_dtype: str = "fp32"
) -> tuple[list[list[int]], list[list[torch.Tensor]]]:
    """A part of a prompt alone, of which no token is drawn; its next part beside other prompts; then tokens one by one:
    the tokens and logits of each other prompt's sequence."""
    vocab_size = ranks.models[0].config.vocab_size
    texts = [[token % vocab_size for token in text(n, seed=n)] for n in LENGTHS]
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    async with ranks.sparts(tmp_path, kv_dtype) as sparts:
        long = [token % vocab_size for token in text(90)]
        parts = [
            Chunk(0, len(texts), 1, start, long[start:end], True, None, prompt_length=150, state=len(texts))
            for start, end in ((0, 40), (40, 90))
        ]
        ranks.each(lambda spart: run(spart.step(StepBatch(0, parts[:1]))), sparts)
        chunks = [
            Chunk(0, i, 1, 0, tokens, True, GREEDY, adapter=adapter, state=i) for i, tokens in enumerate(texts)
        ] + parts[1:]
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


async def error_of(ranks: Ranks, theirs: Any, tmp_path: Path, **options: Any) -> float:
    """The largest error in standard deviations of the logits of `theirs`, transformers' model. `options` of
    `decoded`."""
    errors = []
    for tokens, found in zip(*await decoded(ranks, tmp_path, **options), strict=True):
        with torch.inference_mode():
            want = theirs(torch.tensor([tokens])).logits[0, -STEPS - 1 : -1]
        errors.append(((torch.stack(found) - want).abs().max() / want.std()).item())
    return max(errors)
