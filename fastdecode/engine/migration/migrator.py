"""Migrates running sequences from one R-node to another while they decode (Llumnix, arXiv 2406.03243).

K and V are only ever appended, so the K and V of cached tokens do not change. They are copied while the sequence
decodes: first its whole pages, then the rest up to its newest token, at most a page or two. Between two steps the
sequence then changes to the new R-node, and its next step computes again the few tokens that steps have cached on the
old R-node meanwhile. So a migration costs a stream no step of its mini-batch. Only a sequence with a state is left out
of steps while the rest is copied, because its state has seen all cached tokens. The R-nodes copy among themselves
(transports/migration.py). The sequence stays on the old R-node until the last page has arrived: if anything breaks
before, it continues there.

A sequence that has given back pages beyond windows is not migrated. It ends on its R-node. No sequence migrates to or
from the S-Part's own device.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastdecode.engine.migration.rebalance import Rebalancer
from fastdecode.region.contract import PAGE_TOKENS, blocks_for
from fastdecode.transports.base import CallRefused, LinkDown

if TYPE_CHECKING:
    from fastdecode.engine.migration.callbacks import Callbacks
    from fastdecode.engine.scheduling.scheduler import Scheduler
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.pages import PageTable
    from fastdecode.engine.state.prefixes import Handle
    from fastdecode.engine.state.sequence import Sequence

log = logging.getLogger(__name__)

#: Sequences that migrate off a drained R-node at the same time. One after the other, streams pause least: on two cores
#: pauses were longer with four at once.
_MOST_MIGRATIONS = 1
#: With at most this many sequences left, none begins to migrate until the last one has had a step on its new R-node: a
#: copy would make that step longer. With more, the R-node would take too long to empty.
_FEW_LEFT = 128
#: Blocks that a sequence may fill while its whole blocks are copied. One that fills more is copied again.
_SPARE_BLOCKS = 2
#: The next step of a mini-batch waits for sequences that are about to change their R-node, at most this share of the
#: time of a step. Only FORKs that read their pages take noticeable time.
_WAIT = 0.25
#: A target that has refused a sequence is not tried again for this many seconds.
_FAILED_SECONDS = 5.0
#: Seconds between two searches for a migration that evens out the loads.
_REBALANCE_SECONDS = 0.5


class MoveCancelled(Exception):
    """The move has no more use: the sequence has left its place, or an R-node is lost."""


@dataclass(frozen=True, slots=True)
class _Migration:
    """A sequence on its way from R-node `source` to R-node `target`."""

    seq: Sequence
    source: RNodeLedger
    old_handle: Handle  # on `source`
    target: RNodeLedger
    handle: Handle  # on `target`
    pages: PageTable  # on `target`

    def check(self) -> None:
        """Raise MoveCancelled if the sequence has left its R-node."""
        seq = self.seq
        if seq.node is not self.source or seq.handle != self.old_handle or seq.mini_batch is None or seq.cancelled:
            raise MoveCancelled


class Migrator:
    """Migrates sequences between R-nodes. Belongs to the engine's event loop."""

    def __init__(self, scheduler: Scheduler, engine: Callbacks):
        self._scheduler, self._cluster, self._engine = scheduler, scheduler.cluster, engine
        self._migrating: set[Sequence] = set()
        self._failed: dict[tuple[RNodeLedger, RNodeLedger], float] = {}  # source and target: when it was
        self._changed = asyncio.Event()

    def notice(self) -> None:
        """Wake the migrations that wait for a change of the scheduler's state."""
        self._changed.set()

    async def change(self, seconds: float | None = None) -> None:
        """Wait for the next change of the scheduler's state, at most `seconds`."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def settle(self, mini_batch: int) -> None:
        """Before a step of a mini-batch, let its copied sequences change their R-node."""
        if self._awaits_frozen(mini_batch):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT * (self._scheduler.step_times.base or 0.0)):
                    while self._awaits_frozen(mini_batch):
                        await self.change()

    def _awaits_frozen(self, mini_batch: int) -> bool:
        """True if a sequence of a mini-batch is frozen for its migration."""
        return any(seq.frozen and seq.mini_batch == mini_batch for seq in self._migrating)

    async def empty(self, source: RNodeLedger) -> None:
        """Migrate all sequences off an R-node that takes no new ones, and wait until it has none or is lost.

        A sequence that fits on no other R-node continues here until there is room elsewhere, or until it ends.
        """
        running = self._scheduler.running
        while source.alive and (running.on_node(source) or source.paused):
            under_way = sum(seq.node is source for seq in self._migrating)
            for seq in running.on_node(source):
                target = self._target(seq) if under_way < _MOST_MIGRATIONS and self._can_migrate(seq) else None
                if target is not None:
                    under_way += 1
                    self._begin(seq, target)
            self._engine.send()
            await self.change(_FAILED_SECONDS)

    async def rebalance(self) -> None:
        """Migrate sequences off the R-node that steps wait for, whenever that pays. Does not return."""
        rebalancer, nodes = Rebalancer(self._scheduler), self._cluster.nodes
        while True:
            await asyncio.sleep(_REBALANCE_SECONDS)
            while not self._migrating:
                candidates = [seq for seq in self._scheduler.running if self._can_migrate(seq)]
                for seq, position in rebalancer.next_migrations(candidates):
                    target = self._target(seq, [nodes[position]])
                    if target is not None:
                        self._begin(seq, target)
                        break
                else:
                    break
                while self._migrating:
                    await self.change(_FAILED_SECONDS)

    def _can_migrate(self, seq: Sequence) -> bool:
        busy = seq in self._migrating or seq.prefilling or seq.cancelled or seq.frozen
        return not (busy or seq.pages.floor or seq.placed_on.resident)

    def _target(self, seq: Sequence, among: Iterable[RNodeLedger] | None = None) -> RNodeLedger | None:
        """The R-node with room for a sequence that keeps the R-Part shortest, `among` all or some R-nodes; None: none
        has room now."""
        source, now = seq.placed_on, time.monotonic()
        self._failed = {pair: at for pair, at in self._failed.items() if now - at < _FAILED_SECONDS}
        nodes = self._cluster.nodes if among is None else among
        allowed = [
            n for n in nodes if n.open and n is not source and not n.resident and (source, n) not in self._failed
        ]
        return self._cluster.placer.migration_target(seq, _blocks_wanted(seq) * source.groups.block, allowed)

    def _begin(self, seq: Sequence, target: RNodeLedger) -> None:
        """Take pages of `target`, which has enough, and start the migration."""
        self._migrating.add(seq)
        seq.migrating = True
        tokens = _blocks_wanted(seq) * PAGE_TOKENS
        handle, pages = target.admit(tokens, None, seq.final_length, whole=True)
        self._cluster.loads.add(target.position, seq.mean_length)
        self._engine.spawn(self._migrate(_Migration(seq, seq.placed_on, seq.handle, target, handle, pages)))

    async def _migrate(self, migration: _Migration) -> None:
        seq, source, target = migration.seq, migration.source, migration.target
        done = False
        try:
            done = await self._copy(migration)
            self._cluster.totals.migrated += done
            if done and len(self._scheduler.running.on_node(source)) <= _FEW_LEFT:
                await self._step(seq, target)
        except MoveCancelled:
            pass
        except CallRefused as error:
            log.warning("a sequence could not be migrated from R-node %s to %s: %s", source.url, target.url, error)
            self._failed[source, target] = time.monotonic()
        finally:
            seq.frozen = seq.migrating = False
            self._migrating.discard(seq)
            if not done:
                self._cluster.cancel_migration(seq, target, migration.handle, migration.pages)
            self._engine.changed()

    async def _copy(self, migration: _Migration) -> bool:
        """Copy a sequence and let it continue on the target. False: it stays on its R-node.

        Raises MoveCancelled, CallRefused.
        """
        seq, source, target, pages = migration.seq, migration.source, migration.target, migration.pages
        token, url = secrets.token_hex(32), target.link.peer_url or target.url
        await self._ask(target, target.link.admit_migration(migration.handle, pages.covered, token))
        sent = 0
        while (whole := min(seq.cached, pages.covered) // PAGE_TOKENS) > sent:
            migration.check()
            await self._ask(source, source.link.migrate(migration.old_handle, range(sent, whole), 0, url, token))
            sent = whole
        migration.check()
        if seq.state is not None:  # no token may be computed again, because the state has seen it
            await self.freeze(seq, migration.check)
        cached = seq.cached
        if cached > pages.covered:
            return False  # it has grown more than was foreseen; it is tried again
        rest = range(sent, blocks_for(cached))
        await self._ask(source, source.link.migrate(migration.old_handle, rest, cached, url, token))
        await self.freeze(seq, migration.check)
        if not target.alive:
            return False
        self._scheduler.migrate(seq, target, migration.handle, pages, cached)
        self._engine.changed()  # its mini-batch waits for it
        return True

    async def freeze(self, seq: Sequence, check: Callable[[], None]) -> None:
        """Leave a sequence out of further steps, and wait until it is in none and no FORK reads its pages. `check`
        raises MoveCancelled when the wait has no more use."""
        check()
        seq.frozen = True
        while seq.in_flight or (seq.entry is not None and seq.entry.pins):
            await self.change()
            check()

    async def _step(self, seq: Sequence, node: RNodeLedger) -> None:
        """Wait for the next step of a sequence on `node`, or until it has left."""
        cached = seq.cached
        while seq.node is node and seq.mini_batch is not None and seq.cached == cached and not seq.cancelled:
            await self.change()

    async def _ask(self, node: RNodeLedger, request: Awaitable[None]) -> None:
        """Await a request to an R-node. Raises CallRefused, and MoveCancelled if the R-node is lost."""
        try:
            await request
        except LinkDown as error:
            self._engine.lost(node, error)
            raise MoveCancelled from None


def _blocks_wanted(seq: Sequence) -> int:
    """Blocks to ask of a target: the sequence's own, and some for the tokens that it generates meanwhile."""
    return min(blocks_for(seq.cached + 1) + _SPARE_BLOCKS, blocks_for(max(seq.final_length - 1, seq.cached + 1)))
