"""One cell of the decode benchmark: its contenders take turns, each within a bounded time.

All contenders of a cell have their KV-caches in memory at once where they fit. Where they do not, each KV format of
fastdecode takes turns with the peers in their nearest formats and, if even these do not fit beside each other, a
contender runs alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tqdm import tqdm

from fastdecode.bench.contenders import Contender, PeerRun, SplitSystem
from fastdecode.bench.load import Cell
from fastdecode.bench.peer_process import CutOffError, PeerError
from fastdecode.daemon.machine import available_memory
from fastdecode.daemon.option_values import format_bytes

#: Rounds of a cell are numbered in steps of this for each group; the first one of a group is its warm-up.
GROUP_ROUNDS = 1 << 20
_SETTLE_SECONDS = 0.02  # in which the OpenMP threads of the last contender stop spinning
_MEMORY_SHARE = 0.92  # of the free memory that caches may take; the rest is for activations and copies

T = TypeVar("T")


@dataclass(slots=True)
class Measured:
    """What a contender has done in a cell."""

    #: Seconds of each round, by what was timed. Rounds of different contenders with one number were taken in turns.
    rounds: dict[int, dict[str, float]] = field(default_factory=dict)
    note: str = ""  # why there are fewer rounds than asked for

    @property
    def judged(self) -> dict[int, dict[str, float]]:
        """The rounds that count: all but warm-ups, or those if there are no others."""
        return {n: seconds for n, seconds in self.rounds.items() if n % GROUP_ROUNDS} or self.rounds


@dataclass(frozen=True, slots=True)
class Limits:
    """What a cell may take."""

    steps: int
    rounds: int
    seconds: float  # of one contender, filling included
    load_seconds: float  # of a peer's start
    stop: asyncio.Event  # set: end now, with what there is


async def measure(
    cell: Cell, splits: Sequence[SplitSystem], peers: dict[str, list[PeerRun]], limits: Limits
) -> dict[Contender, Measured]:
    """Measure a cell. `peers` are those in the nearest format to each KV format of the `splits`."""
    runs = list(dict.fromkeys(run for split in splits for run in peers[split.kv_format]))
    everyone: list[Contender] = [*splits, *runs]
    measured: dict[Contender, Measured] = {contender: Measured() for contender in everyone}
    groups = [everyone]
    if sum(contender.needs(cell) for contender in everyone) > _free():
        for run in runs:  # a process that does not take part needs memory, too
            await run.close()
        groups = _groups(cell, splits, peers, measured)
    for number, group in enumerate(groups):
        if not limits.stop.is_set():
            await take_turns(cell, {contender: measured[contender] for contender in group}, limits, number)
            for run in runs if len(groups) > 1 else []:
                await run.close()
    return measured


def _free() -> int:
    return int(_MEMORY_SHARE * available_memory())


def _groups(
    cell: Cell, splits: Sequence[SplitSystem], peers: dict[str, list[PeerRun]], measured: dict[Contender, Measured]
) -> list[list[Contender]]:
    """Contenders whose caches fit into memory beside each other. Contenders that do not fit alone get a note."""
    groups: list[list[Contender]] = []
    free = _free()
    for split in splits:
        left = 0
        mine: list[Contender] = [split, *peers[split.kv_format]]
        for contender in mine:
            needed = contender.needs(cell)
            if needed > free:
                measured[contender].note = f"needs {format_bytes(needed)} of memory; {format_bytes(free)} are free"
            elif contender is split or needed > left:
                groups.append([contender])
                left = free - needed
            else:
                groups[-1].append(contender)
                left -= needed
    return groups


async def take_turns(cell: Cell, measured: dict[Contender, Measured], limits: Limits, number: int) -> None:
    """Measure a group of contenders in turns; a round's number includes the group's."""
    left = dict.fromkeys(measured, limits.seconds)
    running: list[Contender] = []
    first = number * GROUP_ROUNDS

    async def within(contender: Contender, step: Awaitable[T]) -> T | None:
        """The result of something that a contender does in its time; None if it can do no more."""
        begun, result, mine = time.perf_counter(), None, measured[contender]
        try:
            result = await step
        except (CutOffError, PeerError) as error:
            mine.note = str(error) or ("interrupted" if limits.stop.is_set() else _cut_off(limits))
            await contender.end(done=False)
        left[contender] -= time.perf_counter() - begun
        return result

    try:
        for contender in measured:
            if isinstance(contender, PeerRun):
                await contender.load(cell, limits.load_seconds, limits.stop)
            await within(contender, contender.start(cell, left[contender], limits.stop))
            if not measured[contender].note:
                running.append(contender)
        has_split = any(contender.own for contender in running)
        for n in tqdm(range(first, first + limits.rounds + 1), desc=str(cell), unit="round", leave=False):
            for contender in list(running):
                mine = measured[contender]
                await asyncio.sleep(_SETTLE_SECONDS)
                if left[contender] <= 0 or limits.stop.is_set():
                    mine.note = "interrupted" if limits.stop.is_set() else _cut_off(limits)
                elif seconds := await within(contender, contender.round(limits.steps, left[contender], limits.stop)):
                    mine.rounds[n] = seconds
                if mine.note:
                    running.remove(contender)
            if not running or (has_split and not any(contender.own for contender in running)):
                break
    finally:
        for contender in measured:
            await contender.end(done=True)


def _cut_off(limits: Limits) -> str:
    return f"cut off after {limits.seconds:g} s"
