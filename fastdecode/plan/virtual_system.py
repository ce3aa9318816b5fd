"""The S-Part, the R-nodes and their links in virtual time: they compute nothing and take the predicted times.

They replace the engine's SPart, Links and Runner; the engine's own code cannot tell the difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from types import SimpleNamespace
from typing import Any

from fastdecode.engine.scheduling.budgets import pairs
from fastdecode.plan.equations import StageTimes, System, Work, shared_seconds, stage_times
from fastdecode.plan.model import PlannedModel
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.shape import LayerReads
from fastdecode.spart.step.batch import Sampled, StepBatch, StepOutput
from fastdecode.transports.base import Lease, StepCost

WORD, END = 0, 1
_NEXT, _LAST = Sampled(WORD), Sampled(END)

_CONTROL_SECONDS = 1e-3  # of a FREE, FORK or RESIZE


class VirtualLink:
    """The link to an R-node that has `memory` bytes for KV-cache."""

    resident = False

    def __init__(
        self,
        name: str,
        model: PlannedModel,
        kv_dtype: str,
        memory: float,
        max_seqs: int,
        max_rows: int,
        mini_batches: int,
    ):
        windows = [reads.window for reads in model.reads] or [0]
        full, limited = sum(not window for window in windows), sum(window > 0 for window in windows)
        layers = gcd(full, limited)  # of a page
        page_bytes = round(model.token_bytes(kv_dtype) * PAGE_TOKENS * layers / len(windows))
        n_pages = int(memory // page_bytes)
        if n_pages < 1:
            raise ValueError(f"{memory:.0f} bytes do not hold one KV page, which has {page_bytes}")
        self.url = f"virtual://{name}"
        self.peer_url = None
        self.geometry = SimpleNamespace(n_slots=mini_batches, max_rows=max_rows)
        self.members = (SimpleNamespace(link=self),)
        self.links = (self,)
        self.region_bytes = 0
        sections = full // layers, limited // layers, max(windows)
        self.lease = Lease(n_pages, n_pages, max_seqs, page_bytes, "", 1, name, *sections)

    async def free(self, handles: Sequence[tuple[int, int]]) -> None:
        await asyncio.sleep(_CONTROL_SECONDS)

    async def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None:
        await asyncio.sleep(_CONTROL_SECONDS)

    async def closed(self) -> None:
        await asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class VirtualStep:
    """A step, what it costs, and its result."""

    work: Work
    stages: StageTimes
    output: StepOutput


class VirtualSPart:
    """An S-Part that ends each sequence after a given number of tokens."""

    def __init__(self, system: System, links: list[VirtualLink], outputs: Sequence[int]):
        """`outputs` has the output tokens of each sequence, by its seed."""
        self._system, self._links, self.outputs = system, links, outputs
        self.adapters: tuple[str, ...] = ()
        self.expert_load: dict[int, list[int]] = {}
        self.exchange, self.state_slots = "virtual", None
        model = system.model
        self.config = SimpleNamespace(
            vocab_size=2,
            eos_token_ids=(END,),
            max_positions=model.max_positions,
            reads=model.reads or (LayerReads(),),
        )

    def step(self, batch: StepBatch) -> VirtualStep:
        """The cost and the result of a step. An uncached suffix costs the S-Part its rows, and its R-node one reading
        of the tokens that it attends to."""
        model, sampled, outputs = self._system.model, [], self.outputs
        whole = not model.reads  # every layer reads every cached token
        rows = prompt_rows = 0
        prompt_pairs = 0.0
        read = [0.0] * len(self._links)
        for chunk in batch.chunks:
            n = len(chunk.tokens)
            if chunk.prefill:
                prompt_rows += n
                prompt_pairs += pairs(chunk.pos, n)
            else:
                rows += n
                length = chunk.pos + n
                read[chunk.link] += length if whole else model.read_tokens(length)
            spec = chunk.sample
            sampled.append(None if spec is None else _LAST if spec.index + 1 >= outputs[spec.seed] else _NEXT)
        total = sum(read)
        work = Work(rows, total, prompt_rows, prompt_pairs)
        stages = stage_times(self._system, work, max(read) / total if total else None)
        token_bytes = model.token_bytes(self._system.kv_dtype)
        speed = self._system.reading(total * token_bytes).bytes_per_second
        costs: Any = {
            link: StepCost(round(1e9 * tokens * token_bytes / speed), round(tokens * token_bytes))
            for link, tokens in zip(self._links, read, strict=True)
            if tokens
        }
        waited = stages.alone - stages.s_part - stages.engine
        output = StepOutput(sampled, stages.s_part, waited, round(total * token_bytes), costs)
        return VirtualStep(work, stages, output)

    def is_long(self, final_length: int) -> bool:
        """False: no RoPE depends on the length of a sequence."""
        return False

    def drop(self, link: int, seq_index: int, tag: int) -> None:
        """Nothing is staged."""


@dataclass(slots=True)
class StepRecord:
    """A step that has run: when it ended, its seconds, its decoding rows, and the tokens that they attended to."""

    end: float
    seconds: float
    rows: float
    read_tokens: float


@dataclass(slots=True)
class _VirtualStep:
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
    _flights: list[_VirtualStep] = field(default_factory=list)
    _updated: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def submit(self, step: VirtualStep) -> asyncio.Future[StepOutput]:
        """Begin a step; the future gets its output when it ends."""
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        flight = _VirtualStep(step, loop.create_future(), loop.time())
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
        shared = sum(s.alone for s in stages) if self.in_turns else max(shared_seconds(stages).values())
        for flight in self._flights:
            flight.pace = max(shared, flight.step.stages.alone)
        wait = min(flight.left * flight.pace for flight in self._flights)
        self._timer = asyncio.get_running_loop().call_later(max(0.0, wait), self._end_steps)

    def _end_steps(self) -> None:
        now = asyncio.get_running_loop().time()
        self._advance(now)
        for flight in [f for f in self._flights if f.left <= 1e-9]:
            self._flights.remove(flight)
            work = flight.step.work
            self.records.append(StepRecord(now, now - flight.begun, work.rows, work.read_tokens))
            if not flight.future.done():
                flight.future.set_result(flight.step.output)
        self._set_paces()
