"""Moves of idle prefixes: entries of the prefix cache leave the S-Part's device for an R-node before pages of running
sequences do, and come back when a prompt asks for them.

A prefix that moves is an entry in prefill of its new place's index, so prompts that begin like it wait for it. An entry
has pages of one place, and is lost with that place. Where the new place has the beginning of a prefix already, a FORK
shares those pages, and only the others are copied.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastdecode.engine.migration.page_copies import copy_to_device, copy_to_r_node
from fastdecode.engine.state.prefixes import CachedSequence, PrefixEntry
from fastdecode.region.contract import PAGE_TOKENS, blocks_for
from fastdecode.transports.base import CallRefused, LinkDown

if TYPE_CHECKING:
    from fastdecode.engine.migration.callbacks import Callbacks
    from fastdecode.engine.scheduling.cluster import Cluster
    from fastdecode.engine.state.ledger import RNodeLedger

log = logging.getLogger(__name__)

#: No prefix moves for this many seconds after a move that has failed.
_FAILED_SECONDS = 1.0
#: Not the number of a token. The index never shares the last token of a prompt; behind this one it shares all others.
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class PrefixMove:
    """The first `length` tokens of `entry` on `source` are to be the entry `new` of `target`."""

    source: RNodeLedger
    entry: PrefixEntry
    target: RNodeLedger
    new: PrefixEntry
    length: int
    base: PrefixEntry | None  # the entry of `target` that has the first `shared` tokens; None: there is none
    shared: int  # of whole pages

    @property
    def pages(self) -> range:
        """The blocks to copy."""
        return range(self.shared // PAGE_TOKENS, blocks_for(self.length))


class PrefixMoves:
    """Moves idle prefixes from the S-Part's device to R-nodes and back. Belongs to the engine's event loop."""

    def __init__(
        self, cluster: Cluster, copying: asyncio.Lock, pause: Callable[[], Awaitable[None]], engine: Callbacks
    ):
        """`copying` is held while pages are copied; `pause` is awaited between two pieces that come back."""
        self.move: PrefixMove | None = None  # whose pages are being copied
        self._cluster, self._copying, self._pause, self._engine = cluster, copying, pause, engine
        self._device = cluster.nodes[0]
        self._spills: deque[PrefixMove] = deque()
        self._spilling = False  # `_spill_all` runs
        self._returning: dict[PrefixEntry, PrefixEntry] = {}  # entries of R-nodes, and their copies on the device
        self._failed: float | None = None  # when a move has failed last

    @property
    def busy(self) -> bool:
        """True if a prefix moves, or is to move."""
        return self._spilling or bool(self._returning)

    def spill(self, entry: PrefixEntry) -> bool:
        """Begin to move an entry that the device's index has lost. False: it cannot move, or an R-node has its tokens.
        True: RNodeLedger.free_spilled follows once the device's pages have been read."""
        if not self._may_move(entry):
            return False
        length, candidates = len(entry.tokens), []
        for node in self._cluster.nodes:
            if node.open and not node.resident:
                base, shared = self._known(node, entry, length)
                if shared == length:
                    return False
                if node.fits_prefix(node.groups.block * (blocks_for(length) - shared // PAGE_TOKENS)):
                    candidates.append((node, base, shared))
        if not candidates:
            return False
        target, base, shared = max(candidates, key=lambda found: (found[2], -found[0].load))
        self._spills.append(self._begin(self._device, entry, target, length, base, shared))
        if not self._spilling:
            self._spilling = True
            self._engine.spawn(self._spill_all())
        return True

    def may_return(self, entry: PrefixEntry) -> bool:
        """True if an entry of an R-node may come back to the device."""
        return entry in self._returning or (not entry.running and self._may_move(entry))

    def bring_back(self, node: RNodeLedger, entry: PrefixEntry, length: int) -> PrefixEntry:
        """Begin to copy the first `length` tokens of an entry, which may return, from an R-node to the device, which
        has enough free pages. Returns the entry of the device. An entry all of which was copied leaves its R-node."""
        if entry in self._returning:
            return self._returning[entry]
        move = self._begin(node, entry, self._device, length, *self._known(self._device, entry, length))
        entry.pins += 1
        self._returning[entry] = move.new
        self._engine.spawn(self._return(move))
        return move.new

    def _may_move(self, entry: PrefixEntry) -> bool:
        """True if an entry has all of its pages, and no move has failed just now."""
        failed = self._failed is not None and time.monotonic() - self._failed < _FAILED_SECONDS
        return not failed and not entry.floor

    @staticmethod
    def _known(node: RNodeLedger, entry: PrefixEntry, length: int) -> tuple[PrefixEntry | None, int]:
        """The entry of `node` with the most of the first `length` tokens of `entry`, and their number: that of all, or
        of whole pages."""
        tokens = [*entry.tokens[:length], _NO_TOKEN]
        found = node.prefixes.match(tokens, entry.hashes[: length // PAGE_TOKENS])
        if found is None or found[0].floor:
            return None, 0
        base, shared = found
        return base, shared if shared == length else shared - shared % PAGE_TOKENS

    @staticmethod
    def _begin(
        source: RNodeLedger,
        entry: PrefixEntry,
        target: RNodeLedger,
        length: int,
        base: PrefixEntry | None,
        shared: int,
    ) -> PrefixMove:
        """Take pages and an index of `target`, and let prompts wait for the entry there."""
        shared -= shared % PAGE_TOKENS
        handle, pages = target.admit(length, base.share(shared) if base is not None else None, length, whole=True)
        hashes = entry.hashes[: length // PAGE_TOKENS]
        new = PrefixEntry(CachedSequence(handle, pages), [], hashes, entry.salt, running=True, computed=False)
        target.prefixes.insert(new)
        if base is not None:
            base.pins += 1
        return PrefixMove(source, entry, target, new, length, base, shared)

    async def _spill_all(self) -> None:
        """Move the entries that wait, the one that was evicted first before the others."""
        try:
            while self._spills:
                move = self._spills.popleft()
                await self._run(move, move.target)
                self._device.free_spilled(move.entry.cached)
                self._engine.changed()
        finally:
            self._spilling = False

    async def _return(self, move: PrefixMove) -> None:
        entry, source = move.entry, move.source
        try:
            done = await self._run(move, source)
        finally:
            entry.pins -= 1
            del self._returning[entry]
        if done and move.length == len(entry.tokens) and entry in source.prefixes and not entry.pins:
            source.evict(entry)
        self._engine.changed()

    async def _run(self, move: PrefixMove, r_node: RNodeLedger) -> bool:
        """Copy a prefix from or to an R-node; True if its new place has it then."""
        done = False
        try:
            async with self._copying:
                self.move = move
                await self._copy(move)
            done = move.target.open
        except CallRefused as error:
            log.warning("a prefix could not move between the GPU and R-node %s: %s", r_node.url, error)
            self._failed = time.monotonic()
        except LinkDown as error:
            self._engine.lost(r_node, error)
        finally:
            self.move = None
            self._end(move, done)
        return done

    async def _copy(self, move: PrefixMove) -> None:
        source, target, old, new = move.source, move.target, move.entry.cached.handle, move.new.cached.handle
        if move.base is not None and move.shared:
            await target.link.fork(move.base.cached.handle, new, move.shared)
        if target is self._device:
            await copy_to_device(source, old, move.pages, target, new, move.length, self._pause)
        else:
            await copy_to_r_node(source, old, move.pages.start, target, new, move.length)

    def _end(self, move: PrefixMove, done: bool) -> None:
        """Let prompts share the entry, or release its pages."""
        target, new, length = move.target, move.new, move.length
        if move.base is not None:
            move.base.pins -= 1
        target.end_running(length)
        if not done:
            if new in target.prefixes:
                target.prefixes.remove(new)
            target.release(new.cached)
            return
        target.pages.make_idle(new.cached.pages)
        target.prefixes.mark_ended(new, new.cached, move.entry.tokens[:length])
        if length == len(move.entry.tokens):
            self._cluster.states.rename(move.entry, new)
        n_bytes = len(move.pages) * round(self._device.token_bytes * PAGE_TOKENS)
        if target is self._device:
            self._cluster.totals.refilled_bytes += n_bytes
        else:
            self._cluster.totals.spilled_bytes += n_bytes
            target.keep_headroom()
