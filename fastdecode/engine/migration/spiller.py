"""Spills the oldest pages of sequences on the S-Part's device to R-nodes while they decode.

When a running sequence lacks a page there, the longest one gives up half of its whole blocks, the oldest: the sequence
is cut. The R-node then attends to the tokens before the cut and the device to the others, to which new tokens are
appended (spart/step/batch.RemotePrefix). K and V of a whole page do not change, so they are copied while the sequence
decodes; the cut moves between two steps, and only then are the device's pages free. If anything breaks before, the
sequence goes on as it was.

A prefix that grows is a FORK of the old one, which steps use until the cut moves.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import TYPE_CHECKING, cast

from fastdecode.engine.state.sequence import SpilledPrefix
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.transports.base import CallRefused, LinkDown

if TYPE_CHECKING:
    from fastdecode.engine.migration.migrator import Migrator
    from fastdecode.engine.scheduling.scheduler import Scheduler
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.prefixes import Handle
    from fastdecode.engine.state.sequence import Sequence
    from fastdecode.spart.resident.link import ResidentLink

log = logging.getLogger(__name__)

#: Nothing is spilled for this many seconds after a spill that has failed.
_FAILED_SECONDS = 1.0


class _SpillCancelled(Exception):
    """The spill has no more use: the sequence has left the device, or the R-node is lost."""


class Spiller:
    """Belongs to the engine's event loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        migrator: Migrator,
        spawn: Callable[[Coroutine[None, None, None]], None],
        on_change: Callable[[], None],
        lost: Callable[[RNodeLedger, Exception], None],
    ):
        """`spawn` and `on_change`: see RNodeControl. `lost` is called for an R-node whose link is down."""
        self.spilled = 0  # cuts
        self._scheduler, self._cluster, self._migrator = scheduler, scheduler.cluster, migrator
        self._spawn, self._on_change, self._lost = spawn, on_change, lost
        self._spilling: Sequence | None = None
        self._failed: float | None = None  # when a spill has failed last

    def spill(self, node: RNodeLedger) -> bool:
        """Begin to spill pages of a sequence on the S-Part's device `node`, which lacks some. True if pages are being
        spilled now."""
        if self._spilling is not None:
            return True
        if self._failed is not None and time.monotonic() - self._failed < _FAILED_SECONDS:
            return False
        candidates = [seq for seq in self._scheduler.running.on_node(node) if self._blocks(seq)]
        for seq in sorted(candidates, key=self._blocks, reverse=True):
            target = self._target(seq)
            if target is not None:
                self._begin(seq, target)
                return True
        return False

    def _blocks(self, seq: Sequence) -> int:
        """The blocks that a sequence would spill, whose pages no other sequence holds; 0: it cannot be cut."""
        busy = seq.prefilling or seq.cancelled or seq.held or seq.migrating
        if busy or not cast("ResidentLink", seq.placed_on.link).may_cut:
            return 0
        whole = seq.cached // PAGE_TOKENS - seq.cut // PAGE_TOKENS
        blocks = (whole + 1) // 2
        own = all(page.exclusive for page in islice(seq.pages.held[0], blocks))
        return blocks if own else 0

    def _target(self, seq: Sequence) -> RNodeLedger | None:
        """The R-node with room for the pages of a sequence: the one that has its prefix, else the least loaded one."""
        nodes = [seq.prefix.node] if seq.prefix is not None else self._cluster.nodes
        cut = sum(other.prefix is not None for other in self._scheduler.running)
        limits = self._scheduler.limits
        rows = limits.max_batch_tokens + min(cut + 1, limits.max_seqs)  # a query with a prefix has two rows in a slot
        needed = self._blocks(seq) * seq.placed_on.groups.block
        fit = [
            node
            for node in nodes
            if node.open
            and not node.resident
            and not node.link.lease.isa.startswith("cuda")  # no GPU's R-engine answers partial rows
            and node.has_free_index
            and rows <= node.link.geometry.max_rows
            and needed + self._cluster.placer.watermark(node) <= node.free_pages
        ]
        return min(fit, key=lambda node: node.load, default=None)

    def _begin(self, seq: Sequence, target: RNodeLedger) -> None:
        length = seq.cut + self._blocks(seq) * PAGE_TOKENS
        self._spilling = seq
        seq.migrating = True
        shared = None if seq.prefix is None else seq.prefix.pages.share(seq.cut)
        handle, pages = target.admit(length, shared, length, whole=True)
        self._spawn(self._spill(seq, SpilledPrefix(target, handle, pages, length)))

    async def _spill(self, seq: Sequence, prefix: SpilledPrefix) -> None:
        done, node, handle = False, seq.placed_on, seq.handle
        try:
            await self._copy(seq, prefix, node, handle)
            await self._hold(seq, prefix, node, handle)
            done = True
            self._cut(seq, prefix)
            self.spilled += 1
        except _SpillCancelled:
            pass
        except CallRefused as error:
            log.warning("pages could not be spilled to R-node %s: %s", prefix.node.url, error)
            self._failed = time.monotonic()
        except LinkDown as error:
            self._lost(prefix.node, error)
        finally:
            seq.held = seq.migrating = False
            self._spilling = None
            if not done:
                prefix.release()
            self._on_change()

    def _cut(self, seq: Sequence, prefix: SpilledPrefix) -> None:
        """Let a sequence go on with the new prefix, whose pages on the device are free then."""
        node = seq.placed_on
        given_back = self._cluster.cut(seq, prefix)
        cast("ResidentLink", node.link).drop_blocks(seq.handle, prefix.length // PAGE_TOKENS)
        node.pages.freed(given_back)

    async def _copy(self, seq: Sequence, prefix: SpilledPrefix, node: RNodeLedger, handle: Handle) -> None:
        """Copy the pages from the present cut to the new one; the sequence has a `handle` on the device `node`. Raises
        CallRefused, LinkDown."""
        target, token, old = prefix.node, secrets.token_hex(32), seq.prefix
        first = seq.cut // PAGE_TOKENS
        if old is not None:
            await target.link.fork(old.handle, prefix.handle, old.length)
        await target.link.admit_migration(prefix.handle, prefix.length, token)
        url = target.link.peer_url or target.url
        pages = range(first, prefix.length // PAGE_TOKENS)
        await node.link.migrate(handle, pages, prefix.length, url, token)

    async def _hold(self, seq: Sequence, prefix: SpilledPrefix, node: RNodeLedger, handle: Handle) -> None:
        """Leave a sequence out of further steps, and wait until it is in none and no FORK reads its pages. Raises
        _SpillCancelled."""
        seq.held = True
        while True:
            gone = seq.node is not node or seq.handle != handle or seq.mini_batch is None or seq.cancelled
            if gone or not prefix.node.alive:
                raise _SpillCancelled
            if not (seq.in_flight or (seq.entry is not None and seq.entry.pins)):
                return
            await self._migrator.change()
