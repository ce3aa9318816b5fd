"""The S-node's account of one R-node: its lease, pages, sequence indexes, load and prefix entries.

The S-node counts and the R-node checks; nothing here talks to a peer. A released page or sequence index counts as free
only after the R-node has acknowledged the FREE (`acknowledge_free`). A page that several sequences share counts once
(pages.py).

A lease that may grow is asked to grow ahead of need: when less than a quarter of it is unused, or when a sequence needs
more pages than the lease has. Pages that only the prefix cache holds count as unused, because they can be evicted,
unless the R-node could give at least twice the larger lease.

Pages that no later row of a running sequence sees, because windows have left them behind, stay as long as no sequence
lacks pages: other prompts may share them. Then the sequences give them back in their next steps (`slide`).
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Protocol

from fastdecode.engine.state.bandwidth import Bandwidth
from fastdecode.engine.state.pages import PageBook, PageGroups, PageTable
from fastdecode.engine.state.prefixes import CachedSequence, Handle, PrefixEntry, PrefixIndex
from fastdecode.region.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastdecode.engine.state.pages import Page
    from fastdecode.transports.base import Link

_TAG_MASK = 0xFFFFFFFF  # a tag has 32 bits on the wire

#: A lease grows by `_GROWTH` of its size when a smaller share than `_LOW` is unused.
_LOW = 0.25
_GROWTH = 0.5

#: Assumed of an S-Part's device that has not measured how fast it reads.
_DEVICE_BYTES_PER_SECOND = 1e12

#: Share of a lease's pages and sequence indexes that cached prefixes leave free, so that new sequences need not wait
#: for an eviction.
_HEADROOM = 0.1


class Paused(Protocol):
    """A paused sequence as a ledger sees it. This module cannot name Sequence, whose module imports this one."""

    handle: Handle
    pages: PageTable
    entry: PrefixEntry | None

    def has_prefix_on(self, node: RNodeLedger) -> bool:
        """True if a spilled prefix of the sequence lies on `node`."""

    def forget_cache(self) -> None:
        """Note that the sequence must be recomputed."""


class RNodeLedger:
    """One R-node's lease: how many of its pages and sequence indexes are used, and how loaded it will become."""

    def __init__(self, position: int, link: Link, grows: bool = False, step_rows: int = PAGE_TOKENS):
        """`position` is the index of `link` in the S-Part's list of links. `grows`: the lease is to grow on demand.
        `step_rows`: most rows of a step."""
        lease = link.lease
        self.position = position
        self.link = link
        self.url = link.url
        self.alive = True
        self.draining = False  # it takes no new sequences, because it is to leave
        self.barred = False  # it takes none now: the mini-batch is full, or rows on R-nodes would not pay
        self.retired = False  # it has left; `position` is free for another R-node
        self.n_pages = link.lease.n_pages
        self.max_pages = link.lease.max_pages if grows else self.n_pages  # the most that the lease may grow to
        self.obtainable = self.max_pages  # the same beside other leases, as the R-node said last
        self.resizing = False  # a RESIZE is under way
        self.refused = False  # the last RESIZE has brought fewer pages than wanted; RNodeControl clears it
        self._needed = 0  # size of the lease that a sequence waits for
        self.groups = PageGroups(lease.full_sections, lease.limited_sections, lease.reach, step_rows)
        self.pages = PageBook(self.n_pages)
        self.short = False  # a sequence lacks pages: running sequences give back pages that no later row sees
        self.n_sequences = 0  # running sequences
        self.load = 0  # tokens that the running sequences will have cached once all have their final length
        self.token_bytes = lease.page_bytes * self.groups.block / PAGE_TOKENS  # of one token's K and V, all layers
        self.resident = link.resident  # the pages lie on the S-Part's own device
        self.bandwidth = Bandwidth((link.bytes_per_second or _DEVICE_BYTES_PER_SECOND) if self.resident else None)
        self.answer_seconds = 0.0  # how long the R-node took to answer its last STATS
        self.prefixes = PrefixIndex()
        self.paused: dict[Paused, None] = {}  # the one paused longest ago first
        #: Begins to move an evicted prefix entry to another place; see PrefixMoves.spill. None: no entry can move.
        self.spill_prefix: Callable[[PrefixEntry], bool] | None = None
        self.released: list[CachedSequence] = []  # the sequences of the next FREE
        self.keys: list[tuple[int, int, str | None]] = []  # the sequences of the next KEEP: index, tag and key
        self._sequences_freeing = 0
        self._free_indexes = list(range(link.lease.max_seqs - 1, -1, -1))
        self._tags = [0] * link.lease.max_seqs

    @property
    def free_pages(self) -> int:
        return self.pages.free

    @property
    def pages_freeing(self) -> int:
        """Pages that are released, but whose FREE is not acknowledged yet."""
        return self.pages.freeing

    @property
    def pages_evictable(self) -> int:
        """Pages that only idle sequences have (pages.py)."""
        return self.pages.evictable

    @property
    def pages_used(self) -> int:
        """Pages in use, excluding evictable prefix-cache pages. Pages whose FREE is not acknowledged count as used."""
        return self.n_pages - self.free_pages - self.pages_evictable

    @property
    def open(self) -> bool:
        """True if new sequences may be placed on it."""
        return self.alive and not self.draining

    @property
    def takes_sequences(self) -> bool:
        """True if a waiting sequence may be placed on it now."""
        return self.open and not self.barred

    @property
    def has_free_index(self) -> bool:
        return bool(self._free_indexes)

    @property
    def room(self) -> tuple[int, int]:
        """Pages and sequence indexes that are free, being freed, evictable, or to be leased."""
        return self.unused_pages + self.obtainable - self.n_pages, len(self._tags) - self.n_sequences

    def table(self, tokens: int, shared: PageTable | None = None, whole: bool = False) -> PageTable:
        """Pages that a sequence of `tokens` tokens starts with, the first of which are `shared`. `whole`: pages for all
        of its tokens. Raises ValueError if fewer are free."""
        table = PageTable(self.groups) if shared is None else shared
        self.pages.share(table)
        missing = zip(self.groups.groups, table.missing(tokens), strict=True)
        self.pages.extend(table, [n if whole else min(n, group.most) for group, n in missing])
        return table

    def admit(
        self, tokens: int, shared: PageTable | None, final_length: int, whole: bool = False
    ) -> tuple[Handle, PageTable]:
        """Count a new running sequence of `tokens` tokens, the first of which lie in the pages `shared`, and at most
        `final_length` tokens; returns its handle and its pages. `whole`: see `table`.

        Raises ValueError if fewer pages are free.
        """
        pages = self.table(tokens, shared, whole)
        self.short = False
        seq_index = self._free_indexes.pop()
        self._tags[seq_index] = (self._tags[seq_index] + 1) & _TAG_MASK
        self.load += final_length
        self.n_sequences += 1
        return Handle(seq_index, self._tags[seq_index]), pages

    def end_running(self, final_length: int) -> None:
        """Count one running sequence less. Its pages stay counted until `release` or `evict`."""
        self.load -= final_length
        self.n_sequences -= 1

    def resume(self, final_length: int) -> None:
        """Count a paused sequence as running again."""
        self.load += final_length
        self.n_sequences += 1

    def release(self, sequence: CachedSequence, given_back: Iterable[Page] = ()) -> None:
        """Let the next FREE name `sequence`, which has run. `given_back` are pages that it gives back in a step that
        was not completed."""
        self.pages.release(sequence.pages)
        self._free(CachedSequence(sequence.handle, [*sequence.pages, *given_back]))

    def _free(self, sequence: CachedSequence) -> None:
        self._sequences_freeing += 1
        self.released.append(sequence)

    def take_released(self) -> list[CachedSequence]:
        """The sequences that the next FREE names. The caller sends it and then calls `acknowledge_free`."""
        sequences, self.released = self.released, []
        return sequences

    def acknowledge_free(self, sequences: Iterable[CachedSequence]) -> None:
        """Record that the R-node has freed `sequences`: their pages and indexes are free again."""
        for sequence in sequences:
            self._free_indexes.append(sequence.handle.seq_index)
            self.pages.freed(sequence.pages)
            self._sequences_freeing -= 1

    def give_key(self, handle: Handle, key: str | None) -> None:
        """Let the next KEEP give a sequence a key, or take it away (None)."""
        self.keys.append((*handle, key))

    def take_keys(self) -> list[tuple[int, int, str | None]]:
        """The sequences that the next KEEP names."""
        keys, self.keys = self.keys, []
        return keys

    # -- growth of the lease --------------------------------------------------------------------------------------

    @property
    def may_grow(self) -> bool:
        """True if a RESIZE might bring pages."""
        return self.alive and self.n_pages < self.max_pages and not self.refused

    @property
    def unused_pages(self) -> int:
        """Pages that no running sequence uses: free, being freed, or evictable."""
        return self.free_pages + self.pages_freeing + self.pages_evictable

    def need(self, pages: int) -> None:
        """Record that a sequence waits for `pages` free pages, for which the lease must grow."""
        in_use = self.n_pages - self.free_pages - self.pages_freeing
        self._needed = max(self._needed, min(self.max_pages, in_use + pages))

    def wanted_pages(self) -> int:
        """Size of the lease to ask the R-node for now; `n_pages` if there is nothing to ask."""
        if self.resizing or not self.may_grow:
            return self.n_pages
        larger = min(self.max_pages, self.n_pages + ceil(_GROWTH * self.n_pages))
        low = _LOW * self.n_pages
        if self._needed > self.n_pages or self.unused_pages < low:
            return max(larger, self._needed)
        plenty = 2 * larger <= self.obtainable
        return larger if plenty and self.free_pages + self.pages_freeing < low else self.n_pages

    def resized(self, n_pages: int, obtainable: int) -> None:
        """Record the R-node's answer to a RESIZE: the lease has `n_pages` pages, and could have `obtainable`."""
        self.pages.free += n_pages - self.n_pages
        self.n_pages, self._needed = n_pages, 0
        self.record_obtainable(obtainable)

    def record_obtainable(self, pages: int) -> None:
        """Record how many pages the lease could have, as the R-node says."""
        self.obtainable = max(self.n_pages, min(pages, self.max_pages))

    # -- prefix entries -------------------------------------------------------------------------------------------

    def evict(self, entry: PrefixEntry, spills: bool = False) -> None:
        """Take `entry` out of the prefix cache. An ended sequence is released; a running one is merely not shared.
        `spills`: the sequence moves to another place before, if it can. Its pages count as being freed meanwhile."""
        sequence = self.prefixes.remove(entry)
        if entry.running:
            return
        self.pages.evict(sequence.pages)
        self._sequences_freeing += 1
        if not (spills and self.spill_prefix is not None and self.spill_prefix(entry)):
            self.free_spilled(sequence)

    def free_spilled(self, sequence: CachedSequence) -> None:
        """Let the next FREE name the sequence of an entry that was evicted."""
        self.released.append(sequence)

    def fits_prefix(self, pages: int) -> bool:
        """True if a prefix entry that needs `pages` free pages fits here, and would not be evicted at once."""
        headroom = ceil(_HEADROOM * self.n_pages)
        return self.has_free_index and pages <= self.free_pages and pages + headroom <= self.unused_pages

    def drop_paused(self, seq: Paused) -> None:
        """Let the next FREE name a paused sequence, which must then be recomputed."""
        del self.paused[seq]
        if seq.entry is not None and seq.entry in self.prefixes:
            self.prefixes.remove(seq.entry)
        self.pages.evict(seq.pages)
        self._free(CachedSequence(seq.handle, seq.pages))
        seq.forget_cache()

    def keep_headroom(self) -> None:
        """Evict prefix entries, the least recently used first, until `_HEADROOM` of the pages and of the sequence
        indexes are free or being freed, or no entry is left."""
        pages, indexes = ceil(_HEADROOM * self.n_pages), ceil(_HEADROOM * len(self._tags))
        while self._lacks(pages, indexes) and self._evict_oldest():
            pass

    def _lacks(self, pages: int, indexes: int) -> bool:
        """True if fewer pages or sequence indexes are free or being freed."""
        return (
            self.free_pages + self.pages_freeing < pages or len(self._free_indexes) + self._sequences_freeing < indexes
        )

    def evict_for(self, pages: int, index: bool, spare: Paused | None = None) -> bool:
        """Evict prefix entries, then drop paused sequences other than `spare`, the oldest first, until `pages` pages
        (and a sequence index, if `index`) are free or being freed. False if there are too few.
        """
        while self._lacks(pages, int(index)):
            if self._evict_oldest():
                continue
            paused = self.next_paused(spare)
            if paused is None:
                return False
            self.drop_paused(paused)
        return True

    def _evict_oldest(self, spills: bool = True) -> bool:
        """Evict the least recently used prefix entry; False if there is none. `spills`: see `evict`."""
        entry = self.prefixes.least_recently_used()
        if entry is not None:
            self.evict(entry, spills)
        return entry is not None

    def next_paused(self, spare: Paused | None = None) -> Paused | None:
        """The sequence paused longest ago that is neither `spare` nor pinned by a FORK."""
        return next((s for s in self.paused if s is not spare and (s.entry is None or not s.entry.pins)), None)

    def drain(self) -> None:
        """Take no new sequences, and free the pages that only the prefix cache holds."""
        self.draining = True
        while self._evict_oldest(spills=False):
            pass

    def mark_lost(self) -> None:
        """Record that the R-node is gone, and its cache with it."""
        self.alive = False
        self.prefixes = PrefixIndex()
        for seq in self.paused:
            seq.forget_cache()
        self.paused = {}
