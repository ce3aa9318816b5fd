"""All R-nodes as the scheduler sees them: placement of sequences, page counting and the prefix cache.

With the prefix cache on, a prompt that starts with the tokens of another sequence is placed on that sequence's R-node
and takes over its cached pages by a FORK. This module finds, pins, touches and evicts prefix entries; the scheduler
only sees how many tokens a placed sequence shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from fastdecode.engine.ledger import RNodeLedger, pages_for
from fastdecode.engine.prefixes import CachedSequence, PrefixEntry, page_hashes
from fastdecode.region.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastdecode.engine.sequence import Sequence
    from fastdecode.transports.base import Link

#: Share of a lease's pages that cached prefixes leave free, so that a new sequence need not wait for an eviction.
_PREFIX_HEADROOM = 0.1


@dataclass(frozen=True, slots=True)
class Placement:
    """The R-node chosen for a sequence, and the prefix entry it starts from."""

    node: RNodeLedger
    source: PrefixEntry | None = None
    shared_tokens: int = 0  # leading tokens taken over from `source`


class Cluster:
    """All R-nodes, in the order of the S-Part's links."""

    def __init__(
        self,
        links: Iterable[Link],
        watermark: float = 0.01,
        prefix_cache: bool = False,
        max_uncached_suffix: int | None = None,
    ):
        """`watermark` is the share of a lease's pages that new sequences leave to running ones. `max_uncached_suffix`
        is how many tokens behind a shared prefix may be left to an R-node's attention; a prompt with a longer suffix is
        prefilled on the S-node as a whole. None: any number."""
        self.watermark, self.prefix_cache, self.max_uncached_suffix = watermark, prefix_cache, max_uncached_suffix
        self.nodes = [RNodeLedger(position, link) for position, link in enumerate(links)]

    @property
    def alive(self) -> list[RNodeLedger]:
        return [node for node in self.nodes if node.alive]

    @property
    def capacity(self) -> int:
        """Tokens that the largest lease of a live R-node can cache."""
        return max((node.n_pages for node in self.alive), default=0) * PAGE_TOKENS

    def can_hold(self, tokens: int) -> bool:
        """True if a live R-node could cache `tokens` tokens if it were empty."""
        return bool(self.alive) and tokens <= self.capacity

    # -- placement ------------------------------------------------------------------------------------------------

    def place(self, seq: Sequence) -> Placement | None:
        """Choose an R-node for a waiting sequence; None: it must wait, for pages or for a prompt that it shares.

        The R-node with the longest cached prefix of the sequence is taken if it has room, else the least loaded one
        with room. A sequence waits while another one prefills at least half of its tokens. If no R-node has room,
        prefix entries are evicted, so that a later call succeeds.
        """
        n_tokens = len(seq.tokens)
        cached, in_work = self._match_prefix(seq), self._match_prefix(seq, computed=False)
        if in_work is not None:
            longer = cached is None or in_work.shared_tokens > cached.shared_tokens
            if longer and 2 * in_work.shared_tokens >= n_tokens and self._has_room(in_work.node, n_tokens):
                return None
        if cached is not None and cached.source is not None:
            cached.node.prefixes.touch(cached.source)  # an eviction that makes room for the prompt takes it last
            if self._has_room(cached.node, n_tokens):
                return cached
        # A node where a running sequence waits for a page is never chosen: it has no free page.
        with_room = [node for node in self.nodes if self._has_room(node, n_tokens)]
        if with_room:
            return Placement(min(with_room, key=lambda node: node.load))
        self._evict_for(n_tokens)
        return None

    def _match_prefix(self, seq: Sequence, computed: bool = True) -> Placement | None:
        """Where most leading tokens of `seq` are cached or, with `computed` False, being prefilled."""
        best = None
        for node in self.alive:
            found = node.prefixes.match(seq.tokens, seq.hashes, computed)
            if found and (best is None or found[1] > best.shared_tokens):
                best = Placement(node, *found)
        if best is None or self.max_uncached_suffix is None:
            return best
        return best if len(seq.tokens) - best.shared_tokens <= self.max_uncached_suffix else None

    def _has_room(self, node: RNodeLedger, tokens: int) -> bool:
        return node.alive and node.has_free_index and self._pages_needed(node, tokens) <= node.free_pages

    def _pages_needed(self, node: RNodeLedger, tokens: int) -> int:
        """Free pages that `node` must have to admit a sequence of `tokens` tokens.

        The watermark is part of them, so that running sequences can grow for a while before one must be preempted. A
        node without sequences needs no watermark.
        """
        watermark = ceil(self.watermark * node.n_pages) if node.n_sequences or node.pages_freeing else 0
        return pages_for(tokens) + watermark

    def _evict_for(self, tokens: int) -> None:
        """Make room for a sequence of `tokens` tokens on the least loaded R-node whose prefix entries give enough."""
        enough = [
            node
            for node in self.alive
            if self._pages_needed(node, tokens) <= node.free_pages + node.pages_freeing + node.prefixes.pages
        ]
        if enough:
            node = min(enough, key=lambda n: n.load)
            node.evict_for(self._pages_needed(node, tokens), index=True)

    # -- life of a placed sequence --------------------------------------------------------------------------------

    def admit(self, seq: Sequence, placement: Placement) -> None:
        """Give `seq` a handle on the placement's R-node, count the pages of its present tokens and pin its source."""
        node = placement.node
        pages = pages_for(len(seq.tokens))
        seq.handle = node.admit(pages, seq.final_length)
        seq.node, seq.pages = node, pages
        if seq.hashes:
            cached = CachedSequence(seq.handle, pages=0)
            seq.entry = PrefixEntry(cached, list(seq.tokens), seq.hashes, running=True, computed=False)
            node.prefixes.insert(seq.entry)
        if placement.source is not None:
            placement.source.pins += 1
            seq.source, seq.shared_tokens = placement.source, placement.shared_tokens

    def end_fork(self, seq: Sequence, succeeded: bool) -> None:
        """Unpin the source of `seq`. After a failed FORK, evict that source and let `seq` share nothing."""
        node, source = seq.placed_on, seq.source
        assert source is not None, "a sequence without a source asks for no FORK"
        source.pins -= 1
        if succeeded:
            return
        if source in node.prefixes and not source.pins:
            node.evict(source)
        seq.source, seq.shared_tokens = None, 0

    def mark_prefilled(self, seq: Sequence) -> None:
        """Record that all tokens `seq` was placed with are cached, so that other prompts may share them."""
        if seq.entry is not None:
            seq.entry.computed = True

    def grow(self, seq: Sequence) -> bool:
        """Count one more page for `seq`; False if its R-node has no free page."""
        node = seq.placed_on
        if node.free_pages < 1:
            return False
        node.free_pages -= 1
        seq.pages += 1
        return True

    def reclaim_page(self, node: RNodeLedger) -> bool:
        """True if a page of `node` is being freed; evicts prefix entries if none is."""
        if not node.pages_freeing:
            node.evict_for(1, index=False)
        return node.pages_freeing > 0

    def release(self, seq: Sequence, sound: bool = False) -> None:
        """Take `seq` off its R-node. Its pages go to the prefix cache if its cached tokens are `sound` and fill a
        page; else the next FREE names it."""
        node, source = seq.placed_on, seq.source
        node.end_running(seq.final_length)
        cached = CachedSequence(seq.handle, seq.pages)
        entry = seq.entry if seq.entry in node.prefixes else None
        if sound and self.prefix_cache and node.alive and seq.cached >= PAGE_TOKENS:
            tokens = seq.tokens[: seq.cached]
            if (
                source is not None
                and source in node.prefixes
                and not (source.pins or source.running)
                and tokens[: len(source.tokens)] == source.tokens
            ):
                node.evict(source)  # the new entry has all of its tokens
            if entry is not None:
                node.prefixes.mark_ended(entry, cached, tokens)
            else:
                node.prefixes.insert(PrefixEntry(cached, tokens, page_hashes(tokens)))
            node.evict_for(ceil(_PREFIX_HEADROOM * node.n_pages), index=True)
        else:
            if entry is not None:
                node.prefixes.remove(entry)
            node.release(cached)
        seq.node, seq.pages, seq.entry, seq.source = None, 0, None, None

    def replace_link(self, position: int, link: Link) -> RNodeLedger:
        """Start a new account for the R-node at `position`, whose link was lost. Raises ValueError if it is alive."""
        lost = self.nodes[position]
        if lost.alive:
            raise ValueError(f"R-node {lost.url} is alive")
        self.nodes[position] = RNodeLedger(position, link)
        return self.nodes[position]
