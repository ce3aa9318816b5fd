"""Measures the cost of the engine: its own code runs over an S-Part that answers at once, so that all of the time is
the engine's."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass
from typing import Any, cast

from fastdecode.engine.engine import Engine
from fastdecode.engine.scheduling.options import EngineOptions
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.engine.state.request import EngineError, SamplingParams, TokenEvent
from fastdecode.plan.model import PlannedModel
from fastdecode.plan.virtual_system import WORD, UncomputedSPart, VirtualLink
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.step.batch import Sampled, StepBatch, StepOutput

_FEW, _MANY = 1, 129  # rows of a step
_OUTPUTS = 200  # tokens of each sequence
_PAGES_OF_A_SEQUENCE = 4


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Seconds of the engine's code."""

    step: float  # for a step
    row: float  # for each decoding row of it

    @classmethod
    def from_steps(cls, few: float, many: float) -> EngineCost:
        """The cost by two measurements: seconds of a step of 1 row and of one of 129 rows."""
        row = max(0.0, many - few) / (_MANY - _FEW)
        return cls(max(0.0, few - row * _FEW), row)


async def engine_cost(model: PlannedModel, repeat: int = 3) -> EngineCost:
    """Measure the engine's cost in the running event loop, the fastest of `repeat` times; takes about a second."""
    few = min([await _step_seconds(model, _FEW) for _ in range(repeat)])
    many = min([await _step_seconds(model, _MANY) for _ in range(repeat)])
    return EngineCost.from_steps(few, many)


async def _step_seconds(model: PlannedModel, rows: int) -> float:
    """Seconds of the engine for a step of `rows` decoding rows."""
    memory = rows * _PAGES_OF_A_SEQUENCE * model.token_bytes("fp16") * PAGE_TOKENS
    link = VirtualLink("0", model, "fp16", memory, 2 * rows, rows + 1, 1)
    parts: tuple[Any, Any] = _InstantSPart(), [link]
    engine = Engine(
        *parts,
        EngineOptions(SchedulerLimits(mini_batches=1, max_batch_tokens=rows + 1, max_batch_size=rows), max_queued=rows),
        start_runner=lambda: cast(Any, _InstantSPart()),
    )
    await engine.start()
    begun = asyncio.get_running_loop().create_future()
    ended = asyncio.get_running_loop().create_future()
    tokens = 0

    def output(event: TokenEvent | EngineError) -> None:
        nonlocal tokens
        tokens += 1
        if tokens == rows:
            begun.set_result(time.perf_counter())
        if tokens == rows * _OUTPUTS:
            ended.set_result(time.perf_counter())

    gc.disable()
    try:
        for i in range(rows):
            engine.submit_choices([WORD], SamplingParams(max_tokens=_OUTPUTS, seed=i), {str(i): output})
        seconds: float = await ended - await begun
    finally:
        gc.enable()
        await engine.stop()
    return seconds / (_OUTPUTS - 1)


class _InstantSPart(UncomputedSPart):
    """An S-Part and a runner that answer at once."""

    def __init__(self) -> None:
        super().__init__((), 1 << 20)

    def step(self, batch: StepBatch) -> StepOutput:
        sampled = Sampled(WORD)
        return StepOutput([sampled if chunk.sample else None for chunk in batch.chunks], 0.0, 0.0, 0)

    def submit(self, output: StepOutput) -> asyncio.Future[StepOutput]:
        future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        future.set_result(output)
        return future

    def stop(self) -> None:
        """Nothing was started."""
