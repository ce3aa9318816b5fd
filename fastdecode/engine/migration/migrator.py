"""Moves running sequences from one R-node to another while they go on (Llumnix, arXiv 2406.03243).

K and V are only ever appended, so those of cached tokens do not change. They are copied while the sequence goes on:
first its whole pages, then the rest up to its newest token, at most a page or two. Between two steps the sequence then
changes its place, and its next step computes the few tokens again that steps have cached meanwhile at the old place.
So a move costs a stream no step of its mini-batch. The R-nodes copy among themselves (transports/migration.py). Until
the last page has arrived the sequence stays where it is: whatever breaks before, it goes on there.

A sequence that has given back pages beyond windows is not moved. It ends where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING

from fastdecode.engine.migration.rebalance import Rebalancer
from fastdecode.engine.state.ledger import RNodeLedger
from fastdecode.engine.state.pages import blocks_for
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.transports.base import CallRefused, LinkDown

if TYPE_CHECKING:
    from fastdecode.engine.scheduling.scheduler import Scheduler
    from fastdecode.engine.state.pages import PageTable
    from fastdecode.engine.state.prefixes import Handle
    from fastdecode.engine.state.sequence import Sequence

log = logging.getLogger(__name__)

#: Sequences that are moved off an R-node at the same time. One after the other, streams pause least: on two cores
#: pauses were longer with four at once.
_TOGETHER = 1
#: With at most this many sequences to move, none begins to move until the last one has had a step at its new place: its
#: copy would make that step longer. With more, the R-node would take too long to empty.
_APART = 128
#: Blocks that a sequence may fill while its whole blocks are copied. One that fills more is copied again.
_SPARE_BLOCKS = 2
#: The next step of a mini-batch waits for sequences that are about to change their place, at most this part of the time
#: of a step. Only FORKs that read their pages take noticeable time.
_WAIT = 0.25
#: A target that has failed to take a sequence is not tried again for these seconds.
_FAILED_SECONDS = 5.0
#: Seconds between two searches for a move that evens out the loads.
_REBALANCE_SECONDS = 0.5


class _CalledOff(Exception):
    """The move has no more use: the sequence has left its R-node, or one of the two R-nodes is lost."""


class Mover:
    """Moves sequences between R-nodes. Belongs to the engine's event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        spawn: Callable[[Coroutine[None, None, None]], None],
        send: Callable[[], None],
        on_change: Callable[[], None],
        lost: Callable[[RNodeLedger, Exception], None],
    ):
        """`spawn` and `on_change`: see RNodeControl. `send` sends the FREEs and RESIZEs that a ledger has asked for;
        `lost` is called for an R-node whose link is down."""
        self.moved = 0  # sequences
        self._scheduler, self._cluster = scheduler, scheduler.cluster
        self._spawn, self._send, self._on_change, self._lost = spawn, send, on_change, lost
        self._moving: set[Sequence] = set()
        self._failed: dict[tuple[RNodeLedger, RNodeLedger], float] = {}  # source and target: when it was
        self._changed = asyncio.Event()

    def notice(self) -> None:
        """Wake the moves that wait for a change of the scheduler's state."""
        self._changed.set()

    async def change(self, seconds: float | None = None) -> None:
        """Wait for the next change of the scheduler's state, at most `seconds`."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def settle(self, mini_batch: int) -> None:
        """Before a step of a mini-batch, let its sequences that have been copied change their place."""
        if self._holds(mini_batch):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT * (self._scheduler.step_times.base or 0.0)):
                    while self._holds(mini_batch):
                        await self.change()

    def _holds(self, mini_batch: int) -> bool:
        """True if a sequence of a mini-batch is held."""
        return any(seq.held and seq.mini_batch == mini_batch for seq in self._moving)

    async def empty(self, source: RNodeLedger) -> None:
        """Move all sequences off an R-node that takes no new ones, and wait until it has none or is lost.

        A sequence that fits nowhere goes on where it is until there is room elsewhere, or until it ends.
        """
        while source.alive and ((running := self._scheduler.running_on(source)) or source.paused):
            under_way = sum(seq.node is source for seq in self._moving)
            for seq in running:
                if under_way < _TOGETHER and self._movable(seq) and (target := self._target(seq)) is not None:
                    under_way += 1
                    self._begin(seq, target)
            self._send()
            await self.change(_FAILED_SECONDS)

    async def rebalance(self) -> None:
        """Move sequences off the R-node that steps wait for, whenever that pays. Does not return."""
        rebalancer, nodes = Rebalancer(self._scheduler), self._cluster.nodes
        while True:
            await asyncio.sleep(_REBALANCE_SECONDS)
            while not self._moving:
                movable = [seq for seq in self._scheduler.running if self._movable(seq)]
                for seq, position in rebalancer.next_move(movable):
                    if (target := self._target(seq, [nodes[position]])) is not None:
                        self._begin(seq, target)
                        break
                else:
                    break
                while self._moving:
                    await self.change(_FAILED_SECONDS)

    def _movable(self, seq: Sequence) -> bool:
        return not (seq in self._moving or seq.prefilling or seq.cancelled or seq.held or seq.pages.floor)

    def _target(self, seq: Sequence, among: Iterable[RNodeLedger] | None = None) -> RNodeLedger | None:
        """The R-node with room for a sequence that keeps the R-Part shortest, of all or of some; None: there is none
        now."""
        source, now = seq.placed_on, time.monotonic()
        self._failed = {pair: at for pair, at in self._failed.items() if now - at < _FAILED_SECONDS}
        nodes = self._cluster.nodes if among is None else among
        allowed = [n for n in nodes if n is not source and (source, n) not in self._failed]
        return self._cluster.target(seq, _blocks_wanted(seq) * source.groups.block, allowed)

    def _begin(self, seq: Sequence, target: RNodeLedger) -> None:
        """Take pages of `target`, which has enough, and start the move."""
        self._moving.add(seq)
        seq.moving = True
        tokens = _blocks_wanted(seq) * PAGE_TOKENS
        handle, pages = target.admit(tokens, None, seq.final_length, whole=True)
        self._cluster.loads.add(target.position, seq.mean_length)
        self._spawn(self._move(seq, (seq.placed_on, seq.handle), target, handle, pages))

    async def _move(
        self, seq: Sequence, old: tuple[RNodeLedger, Handle], target: RNodeLedger, handle: Handle, pages: PageTable
    ) -> None:
        """Move a sequence from `old`, its R-node and handle when the move began."""
        source, done = old[0], False
        try:
            done = await self._copy(seq, *old, target, handle, pages)
            self.moved += done
            if done and len(self._scheduler.running_on(source)) <= _APART:
                await self._step(seq, target)
        except _CalledOff:
            pass
        except CallRefused as error:
            log.warning("a sequence could not be moved from R-node %s to %s: %s", source.url, target.url, error)
            self._failed[source, target] = time.monotonic()
        finally:
            seq.held = seq.moving = False
            self._moving.discard(seq)
            if not done:
                self._cluster.take_back(target, seq, handle, pages)
            self._on_change()

    async def _copy(
        self,
        seq: Sequence,
        source: RNodeLedger,
        old: Handle,
        target: RNodeLedger,
        handle: Handle,
        pages: PageTable,
    ) -> bool:
        """Copy a sequence and let it go on at `target`. False if it has been left where it was.

        Raises _CalledOff, CallRefused.
        """
        token, url = secrets.token_hex(32), target.link.peer_url or target.url
        await self._ask(target, target.link.admit_migration(handle, pages.covered, token))
        sent = 0
        while (whole := min(seq.cached, pages.covered) // PAGE_TOKENS) > sent:
            self._check(seq, source, old)
            await self._ask(source, source.link.migrate(old, range(sent, whole), 0, url, token))
            sent = whole
        self._check(seq, source, old)
        if (cached := seq.cached) > pages.covered:
            return False  # it has grown more than was foreseen; it is tried again
        await self._ask(source, source.link.migrate(old, range(sent, blocks_for(cached)), cached, url, token))
        self._check(seq, source, old)
        seq.held = True
        while seq.in_flight or (seq.entry is not None and seq.entry.pins):
            await self.change()
            self._check(seq, source, old)
        if not target.alive:
            return False
        self._scheduler.move(seq, target, handle, pages, cached)
        self._on_change()  # its mini-batch waits for it
        return True

    async def _step(self, seq: Sequence, node: RNodeLedger) -> None:
        """Wait for the next step of a sequence on `node`, or until it has left."""
        cached = seq.cached
        while seq.node is node and seq.mini_batch is not None and seq.cached == cached and not seq.cancelled:
            await self.change()

    async def _ask(self, node: RNodeLedger, request: Awaitable[None]) -> None:
        """Await a request to an R-node. Raises CallRefused, and _CalledOff if the R-node is lost."""
        try:
            await request
        except LinkDown as error:
            self._lost(node, error)
            raise _CalledOff from None

    @staticmethod
    def _check(seq: Sequence, source: RNodeLedger, handle: Handle) -> None:
        if seq.node is not source or seq.handle != handle or seq.mini_batch is None or seq.cancelled:
            raise _CalledOff


def _blocks_wanted(seq: Sequence) -> int:
    """Blocks to ask of a target: the sequence's own, and some for what it generates meanwhile."""
    return min(blocks_for(seq.cached + 1) + _SPARE_BLOCKS, blocks_for(max(seq.final_length - 1, seq.cached + 1)))
