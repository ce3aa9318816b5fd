"""The S-Part, the R-nodes and their links in virtual time: they compute nothing and take the predicted times.

They replace the engine's SPart, Links and Runner; the engine's own code cannot tell the difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import gcd
from types import SimpleNamespace
from typing import Any

from fastdecode.engine.scheduling.budgets import pairs
from fastdecode.plan.equations import StageTimes, System, Work, paces, stage_times
from fastdecode.plan.model import PlannedModel
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.shape import LayerReads
from fastdecode.spart.step.batch import Sampled, StepBatch, StepOutput
from fastdecode.transports.base import Lease, StepCost

WORD, END = 0, 1
_NEXT, _LAST = Sampled(WORD), Sampled(END)

_CONTROL_SECONDS = 1e-3  # of a FREE, FORK or RESIZE


class VirtualLink:
    """The link to an R-node that has `memory` bytes for KV-cache, or the S-node's own GPU as a place for sequences."""

    may_cut = True

    def __init__(
        self,
        name: str,
        model: PlannedModel,
        kv_dtype: str,
        memory: float,
        max_seqs: int,
        max_rows: int,
        mini_batches: int,
        resident: bool = False,
        gbps: float = 1.0,
    ):
        """`resident`: the pages lie on the S-node's GPU, which they leave, and come back to, at `gbps` GB/s."""
        windows = [reads.window for reads in model.reads] or [0]
        full, limited = sum(not window for window in windows), sum(window > 0 for window in windows)
        layers = gcd(full, limited)  # of a page
        page_bytes = round(model.token_bytes(kv_dtype) * PAGE_TOKENS * layers / len(windows))
        n_pages = int(memory // page_bytes)
        if n_pages < 1:
            raise ValueError(f"{memory:.0f} bytes do not hold one KV page, which has {page_bytes}")
        self.resident, self._gbps = resident, gbps
        self.bytes_per_second: float | None = None
        self.url = f"virtual://{name}"
        self.peer_url = None
        self.geometry = SimpleNamespace(n_slots=mini_batches, max_rows=max_rows)
        self.links = (self,)
        self.region_bytes = 0
        sections = full // layers, limited // layers, max(windows)
        self.lease = Lease(n_pages, n_pages, max_seqs, page_bytes, "", 1, name, *sections)

    async def free(self, handles: Sequence[tuple[int, int]]) -> None:
        await asyncio.sleep(_CONTROL_SECONDS)

    async def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None:
        await asyncio.sleep(_CONTROL_SECONDS)

    async def admit_migration(self, seq: tuple[int, int], length: int, token: str) -> None:
        await asyncio.sleep(_CONTROL_SECONDS)

    async def offer(self, seq: tuple[int, int], token: str) -> None:
        await asyncio.sleep(_CONTROL_SECONDS)

    async def migrate(self, seq: tuple[int, int], pages: range, length: int, url: str, token: str) -> None:
        await asyncio.sleep(self._move_seconds(pages))

    async def fetch(
        self, seq_index: int, pages: range, url: str, token: str, pause: Callable[[], Awaitable[None]], first: int
    ) -> None:
        await asyncio.sleep(self._move_seconds(pages))
        await pause()

    def _move_seconds(self, pages: range) -> float:
        """Seconds in which the pages of these blocks of a sequence come from the GPU, or go there."""
        sections = self.lease.full_sections + self.lease.limited_sections
        return len(pages) * sections * self.lease.page_bytes / (1e9 * self._gbps)

    def receive(self, seq: tuple[int, int], length: int) -> None:
        """The account of the pages is the scheduler's."""

    def restore_blocks(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """The account of the pages is the scheduler's."""

    def drop_blocks(self, seq: tuple[int, int], n_blocks: int) -> None:
        """The account of the pages is the scheduler's."""

    async def closed(self) -> None:
        await asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class VirtualStep:
    """A step, what it costs, and its result."""

    work: Work
    stages: StageTimes
    output: StepOutput


class UncomputedSPart:
    """The parts of an S-Part, besides its steps, that the engine asks for."""

    adapters: tuple[str, ...] = ()
    exchange = "virtual"
    state_slots = None

    def __init__(self, ends: tuple[int, ...], max_positions: int, reads: tuple[LayerReads, ...] = ()):
        """`ends`: the tokens that end a sequence. `reads`: what a row reads in each layer; empty: all tokens."""
        self.expert_load: dict[int, list[int]] = {}
        self.config = SimpleNamespace(
            vocab_size=2, eos_token_ids=ends, max_positions=max_positions, reads=reads or (LayerReads(),), mtp=0
        )

    def is_long(self, final_length: int) -> bool:
        """False: no RoPE depends on the length of a sequence."""
        return False

    def drop(self, link: int, seq_index: int, tag: int) -> None:
        """Nothing is staged."""


class VirtualSPart(UncomputedSPart):
    """An S-Part that ends each sequence after a given number of tokens."""

    def __init__(self, system: System, links: list[VirtualLink], outputs: Sequence[int]):
        """`outputs` has the output tokens of each sequence, by its seed."""
        super().__init__((END,), system.model.max_positions, system.model.reads)
        self._system, self._links, self.outputs = system, links, outputs

    def step(self, batch: StepBatch) -> VirtualStep:
        """The cost and the result of a step. An uncached suffix costs the S-Part its rows, and its R-node one reading
        of the tokens that it attends to."""
        model, sampled, outputs = self._system.model, [], self.outputs
        whole = not model.reads  # every layer reads every cached token
        rows = prompt_rows = resident_rows = resident_prompt_rows = cut_rows = 0
        prompt_pairs = 0.0
        read = [0.0] * len(self._links)
        for chunk in batch.chunks:
            n = len(chunk.tokens)
            resident = n if self._links[chunk.link].resident else 0
            if chunk.prefill:
                prompt_rows += n
                prompt_pairs += pairs(chunk.pos, n)
                resident_prompt_rows += resident
            else:
                rows += n
                resident_rows += resident
                length = chunk.pos + n
                if chunk.prefix is not None:
                    cut_rows += n
                    read[chunk.prefix.link] += chunk.prefix.length
                    length -= chunk.prefix.length
                read[chunk.link] += length if whole else model.read_tokens(length)
            spec = chunk.sample
            sampled.append(None if spec is None else _LAST if spec.index + 1 >= outputs[spec.seed] else _NEXT)
        on_gpu = sum(tokens for link, tokens in zip(self._links, read, strict=True) if link.resident)
        read = [0.0 if link.resident else tokens for link, tokens in zip(self._links, read, strict=True)]
        total = sum(read)
        work = Work(rows, total, prompt_rows, prompt_pairs, resident_rows, on_gpu, cut_rows, resident_prompt_rows)
        stages = stage_times(self._system, work, max(read) / total if total else None)
        token_bytes = model.token_bytes(self._system.kv_dtype)
        speed = self._system.reading(total * token_bytes).bytes_per_second
        costs: Any = {
            link: StepCost(round(1e9 * tokens * token_bytes / speed), round(tokens * token_bytes))
            for link, tokens in zip(self._links, read, strict=True)
            if tokens
        }
        waited = stages.alone - stages.s_node
        output = StepOutput(sampled, stages.s_part + stages.resident, waited, round(total * token_bytes), costs)
        return VirtualStep(work, stages, output)


@dataclass(slots=True)
class StepRecord:
    """A step that has run: when it ended, its seconds, its decoding rows, and the tokens that they attended to."""

    end: float
    seconds: float
    rows: float
    read_tokens: float
    prompt_rows: float = 0.0


@dataclass(slots=True)
class _RunningStep:
    step: VirtualStep
    future: asyncio.Future[StepOutput]
    begun: float
    left: float = 1.0  # share of the step that is to come
    pace: float = 0.0  # seconds in which a whole step would run at present


@dataclass(slots=True)
class VirtualRunner:
    """Runs steps in virtual time. A step takes as long as by itself, or longer if it shares the S-node, the R-nodes or
    the wire with other steps.

    As one step begins or ends, the pace of the others changes.
    """

    in_turns: bool
    records: list[StepRecord] = field(default_factory=list)
    _flights: list[_RunningStep] = field(default_factory=list)
    _updated: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def submit(self, step: VirtualStep) -> asyncio.Future[StepOutput]:
        """Begin a step; the future gets its output when it ends."""
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        flight = _RunningStep(step, loop.create_future(), loop.time())
        self._flights.append(flight)
        self._set_paces()
        return flight.future

    def stop(self) -> None:
        """Nothing was started."""

    def _advance(self, now: float) -> None:
        for flight in self._flights:
            flight.left -= (now - self._updated) / flight.pace
        self._updated = now

    def _set_paces(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._flights:
            return
        stages = [flight.step.stages for flight in self._flights]
        for flight, pace in zip(self._flights, paces(stages, self.in_turns), strict=True):
            flight.pace = pace
        wait = min(flight.left * flight.pace for flight in self._flights)
        self._timer = asyncio.get_running_loop().call_later(max(0.0, wait), self._end_steps)

    def _end_steps(self) -> None:
        now = asyncio.get_running_loop().time()
        self._advance(now)
        for flight in [f for f in self._flights if f.left <= 1e-9]:
            self._flights.remove(flight)
            work = flight.step.work
            self.records.append(StepRecord(now, now - flight.begun, work.rows, work.read_tokens, work.prompt_rows))
            if not flight.future.done():
                flight.future.set_result(flight.step.output)
        self._set_paces()
