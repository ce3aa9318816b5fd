"""Sequences that decode step by step over real R-nodes, or over none. The S-node times them when it chooses its split
(tuning.py), and so do the decode benchmark and the planner."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from tqdm import tqdm

from fastdecode.daemon.device_plan import PROXY_SPIN_US
from fastdecode.daemon.kv_pages import KVPages
from fastdecode.engine.runner import Runner
from fastdecode.engine.state.request import SamplingParams
from fastdecode.region.contract import ROW_DTYPE, blocks_for
from fastdecode.region.geometry import region_layout
from fastdecode.spart import SPart
from fastdecode.spart.exchange.chosen import ChosenExchange, choose_exchange
from fastdecode.spart.own_thread import in_own_thread
from fastdecode.spart.served import ServedModel
from fastdecode.spart.step.batch import Chunk, SampleSpec, StepBatch
from fastdecode.transports.base import DataPath, Hello, Link
from fastdecode.transports.registry import connect

_FILL_ROWS = 512  # appended by one call when the cache is filled
_TIMEOUT = 60.0  # seconds for a call
_ROUNDING_BYTES = 4 << 20  # of each layer's K and V in a lease, which takes whole huge pages

#: Makes an S-Part of a model, its links, its exchange and its slots for states.
MakeSPart = Callable[[Any, Sequence[DataPath], ChosenExchange, int], SPart]

#: The temperature of requests that give none.
USUAL_TEMPERATURE = SamplingParams().temperature


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The load: `batch` sequences over all mini-batches, each with `context` cached tokens. A round decodes at most
    `steps` tokens of each sequence, drawn at `temperature`."""

    batch: int
    context: int
    steps: int
    mini_batches: int
    kv_dtype: str
    temperature: float = 0.0

    def hello(self, model: ServedModel, n_links: int = 1) -> Hello:
        """The lease to ask each of `n_links` R-nodes for."""
        rows = max(-(-self.batch // self.mini_batches), _FILL_ROWS)
        seqs = -(-self.batch // n_links)
        hello = model.hello(self.mini_batches, rows, self.kv_dtype, None, seqs)
        return dataclasses.replace(hello, kv_bytes=seqs * self.blocks * KVPages.from_hello(hello).block_bytes)

    def block_bytes(self, model: ServedModel) -> int:
        """Bytes of the KV-cache of PAGE_TOKENS tokens."""
        return KVPages.from_hello(self.hello(model)).block_bytes

    @property
    def blocks(self) -> int:
        """The blocks of a sequence."""
        return blocks_for(self.context + self.steps + 1)

    def memory(self, model: ServedModel) -> int:
        """Bytes of --kv-memory with which one R-node can hold the load."""
        geometry = self.hello(model).geometry
        return kv_bytes(model, self) + geometry.n_layers * _ROUNDING_BYTES + region_layout(geometry).region_bytes


def kv_bytes(model: ServedModel, shape: DecodeShape) -> int:
    """Bytes of the KV pages that a shape's sequences need."""
    return shape.batch * shape.blocks * shape.block_bytes(model)


class Round(NamedTuple):
    """Seconds of a round."""

    elapsed: float
    waited: float  # the S-Part waited for R-nodes
    busy: float  # the longest work of an R-node, by its own clock


class Decoding:
    """Sequences that decode in mini-batches, spread evenly over links to R-nodes, by the exchange of a node."""

    def __init__(self, model: ServedModel, links: list[Link], shape: DecodeShape, make_spart: MakeSPart = SPart):
        self.model, self.links, self.shape = model, links, shape
        self._make_spart = make_spart
        self.spart = self.spart_over(links)
        self._runner: Runner | None = None
        # (link, seq_index) of every sequence: neighbours are on different links; each mini-batch is sorted by link.
        everyone = [(i % len(links), i // len(links)) for i in range(shape.batch)]
        self.mini_batches = [sorted(everyone[i :: shape.mini_batches]) for i in range(shape.mini_batches)]

    @classmethod
    async def open(
        cls, model: ServedModel, urls: Sequence[str], shape: DecodeShape, make_spart: MakeSPart = SPart
    ) -> Self:
        """Connect to the R-nodes at `urls` and lease as much as the shape needs. Raises TransportError, and ValueError
        if one has too few KV pages."""
        hello = shape.hello(model, len(urls))
        links = [await connect(url, hello, None) for url in urls]
        for link in links:
            lease = link.lease
            needed = hello.max_seqs * shape.blocks * (lease.full_sections + lease.limited_sections)
            if lease.n_pages < needed:
                raise ValueError(f"{link.url} grants {lease.n_pages} KV pages, this batch and context need {needed}")
        return cls(model, links, shape, make_spart)

    def spart_over(self, links: Sequence[DataPath]) -> SPart:
        """An S-Part over `links`, whose exchange is for its owner to close."""
        n = self.shape.mini_batches
        rows = -(-self.shape.batch // n)
        exchange = choose_exchange("auto", self.model.device, n, rows, PROXY_SPIN_US)
        spart = self._make_spart(self.model, links, exchange, self.shape.batch)
        if exchange.bypass is not None:
            exchange.bypass.prepare(spart, n, least=rows)
        if spart.states is not None:
            spart.states.clear()
        return spart

    def begin_round(self, spart: SPart) -> None:
        """Let the states of all sequences pass for those of their cached tokens."""
        if spart.states is not None:
            spart.states.pretend(self.shape.context)

    @property
    def runner(self) -> Runner:
        """The thread of the S-Part. It has as many OpenMP threads as torch is to have when it begins to compute."""
        self._runner = self._runner or Runner()
        return self._runner

    def end_runner(self) -> None:
        """End the thread of the S-Part and its OpenMP threads; the next round has another one."""
        if self._runner is not None:
            self._runner.stop()
            self._runner = None

    async def close(self) -> None:
        self.end_runner()
        self.spart.exchange.close()
        for link in self.links:
            await link.close()
        self.spart.forget_expert_load()

    async def fill(self, go_on: Callable[[], bool] = lambda: True, *, progress: bool = True) -> bool:
        """Cache `context` tokens of random K and V for every sequence, with calls that only append. Returns False if
        `go_on` said so before the end. `progress`: show a bar if it takes long."""
        generator = torch.Generator().manual_seed(0)
        for link in self.links:
            y = link.layout
            rows = torch.randn(_FILL_ROWS * y.kv_row_bytes // 4, generator=generator)
            raw = in_own_thread(rows.to, self.model.dtype).view(torch.uint8).numpy()[: _FILL_ROWS * y.kv_row_bytes]
            start = y.slot(0) + y.kv
            link.region[start : start + raw.nbytes] = memoryview(raw).cast("B")
        total = self.shape.batch * self.shape.context
        options: Any = {"unit": "token", "unit_scale": True, "leave": False, "delay": 1, "disable": not progress}
        with tqdm(total=total, desc="filling the KV-cache", **options) as bar:
            for index, seq_index in sorted(s for batch in self.mini_batches for s in batch):
                for pos in range(0, self.shape.context, _FILL_ROWS):
                    if not go_on():
                        return False
                    n = min(_FILL_ROWS, self.shape.context - pos)
                    await asyncio.to_thread(self._append, self.links[index], seq_index, pos, n)
                    bar.update(n)
        return True

    def _append(self, link: Link, seq_index: int, pos: int, n: int) -> None:
        link.arm(0, np.array([(seq_index, 1, pos, n, 0, 0)], ROW_DTYPE))
        link.wait(0, _TIMEOUT)
        for layer in range(link.geometry.n_layers):
            link.ring(0, layer)
            link.wait(0, _TIMEOUT)

    async def trim(self) -> None:
        """Take back what a round has appended."""
        for index, seq_index in (s for batch in self.mini_batches for s in batch):
            await self.links[index].trim(seq_index, 1, self.shape.context)

    def batch(self, slot: int, step: int) -> StepBatch:
        """A step of a mini-batch, which draws a token of each of its sequences."""
        vocab, at = self.model.config.vocab_size, self.shape.context + step
        specs = [SampleSpec(self.shape.temperature, seed=i, index=step) for i in range(len(self.mini_batches[slot]))]
        return StepBatch(
            slot,
            [
                Chunk(
                    link, seq_index, 1, at, [random.randrange(vocab)], False, spec, state=self._state(link, seq_index)
                )
                for (link, seq_index), spec in zip(self.mini_batches[slot], specs, strict=True)
            ],
        )

    def _state(self, link: int, seq_index: int) -> int:
        """The slot of a sequence's state."""
        return seq_index * len(self.links) + link

    async def split_round(self, steps: int | None = None) -> Round:
        """A round of the split system, of all of the shape's steps or of fewer."""
        waited = busy = 0.0

        async def drive(slot: int) -> None:
            nonlocal waited, busy
            for step in range(steps or self.shape.steps):
                output = await self.runner.submit(self.spart.step(self.batch(slot, step)))
                waited += output.r_wait_seconds
                busy += 1e-9 * max(times.busy_ns for times in output.link_costs.values())

        self.begin_round(self.spart)
        start = time.perf_counter()
        await asyncio.gather(*(drive(slot) for slot in range(self.shape.mini_batches)))
        elapsed = time.perf_counter() - start
        await self.trim()
        return Round(elapsed, waited, busy)
