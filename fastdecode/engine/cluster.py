"""The S-node's book of its R-nodes: leases, pages, sequence indexes, load.

The S-node counts and the R-node checks: nothing here talks to a peer. A page or a sequence index that was given back
counts as free again only when the R-node has acknowledged the FREE (`freed`).
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from fastdecode.transports.base import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastdecode.engine.sequence import Sequence
    from fastdecode.transports.base import Link

_TAG_MASK = 0xFFFFFFFF  # a tag is 32 bits on the wire


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` cached tokens."""
    return -(-tokens // PAGE_TOKENS)


class Handle(NamedTuple):
    """A released sequence as its R-node knows it, with the pages that FREE will give back."""

    index: int
    tag: int
    pages: int


class RNode:
    """One R-node's lease: what of it is used, by whom, and how loaded it will become."""

    def __init__(self, position: int, link: Link):
        self.position = position  # in the S-Part's list of links
        self.link = link
        self.url = link.url
        self.alive = True
        self.n_pages = link.lease.n_pages
        self.free_pages = self.n_pages
        self.pages_freeing = 0  # released, FREE not acknowledged yet
        self.load = 0  # cached tokens once every sequence here has grown to its final length
        self.sequences: set[Sequence] = set()
        self.released: list[Handle] = []  # FREE still to be sent
        self._indexes = list(range(link.lease.max_seqs - 1, -1, -1))
        self._tags = [0] * link.lease.max_seqs

    @property
    def pages_used(self) -> int:
        return self.n_pages - self.free_pages

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

    def freed(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            self._indexes.append(handle.index)
            self.free_pages += handle.pages
            self.pages_freeing -= handle.pages


class Cluster:
    """All R-nodes, in the order of the S-Part's links."""

    def __init__(self, links: Iterable[Link], watermark: float = 0.01):
        self.watermark = watermark
        self.nodes = [RNode(position, link) for position, link in enumerate(links)]

    @property
    def alive(self) -> list[RNode]:
        return [node for node in self.nodes if node.alive]

    @property
    def capacity(self) -> int:
        """Tokens the biggest live lease can cache."""
        return max((node.n_pages for node in self.alive), default=0) * PAGE_TOKENS

    def can_hold(self, tokens: int) -> bool:
        """True if some live R-node, were it empty, could cache `tokens` tokens."""
        return bool(self.alive) and tokens <= self.capacity

    def place(self, tokens: int) -> RNode | None:
        """The least loaded live R-node that has room for `tokens` tokens now; None if there is none.

        A share of every lease (`watermark`) is kept from newcomers, so that sequences that already run can grow for a
        while before one must be preempted. An empty node has nobody to protect.
        """
        pages = pages_for(tokens)
        best = None
        for node in self.nodes:
            if not node.alive or not node.has_index:
                continue
            reserve = 0 if node.free_pages == node.n_pages else ceil(self.watermark * node.n_pages)
            if pages + reserve <= node.free_pages and (best is None or node.load < best.load):
                best = node
        return best

    def admit(self, seq: Sequence, node: RNode) -> None:
        """Give `seq` an index on `node` and count the pages of all its present tokens."""
        pages = pages_for(len(seq.tokens))
        if pages > node.free_pages:
            raise ValueError(f"R-node {node.url} has {node.free_pages} free pages, not {pages}")
        seq.node, seq.pages = node, pages
        seq.index, seq.tag = node.take_index()
        node.free_pages -= pages
        node.load += seq.final_length
        node.sequences.add(seq)

    def grow(self, seq: Sequence) -> bool:
        """Count one more page for `seq`; False if its node has none."""
        if seq.node.free_pages < 1:
            return False
        seq.node.free_pages -= 1
        seq.pages += 1
        return True

    def release(self, seq: Sequence) -> None:
        """Take `seq` off its node; its pages come back with `RNode.freed`."""
        node = seq.node
        node.sequences.remove(seq)
        node.load -= seq.final_length
        node.pages_freeing += seq.pages
        node.released.append(Handle(seq.index, seq.tag, seq.pages))
        seq.node, seq.pages = None, 0

    def replace_link(self, position: int, link: Link) -> RNode:
        """Put a fresh link in the place of a dead R-node's. What the old one held is gone with it."""
        old = self.nodes[position]
        if old.alive:
            raise ValueError(f"R-node {old.url} is alive")
        self.nodes[position] = RNode(position, link)
        return self.nodes[position]
