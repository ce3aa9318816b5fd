"""The contenders that take turns in a cell of the decode benchmark: the split system and peers, with a KV format each.

A contender loads and fills within its time, then decodes rounds of some steps. CutOffError and PeerError end its part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from fastdecode.bench.decoding_in_parts import DecodingInParts
from fastdecode.bench.load import Cell
from fastdecode.bench.peer_process import CutOffError, PeerError, PeerProcess
from fastdecode.bench.peers import ELEMENT_BYTES, Peer
from fastdecode.daemon.decoding import DecodeShape, kv_bytes
from fastdecode.kernels._native import loop_times, time_loops
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart import Model
from fastdecode.transports.base import TransportError

#: What loop_times returns.
LoopTimes = dict[str, tuple[int, float, float, float, float]]


class Contender(Protocol):
    """The split system or a peer, with one KV format."""

    name: str
    kv_format: str
    own: bool  # the split system, not a peer

    def needs(self, cell: Cell) -> int:
        """Bytes of memory that a cell takes beside what the contender has already."""

    async def start(self, cell: Cell, seconds: float, stop: asyncio.Event) -> None:
        """Cache the cell's tokens."""

    async def round(self, steps: int, seconds: float, stop: asyncio.Event) -> dict[str, float]:
        """Decode `steps` tokens of each sequence. Returns seconds, by what was timed: "all", and what else there is."""

    async def end(self, *, done: bool) -> None:
        """Free the cell's memory; not `done`: the contender was cut off or has failed. Idempotent."""


class SplitSystem:
    """fastdecode's split system, its S-Part and its R-Part."""

    own = True

    def __init__(self, model: Model, urls: Sequence[str], kv_dtype: str, steps: int, mini_batches: int):
        self.name, self.kv_format = "fastdecode", kv_dtype
        self._model, self._urls, self._steps, self._mini_batches = model, urls, steps, mini_batches
        self._decoding: DecodingInParts | None = None
        self.r_threads, self.isa = 0, ""  # of the R-nodes, from the first cell on
        self.exchange = ""  # of the last cell
        #: Of each round of the last cell: seconds of the S-Part alone, and the times of the loops that its threads
        #: share, alone and in the split system.
        self.loops: list[tuple[float, LoopTimes, LoopTimes]] = []

    def shape(self, cell: Cell) -> DecodeShape:
        mini_batches = min(self._mini_batches, cell.batch)
        return DecodeShape(cell.batch, cell.context, self._steps, mini_batches, self.kv_format)

    def needs(self, cell: Cell) -> int:
        return kv_bytes(self._model, self.shape(cell))

    def step_bytes(self, cell: Cell) -> float:
        """Bytes of KV-cache that a step reads, if all layers see all tokens."""
        one_block = kv_bytes(self._model, DecodeShape(1, 1, 1, 1, self.kv_format))
        return cell.batch * cell.context * one_block / PAGE_TOKENS

    async def start(self, cell: Cell, seconds: float, stop: asyncio.Event) -> None:
        end = time.perf_counter() + seconds
        self.loops.clear()
        try:
            self._decoding = await DecodingInParts.open(self._model, self._urls, self.shape(cell))
        except (TransportError, ValueError) as error:
            raise PeerError(str(error)) from None
        links = self._decoding.links
        self.r_threads, self.isa = sum(link.lease.threads for link in links), links[0].lease.isa
        if not await self._decoding.fill(lambda: not stop.is_set() and time.perf_counter() < end):
            raise CutOffError

    async def round(self, steps: int, seconds: float, stop: asyncio.Event) -> dict[str, float]:
        assert self._decoding
        time_loops(True)
        split = (await self._decoding.split_round()).elapsed
        in_split = loop_times()
        self.exchange = str(self._decoding.spart.exchange)
        time_loops(True)
        s_part = await self._decoding.s_round()
        self.loops.append((s_part, loop_times(), in_split))
        time_loops(False)
        return {"all": split, "s": s_part, "r": await self._decoding.r_round()}

    async def end(self, *, done: bool) -> None:
        if self._decoding:
            await self._decoding.close()
            self._decoding = None


class PeerRun:
    """A peer with one KV format. Its process stays from cell to cell, until it is cut off, fails or is closed."""

    own = False

    def __init__(self, peer: Peer, kv_format: str, token_elements: int, weight_bytes: int):
        """`token_elements`: elements of a token's K and V in all layers. `weight_bytes` of the loaded model."""
        self.name, self.kv_format = peer.name, kv_format
        self._peer, self._weight_bytes = peer, weight_bytes
        self._token_bytes = token_elements * ELEMENT_BYTES[kv_format]
        self._process: PeerProcess | None = None
        self._room = 0  # bytes of KV-cache that the process has reserved
        self._refusal = ""  # why the process does not start
        self._too_much: list[Cell] = []  # cells in which it was cut off before it had its context

    def _kv_bytes(self, cell: Cell) -> int:
        return int(cell.batch * (cell.context + self._peer.load.steps) * self._token_bytes)

    async def load(self, cell: Cell, seconds: float, stop: asyncio.Event) -> None:
        """Start the process, if there is none with room for a cell. A peer that does not start refuses all cells."""
        needed = self._kv_bytes(cell)
        reserved = self._peer.reserved(needed) or 0
        if self._process and reserved > self._room:
            await self.close()
        if self._process or self._refusal or self._cut_off_by(cell):
            return
        self._room = reserved
        self._process = await PeerProcess.start(*self._peer.command(self.kv_format, needed))
        try:
            await self._process.answer(seconds, stop)
        except PeerError as error:
            self._refusal = f"does not start: {error}"
        except CutOffError:
            self._refusal = "interrupted" if stop.is_set() else f"does not start: cut off after {seconds:g} s"

    def _cut_off_by(self, cell: Cell) -> Cell | None:
        """A cell no larger than this one in which the peer was cut off before it had its context."""
        return next((less for less in self._too_much if cell.holds(less)), None)

    def needs(self, cell: Cell) -> int:
        if self._refusal or self._cut_off_by(cell):
            return 0
        needed = self._kv_bytes(cell)
        reserved = self._peer.reserved(needed)
        if self._process:
            return needed if reserved is None else max(0, reserved - self._room)
        return self._weight_bytes + (needed if reserved is None else reserved)

    async def start(self, cell: Cell, seconds: float, stop: asyncio.Event) -> None:
        if self._refusal:
            raise PeerError(self._refusal)
        if less := self._cut_off_by(cell):
            raise PeerError(f"not tried: cut off at {less}")
        assert self._process
        question = {"do": "fill", "batch": cell.batch, "context": cell.context, "format": self.kv_format}
        try:
            await self._process.ask(seconds, stop, **question)
        except CutOffError:
            if not stop.is_set():
                self._too_much.append(cell)
            raise

    async def round(self, steps: int, seconds: float, stop: asyncio.Event) -> dict[str, float]:
        assert self._process
        reply = await self._process.ask(seconds, stop, do="round", steps=steps)
        return {"all": reply["seconds"]}

    async def end(self, *, done: bool) -> None:
        if not done:
            await self.close()
        elif self._process:
            try:
                await self._process.ask(10.0, asyncio.Event(), do="clear")
            except (CutOffError, PeerError):
                await self.close()

    async def close(self) -> None:
        """End the process. Idempotent."""
        if self._process:
            await self._process.kill()
            self._process, self._room = None, 0
