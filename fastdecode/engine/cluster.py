"""The S-node's book of its R-nodes: leases, pages, sequence indexes, load, and whose cache others may begin with.

The S-node counts and the R-node checks: nothing here talks to a peer. A page or a sequence index that was given back
counts as free again only when the R-node has acknowledged the FREE (`freed`). Pages that sequences share are counted
for each of them, so an R-node never has fewer than are counted.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from fastdecode.engine.prefixes import Handle, PrefixBook, PrefixEntry, page_hashes
from fastdecode.transports.base import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastdecode.engine.sequence import Sequence
    from fastdecode.transports.base import Link

_TAG_MASK = 0xFFFFFFFF  # a tag is 32 bits on the wire
#: Of a lease's pages, not taken by what is merely kept: who comes need not wait until some of it has been freed.
_HEADROOM = 0.1


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` cached tokens."""
    return -(-tokens // PAGE_TOKENS)


class RNodeLedger:
    """One R-node's lease: what of it is used, by whom, and how loaded it will become."""

    def __init__(self, position: int, link: Link):
        self.position = position  # in the S-Part's list of links
        self.link = link
        self.url = link.url
        self.alive = True
        self.n_pages = link.lease.n_pages
        self.free_pages = self.n_pages
        self.pages_freeing = 0  # released, FREE not acknowledged yet
        self._handles_freeing = 0
        self.load = 0  # cached tokens once every sequence here has grown to its final length
        self.sequences: set[Sequence] = set()
        self.released: list[Handle] = []  # FREE still to be sent
        self.prefixes = PrefixBook()
        self._indexes = list(range(link.lease.max_seqs - 1, -1, -1))
        self._tags = [0] * link.lease.max_seqs

    @property
    def pages_used(self) -> int:
        """Pages that nobody else can have; those of what is kept he can."""
        return self.n_pages - self.free_pages - self.prefixes.pages

    @property
    def has_index(self) -> bool:
        return bool(self._indexes)

    def take_index(self) -> tuple[int, int]:
        """A free sequence index and its next tag."""
        index = self._indexes.pop()
        self._tags[index] = (self._tags[index] + 1) & _TAG_MASK
        return index, self._tags[index]

    def take_released(self) -> list[Handle]:
        """What the next FREE shall name; the caller sends it and then calls `Cluster.freed`."""
        handles, self.released = self.released, []
        return handles

    def drop(self, kept: PrefixEntry) -> None:
        """Keep it no longer; of one that runs, share it no longer."""
        handle = self.prefixes.remove(kept)
        if not kept.running:
            self.release(handle)

    def release(self, handle: Handle) -> None:
        """To be freed by the next FREE."""
        self.pages_freeing += handle.pages
        self._handles_freeing += 1
        self.released.append(handle)

    def make_room(self, pages: int, index: bool) -> None:
        """Drop of what is kept, the one used longest ago first, until `pages` pages (and an index) are free or on their
        way, or nothing is left that could go."""
        while self.free_pages + self.pages_freeing < pages or (
            index and not self._indexes and not self._handles_freeing
        ):
            if (kept := self.prefixes.oldest()) is None:
                return
            self.drop(kept)

    def lost(self) -> None:
        """It is gone, and with it what it kept."""
        self.alive = False
        self.prefixes = PrefixBook()

    def freed(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            self._indexes.append(handle.index)
            self.free_pages += handle.pages
            self.pages_freeing -= handle.pages
            self._handles_freeing -= 1


class Cluster:
    """All R-nodes, in the order of the S-Part's links."""

    def __init__(self, links: Iterable[Link], watermark: float = 0.01, keeps: bool = False):
        """`keeps`: see prefixes.py."""
        self.watermark, self.keeps = watermark, keeps
        self.nodes = [RNodeLedger(position, link) for position, link in enumerate(links)]

    @property
    def alive(self) -> list[RNodeLedger]:
        return [node for node in self.nodes if node.alive]

    @property
    def capacity(self) -> int:
        """Tokens the biggest live lease can cache."""
        return max((node.n_pages for node in self.alive), default=0) * PAGE_TOKENS

    def can_hold(self, tokens: int) -> bool:
        """True if some live R-node, were it empty, could cache `tokens` tokens."""
        return bool(self.alive) and tokens <= self.capacity

    def place(self, tokens: int) -> RNodeLedger | None:
        """The least loaded live R-node that has room for `tokens` tokens now; None if there is none.

        A share of every lease (`watermark`) is kept from newcomers, so that sequences that already run can grow for a
        while before one must be preempted. An empty node has nobody to protect.
        """
        best = None
        for node in self.nodes:
            if self.has_room(node, tokens) and (best is None or node.load < best.load):
                best = node
        return best

    def has_room(self, node: RNodeLedger, tokens: int) -> bool:
        return node.alive and node.has_index and self._needed(node, tokens) <= node.free_pages

    def _needed(self, node: RNodeLedger, tokens: int) -> int:
        return pages_for(tokens) + (ceil(self.watermark * node.n_pages) if node.sequences or node.pages_freeing else 0)

    def make_room(self, tokens: int) -> None:
        """Nobody has room for `tokens` tokens: let the least loaded of those that could have it drop what it keeps."""
        could = [n for n in self.alive if self._needed(n, tokens) <= n.free_pages + n.pages_freeing + n.prefixes.pages]
        if could:
            node = min(could, key=lambda n: n.load)
            node.make_room(self._needed(node, tokens), index=True)

    def find(self, seq: Sequence, computed: bool = True) -> tuple[RNodeLedger, PrefixEntry, int] | None:
        """Where most of the tokens of `seq` are cached or (`computed` False) in work, by whom, and how many."""
        best = None
        for node in self.alive:
            found = node.prefixes.find(seq.tokens, seq.hashes, computed)
            if found and (best is None or found[1] > best[2]):
                best = node, *found
        return best

    def admit(self, seq: Sequence, node: RNodeLedger) -> None:
        """Give `seq` an index on `node` and count the pages of all its present tokens."""
        pages = pages_for(len(seq.tokens))
        if pages > node.free_pages:
            raise ValueError(f"R-node {node.url} has {node.free_pages} free pages, not {pages}")
        seq.node, seq.pages = node, pages
        seq.index, seq.tag = node.take_index()
        node.free_pages -= pages
        node.load += seq.final_length
        node.sequences.add(seq)
        if seq.hashes:
            handle = Handle(seq.index, seq.tag, pages=0)
            seq.entry = PrefixEntry(handle, list(seq.tokens), seq.hashes, running=True, computed=False)
            node.prefixes.keep(seq.entry)

    def grow(self, seq: Sequence) -> bool:
        """Count one more page for `seq`; False if its node has none."""
        if seq.node.free_pages < 1:
            return False
        seq.node.free_pages -= 1
        seq.pages += 1
        return True

    def release(self, seq: Sequence, keep: bool = False) -> None:
        """Take `seq` off its node; its pages come back with `RNodeLedger.freed`. `keep`: others may use its cache."""
        node = seq.node
        node.sequences.remove(seq)
        node.load -= seq.final_length
        handle, entry = Handle(seq.index, seq.tag, seq.pages), seq.entry
        shared = entry in node.prefixes
        if keep and self.keeps and node.alive and seq.cached >= PAGE_TOKENS:
            tokens = seq.tokens[: seq.cached]
            source = seq.source
            may_go = source in node.prefixes and not (source.pins or source.running)
            if may_go and tokens[: len(source.tokens)] == source.tokens:
                node.drop(source)  # all of it is in this one
            if shared:
                node.prefixes.ended(entry, handle, tokens)
            else:
                node.prefixes.keep(PrefixEntry(handle, tokens, page_hashes(tokens)))
            node.make_room(ceil(_HEADROOM * node.n_pages), index=True)
        else:
            if shared:
                node.prefixes.remove(entry)
            node.release(handle)
        seq.node, seq.pages, seq.entry, seq.source = None, 0, None, None

    def replace_link(self, position: int, link: Link) -> RNodeLedger:
        """Put a fresh link in the place of a dead R-node's. What the old one held is gone with it."""
        old = self.nodes[position]
        if old.alive:
            raise ValueError(f"R-node {old.url} is alive")
        self.nodes[position] = RNodeLedger(position, link)
        return self.nodes[position]
