"""Chooses the R-node of a waiting sequence by prefixes, free pages and the predicted R-Part.

A prompt that starts with the tokens of another sequence is placed on that sequence's R-node and shares its cached
pages by a FORK. Any other prompt goes where the slowest R-node stays fastest. The sequences that wait together are
distributed together, longest first: if they were placed one by one, a long last one would fit nowhere well. As long as
pages of the S-Part's own device are free, or only prefix entries have them, sequences are placed there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Protocol

from fastdecode.engine.scheduling.rtime import Loads, assign
from fastdecode.engine.state.bandwidth import alike
from fastdecode.engine.state.ledger import RNodeLedger
from fastdecode.engine.state.states import StateSlots
from fastdecode.region.contract import PAGE_TOKENS, blocks_for

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from fastdecode.engine.state.prefixes import PrefixEntry
    from fastdecode.engine.state.sequence import Sequence
    from fastdecode.engine.state.totals import Totals


#: Most waiting sequences that are distributed together.
_GROUP_SIZE = 16


@dataclass(frozen=True, slots=True)
class Placement:
    """The R-node chosen for a sequence, and the prefix entry it starts from."""

    node: RNodeLedger
    source: PrefixEntry | None = None
    shared_tokens: int = 0  # leading tokens shared with `source`
    adopts: bool = False  # the R-node has K and V that the sequence adopts
    snapshot: Hashable = None  # the key of the snapshot of the state after the shared tokens, if layers keep states


class Wait(Enum):
    """Why a sequence cannot be placed now."""

    PREFIX = "another sequence is prefilling at least half of its tokens"
    FREE = "pages that suffice for it are being freed"
    ROOM = "no R-node has, or can make, room for it, or the S-Part for its state"


class PrefixReturns(Protocol):
    """Copies prefixes from R-nodes to the S-Part's device (migration/prefix_moves.py)."""

    def may_return(self, entry: PrefixEntry) -> bool:
        """True if `bring_back` may be called for an entry of an R-node."""

    def bring_back(self, node: RNodeLedger, entry: PrefixEntry, length: int) -> PrefixEntry:
        """Begin to copy the first `length` tokens of an entry from an R-node to the device, which has enough free
        pages. Returns the entry of the device, which is in prefill until then."""


def mean_length(seq: Sequence) -> float:
    """The tokens that a sequence will have cached on average from now to its end, if it ends at its bound."""
    return (len(seq.tokens) + seq.final_length) / 2


def costs(nodes: list[RNodeLedger], n_layers: int) -> list[float]:
    """Seconds for a token and layer on each R-node; relative numbers until the first has been measured. R-nodes count
    as equally fast as long as their measurements do not tell them apart; see bandwidth.alike."""
    speeds = iter(alike([node.bandwidth for node in nodes if not node.resident]))
    return [
        node.token_bytes / n_layers / ((node.bandwidth.bytes_per_second if node.resident else next(speeds)) or 1.0)
        for node in nodes
    ]


class Placer:
    """Chooses R-nodes for waiting sequences. `nodes` is the cluster's own list, in the order of the S-Part's links."""

    def __init__(
        self,
        nodes: list[RNodeLedger],
        loads: Loads,
        watermark: float,
        max_uncached_suffix: int | None,
        states: StateSlots,
        totals: Totals,
    ):
        """`loads`: the loads by the running sequences. `watermark`, `max_uncached_suffix`: see EngineOptions."""
        self._nodes, self._loads, self._states, self._totals = nodes, loads, states, totals
        self._watermark, self._max_uncached_suffix = watermark, max_uncached_suffix
        self.returns: PrefixReturns | None = None  # None: the S-Part's device has no KV pages
        self._chosen: dict[Sequence, int] = {}  # R-nodes of the sequences that were distributed together

    def place(self, seq: Sequence, waiting: Iterable[Sequence] = ()) -> Placement | Wait:
        """Choose an R-node for a waiting sequence, or say what it has to wait for. `waiting`: all that wait, in order.

        The R-node with the longest cached prefix of the sequence is taken if it has room, else the one with room that
        keeps the R-Part shortest. A sequence waits while another one prefills at least half of its tokens. If no R-node
        has room, prefix entries are evicted or a lease is to grow, so that a later call succeeds.
        """
        n_tokens = len(seq.tokens)
        if not self._states.any_free and not self._drop_state():
            return Wait.ROOM
        if seq.adopts is not None and (found := self._beside(seq, seq.adopts.node)) is not None:
            return found
        if seq.awaited is not None:
            node, entry = seq.awaited
            shared = PAGE_TOKENS * len(entry.hashes)  # at most; the next look-up finds the exact number
            if node.alive and entry in node.prefixes and not entry.computed and self._has_room(node, n_tokens, shared):
                return Wait.PREFIX
            seq.awaited = None
        cached, in_prefill = self._match_prefix(seq), self._match_prefix(seq, computed=False)
        if in_prefill is not None and in_prefill.source is not None:
            longer = cached is None or in_prefill.shared_tokens > cached.shared_tokens
            shared = in_prefill.shared_tokens
            if longer and 2 * shared >= n_tokens and self._has_room(in_prefill.node, n_tokens, shared):
                seq.awaited = in_prefill.node, in_prefill.source
                return Wait.PREFIX
        if cached is not None and cached.source is not None:
            cached.node.prefixes.touch(cached.source)  # an eviction that makes room for the prompt takes it last
            if (wait := self._bring_back(seq, cached)) is not None:
                return wait
            if self._has_room(cached.node, n_tokens, cached.shared_tokens):
                return cached
        # A node where a running sequence waits for a page is never chosen: it has no free page.
        with_room = [node for node in self._nodes if self._has_room(node, n_tokens)]
        if self._evicts_for(n_tokens, with_room, cached):
            return Wait.FREE
        if with_room:
            return Placement(self._fastest(seq, with_room, waiting))
        if cached is not None and self._make_room_beside(cached, n_tokens):
            return Wait.FREE
        return Wait.FREE if self._make_room(n_tokens) else Wait.ROOM

    def _beside(self, seq: Sequence, node: RNodeLedger) -> Placement | Wait | None:
        """Place a sequence on the R-node that has the K and V it adopts. None: there will be no room, so that the
        sequence adopts nothing."""
        needed = blocks_for(len(seq.tokens)) * node.groups.block + self.watermark(node)
        if node.open and needed <= node.free_pages and node.has_free_index:
            return Placement(node, adopts=True)
        if node.open and needed <= node.unused_pages:
            return Wait.FREE if self._evict(node, needed) else Wait.ROOM
        if node.open and node.may_grow and needed - node.unused_pages <= node.max_pages - node.n_pages:
            node.short = True
            node.need(needed)
            return Wait.ROOM
        seq.adopts = None
        self._totals.not_adopted += 1
        return None

    def _evicts_for(self, tokens: int, with_room: list[RNodeLedger], cached: Placement | None) -> bool:
        """Evict prefix entries other than `cached` from the S-Part's device for a sequence of `tokens` tokens, although
        R-nodes may have room. True if pages and an index that suffice are being freed now."""
        device = self._nodes[0]
        if not (device.resident and device.takes_sequences) or device in with_room or device.paused:
            return False
        if cached is not None and cached.node is device:
            return self._make_room_beside(cached, tokens)
        needed = self._pages_needed(device, tokens)
        return needed <= device.unused_pages and self._evict(device, needed)

    def _bring_back(self, seq: Sequence, cached: Placement) -> Wait | None:
        """Begin to copy the prefix of a sequence from an R-node to the S-Part's device, or to make room for it there.
        None: it stays on the R-node."""
        device, returns, source = self._nodes[0], self.returns, cached.source
        assert source is not None
        if (
            returns is None
            or cached.node.resident
            or not device.open
            or device.paused
            or not returns.may_return(source)
        ):
            return None
        # The sequence copies the page in which it parts from the prefix.
        needed = (blocks_for(len(seq.tokens)) + 1) * device.groups.block + self.watermark(device)
        if needed > device.unused_pages:
            return None
        if needed > device.free_pages or not device.has_free_index:
            return Wait.FREE if self._evict(device, needed) else None
        seq.awaited = device, returns.bring_back(cached.node, source, cached.shared_tokens)
        return Wait.PREFIX

    def _drop_state(self) -> bool:
        """Drop a paused sequence with its state; False if there is none."""
        for node in self._nodes:
            paused = node.next_paused()
            if paused is not None:
                node.drop_paused(paused)
                return True
        return False

    def _fastest(self, seq: Sequence, with_room: list[RNodeLedger], waiting: Iterable[Sequence]) -> RNodeLedger:
        """The R-node that keeps the R-Part shortest, for this sequence and the sequences that wait with it. The
        S-Part's device comes first."""
        if len(with_room) == 1 or with_room[0].resident:
            return with_room[0]
        earlier = self._chosen.pop(seq, None)
        if earlier is not None and self._nodes[earlier] in with_room:
            return self._nodes[earlier]
        group = [seq, *islice((other for other in waiting if other is not seq), _GROUP_SIZE - 1)]
        positions = [node.position for node in with_room]
        allowed = [
            [node.position for node in self._nodes if self._has_room(node, len(other.tokens))] or positions
            for other in group
        ]
        lengths = [mean_length(other) for other in group]
        chosen = assign(self._loads, costs(self._nodes, self._loads.n_layers), lengths, allowed)
        self._chosen = dict(zip(group[1:], chosen[1:], strict=True))
        return self._nodes[chosen[0]]

    def migration_target(self, seq: Sequence, n_pages: int, nodes: list[RNodeLedger]) -> RNodeLedger | None:
        """The R-node of `nodes` with `n_pages` free pages that keeps the R-Part shortest if `seq` migrates there. None:
        no R-node has that many; prefix entries are evicted or a lease is to grow, so that a later call may succeed.

        An R-node that could not hold the sequence up to its end is left out.
        """
        nodes = [node for node in nodes if node.groups.capacity(node.max_pages) >= seq.final_length - 1]
        needed = {node: n_pages + self.watermark(node) for node in nodes}
        with_room = [node for node in nodes if node.has_free_index and needed[node] <= node.free_pages]
        if with_room:
            positions = [node.position for node in with_room]
            self._loads.add(seq.placed_on.position, seq.mean_length, -1)
            [target] = assign(self._loads, costs(self._nodes, self._loads.n_layers), [seq.mean_length], [positions])
            self._loads.add(seq.placed_on.position, seq.mean_length)
            return self._nodes[target]
        for node in sorted(nodes, key=lambda n: n.load):
            if needed[node] <= node.unused_pages and not node.paused:
                node.evict_for(needed[node], index=True)
                break
            if node.may_grow:
                node.need(needed[node])
                break
        return None

    def _match_prefix(self, seq: Sequence, computed: bool = True) -> Placement | None:
        """The R-node and entry that have most leading tokens of `seq` cached or, with `computed` False, in prefill."""
        best = None
        for node in self._nodes:
            found = node.prefixes.match(seq.tokens, seq.hashes, computed) if node.takes_sequences else None
            placement = found and self._with_state(seq, Placement(node, *found), computed)
            if placement and (best is None or placement.shared_tokens > best.shared_tokens):
                best = placement
        if best is None or self._max_uncached_suffix is None:
            return best
        return best if len(seq.tokens) - best.shared_tokens <= self._max_uncached_suffix else None

    def _with_state(self, seq: Sequence, found: Placement, computed: bool) -> Placement | None:
        """`found`, up to the last shared token after which the state is known or, with `computed` False, will be;
        None: no state is."""
        states, entry, shared = self._states, found.source, found.shared_tokens
        if not states.needed:
            return found
        assert entry is not None
        if shared == len(entry.tokens) and states.has(entry):
            return replace(found, snapshot=entry)
        for pages in range(shared // PAGE_TOKENS, entry.floor // PAGE_TOKENS, -1):
            key = seq.hashes[pages - 1]
            if states.has(key) or (not computed and key in states.expected):
                return replace(found, shared_tokens=pages * PAGE_TOKENS, snapshot=key)
        return None

    def _has_room(self, node: RNodeLedger, tokens: int, shared: int = 0) -> bool:
        return (
            node.takes_sequences and node.has_free_index and self._pages_needed(node, tokens, shared) <= node.free_pages
        )

    def watermark(self, node: RNodeLedger) -> int:
        """Pages that a newcomer leaves free, so that running sequences can grow for a while before one must be
        preempted. An R-node without sequences needs none."""
        return ceil(self._watermark * node.n_pages) if node.n_sequences or node.pages_freeing else 0

    def _pages_needed(self, node: RNodeLedger, tokens: int, shared: int = 0) -> int:
        """Free pages that `node` must have to admit a sequence of `tokens` tokens, the watermark included.

        The sequence shares its first `shared` tokens, whose whole pages are there already.
        """
        return node.groups.pages_for(tokens, shared) + self.watermark(node)

    def _make_room_beside(self, cached: Placement, tokens: int) -> bool:
        """Make room for a sequence of `tokens` tokens on the R-node that has its prefix, by evicting other entries.

        True if pages and an index that suffice are being freed now.
        """
        node, source = cached.node, cached.source
        assert source is not None
        shared = source.share(cached.shared_tokens)
        evictable = node.unused_pages - shared.evictable
        needed = self._pages_needed(node, tokens, cached.shared_tokens)
        if needed > evictable:
            return False
        source.pins += 1
        enough = self._evict(node, needed)
        source.pins -= 1
        return enough

    @staticmethod
    def _evict(node: RNodeLedger, pages: int) -> bool:
        """Evict for a sequence that needs `pages` free pages, and for the next ones in the queue, so that more than one
        can start in a step. True if pages and an index that suffice for the first one are being freed now."""
        enough = node.evict_for(pages, index=True)
        if enough:
            node.keep_headroom()
        return enough

    def _make_room(self, tokens: int) -> bool:
        """Make room for a sequence of `tokens` tokens on the least loaded R-node whose prefix entries give enough. If
        none do, ask for a larger lease of the least loaded R-node that may grow so far.

        True if pages and an index that suffice are being freed now.
        """
        lacking = {
            node: self._pages_needed(node, tokens) - node.unused_pages for node in self._nodes if node.takes_sequences
        }
        enough = [node for node, pages in lacking.items() if pages <= 0]
        if enough:
            node = min(enough, key=lambda n: n.load)
            return self._evict(node, self._pages_needed(node, tokens))
        for node in lacking:
            node.short = True
        growing = [node for node, pages in lacking.items() if node.may_grow and pages <= node.max_pages - node.n_pages]
        if growing:
            node = min(growing, key=lambda n: n.load)
            node.need(self._pages_needed(node, tokens))
        return False
