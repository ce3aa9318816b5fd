"""The S-node's account of one R-node: its lease, pages, sequence indexes, load and prefix entries.

The S-node counts and the R-node checks; nothing here talks to a peer. A released page or sequence index counts as free
only after the R-node has acknowledged the FREE (`acknowledge_free`). A page that several sequences share is counted
once for each of them, so the R-node never has fewer free pages than this account says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdecode.engine.prefixes import CachedSequence, Handle, PrefixEntry, PrefixIndex
from fastdecode.engine.scheduling.rtime import Bandwidth
from fastdecode.region.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastdecode.transports.base import Link

_TAG_MASK = 0xFFFFFFFF  # a tag has 32 bits on the wire


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` cached tokens."""
    return -(-tokens // PAGE_TOKENS)


class RNodeLedger:
    """One R-node's lease: how many of its pages and sequence indexes are used, and how loaded it will become."""

    def __init__(self, position: int, link: Link):
        """`position` is the index of `link` in the S-Part's list of links."""
        self.position = position
        self.link = link
        self.url = link.url
        self.alive = True
        self.n_pages = link.lease.n_pages
        self.free_pages = self.n_pages
        self.pages_freeing = 0  # released, but their FREE is not acknowledged yet
        self.n_sequences = 0  # running sequences
        self.load = 0  # tokens that the running sequences will have cached once all have their final length
        self.token_bytes = link.lease.page_bytes / PAGE_TOKENS  # of one token's K and V, all layers
        self.bandwidth = Bandwidth()
        self.prefixes = PrefixIndex()
        self.released: list[CachedSequence] = []  # to be named by the next FREE
        self._sequences_freeing = 0
        self._free_indexes = list(range(link.lease.max_seqs - 1, -1, -1))
        self._tags = [0] * link.lease.max_seqs

    @property
    def pages_used(self) -> int:
        """Pages in use, excluding evictable prefix-cache pages. Pages whose FREE is not acknowledged count as used."""
        return self.n_pages - self.free_pages - self.prefixes.pages

    @property
    def has_free_index(self) -> bool:
        return bool(self._free_indexes)

    @property
    def room(self) -> tuple[int, int]:
        """Pages and sequence indexes that are free, being freed, or held by entries that can be evicted."""
        pages = self.free_pages + self.pages_freeing + self.prefixes.pages
        return pages, len(self._tags) - self.n_sequences

    def admit(self, pages: int, final_length: int) -> Handle:
        """Count a new running sequence of `pages` pages and at most `final_length` tokens; returns its handle.

        Raises ValueError if fewer pages are free.
        """
        if pages > self.free_pages:
            raise ValueError(f"R-node {self.url} has {self.free_pages} free pages, not {pages}")
        seq_index = self._free_indexes.pop()
        self._tags[seq_index] = (self._tags[seq_index] + 1) & _TAG_MASK
        self.free_pages -= pages
        self.load += final_length
        self.n_sequences += 1
        return Handle(seq_index, self._tags[seq_index])

    def end_running(self, final_length: int) -> None:
        """Count one running sequence less. Its pages stay counted until `release` or `evict`."""
        self.load -= final_length
        self.n_sequences -= 1

    def release(self, sequence: CachedSequence) -> None:
        """Let the next FREE name `sequence`."""
        self.pages_freeing += sequence.pages
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
            self.free_pages += sequence.pages
            self.pages_freeing -= sequence.pages
            self._sequences_freeing -= 1

    def evict(self, entry: PrefixEntry) -> None:
        """Take `entry` out of the prefix cache. An ended sequence is released; a running one is merely not shared."""
        sequence = self.prefixes.remove(entry)
        if not entry.running:
            self.release(sequence)

    def evict_for(self, pages: int, index: bool) -> bool:
        """Evict prefix entries until `pages` pages (and a sequence index, if `index`) are free or being freed.

        False if no further entry can be evicted before that.
        """
        while self.free_pages + self.pages_freeing < pages or (
            index and not self._free_indexes and not self._sequences_freeing
        ):
            if (entry := self.prefixes.least_recently_used()) is None:
                return False
            self.evict(entry)
        return True

    def mark_lost(self) -> None:
        """Record that the R-node is gone, and its cache with it."""
        self.alive = False
        self.prefixes = PrefixIndex()
