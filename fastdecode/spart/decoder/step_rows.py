"""StepRows: the rows of a step, as its chunks and their sequences make them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate, chain, islice

import numpy as np
import torch

from fastdecode.spart.decoder.weights import Model
from fastdecode.spart.exchange import SlotViews, link_rows
from fastdecode.spart.lora.adapters import AdapterRows
from fastdecode.spart.prefill.prompt import PromptCache
from fastdecode.spart.sampler.host_sampling import HostSampler
from fastdecode.spart.sampler.prompt_logprobs import Scorer
from fastdecode.spart.sampler.sampling import Sampler
from fastdecode.spart.states.pool import StatePool, StateRows
from fastdecode.spart.step.batch import Sampled, StepBatch
from fastdecode.spart.step.step_table import StepTable


class StepRows:
    """The rows of a step: their tokens and positions, where each chunk's rows stand, and how tokens are drawn.

    `uploaded` is the step's table on the device: "tokens" and "positions", int64 [rows], "last rows", int64 [n_drawn],
    after which tokens are drawn, and the arrays that `sampler`, `scorer` and `adapters` have added. A captured step has
    a table and a sampler of its own, and uploads these if its graph does not draw its tokens.
    """

    def __init__(
        self,
        batch: StepBatch,
        model: Model,
        prompts: PromptCache,
        states: StatePool | None,
        views_of: Callable[[int], SlotViews],
    ):
        """`views_of`: the views of the batch's slot of a link. Raises ValueError for a batch that breaks the rules of
        batch.py."""
        self.started = time.perf_counter()
        config = model.config
        self.chunks = chunks = batch.chunks
        if not chunks:
            raise ValueError("a step has no chunks")
        lengths = [len(chunk.tokens) for chunk in chunks]
        if 0 in lengths:
            raise ValueError("a chunk has no tokens")
        starts = list(accumulate(lengths, initial=0))
        stops = starts[1:]
        tokens = np.fromiter(chain.from_iterable([chunk.tokens for chunk in chunks]), np.int64, stops[-1])
        if tokens.view(np.uint64).max() >= config.vocab_size:  # a negative number is a large one
            raise ValueError(f"a token id is outside the vocabulary of {config.vocab_size} tokens")
        positions = np.array([chunk.pos for chunk in chunks])
        if stops[-1] > len(chunks):  # a row's position is that of its chunk plus the row's index within the chunk
            positions = (positions - starts[:-1]).repeat(lengths) + np.arange(stops[-1])
        if config.rope is None and positions.max() >= config.max_positions:
            raise ValueError(f"a position is outside the model's {config.max_positions}")
        self.sampled = [i for i, chunk in enumerate(chunks) if chunk.sample is not None]
        links = {chunk.link for chunk in chunks} | {chunk.prefix.link for chunk in chunks if chunk.prefix is not None}
        views = {index: views_of(index) for index in links}
        self.link_rows = link_rows(chunks, views)
        self.prompts = []
        for i in [i for i, chunk in enumerate(chunks) if chunk.prefill]:
            chunk, stop = chunks[i], stops[i]
            key = (chunk.link, chunk.seq_index, chunk.tag)
            self.prompts.append(prompts.begin(key, chunk, slice(stop - len(chunk.tokens), stop)))
        table = StepTable()
        table.add("tokens", tokens)
        table.add("positions", positions)
        last_rows = [stops[i] - 1 for i in self.sampled]
        specs = [chunk.sample for chunk in chunks if chunk.sample is not None]
        self._drafts = [chunks[i].drafts for i in self.sampled]
        if any(self._drafts):
            rows_of = [range(row - n, row + 1) for row, n in zip(last_rows, self._drafts, strict=True)]
            last_rows = [row for some in rows_of for row in some]
            specs = [spec.later(j) for spec, n in zip(specs, self._drafts, strict=True) for j in range(n + 1)]
        self.specs = specs  # of each token to draw
        self.n_drawn = len(specs)
        table.add("last rows", np.array(last_rows, np.int64))
        self._last_rows, self._stops = last_rows, stops
        if any(chunk.long for chunk in chunks):
            table.add("long", np.array([chunk.long for chunk in chunks], dtype=np.int64).repeat(lengths))
        self.states = StateRows(states, chunks, starts, table) if states is not None else None
        self.scorer = Scorer(chunks, starts, config.vocab_size, table)
        self._adapter_rows = AdapterRows(chunks, len(model.adapters), table)
        self.adapters: AdapterRows | None = None
        self.table = table
        self.uploaded: dict[str, torch.Tensor] = {}
        self.vocab_size = config.vocab_size

    def upload(self, device: torch.device, on_host: bool = True) -> None:
        """Plan the draws, start the upload of the step's table, and fill `sampler`, `uploaded` and `adapters`.
        `on_host`: a CPU's tokens may be drawn on the host."""
        self.sampler: HostSampler | Sampler
        if on_host and device.type == "cpu":
            self.sampler = HostSampler(self.specs, self.vocab_size)
        else:
            self.sampler = Sampler(self.specs, self.vocab_size, self.table)
        self.uploaded = self.table.upload(device)
        self.adapters = self._adapter_rows.on_device(self.uploaded)
        if self.states is not None:
            self.states.on_device(self.uploaded)

    def following(self, drawn: list[Sampled]) -> torch.Tensor:
        """The token after each row, int64 [rows] on the host: a drawn one, or one that the step's batch has; 0 where
        there is none."""
        tokens = self.table["tokens"]
        following = np.append(tokens[1:], 0)
        following[np.array(self._stops) - 1] = [chunk.following or 0 for chunk in self.chunks]
        following[self._last_rows] = [max(one.token, 0) for one in drawn]  # -1 where no token could be drawn
        return torch.from_numpy(following)

    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.started

    def per_chunk(self, drawn: list[Sampled]) -> list[Sampled | None]:
        """The drawn tokens by chunk: the token after each sampled chunk, which holds the tokens after the chunk's
        drafts, and None for the other chunks."""
        if len(drawn) == len(self.chunks) and not any(self._drafts):
            return [*drawn]
        sampled: list[Sampled | None] = [None] * len(self.chunks)
        rest = iter(drawn)
        for i in self.sampled:
            first = sampled[i] = next(rest)
            first.after_drafts = list(islice(rest, self.chunks[i].drafts))
        return sampled
