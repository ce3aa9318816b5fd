"""All R-nodes as the scheduler sees them: the sequences on them, their pages, and the prefix cache.

With the prefix cache on, a prompt that starts with the tokens of another sequence shares that sequence's cached pages
by a FORK. This module pins, inserts and evicts prefix entries; the scheduler only sees how many tokens a placed
sequence shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.placement import Placement, Placer, Wait, costs, mean_length
from fastdecode.engine.scheduling.rtime import Loads, layer_groups
from fastdecode.engine.state.ledger import RNodeLedger
from fastdecode.engine.state.prefixes import CachedSequence, PrefixEntry, page_hashes
from fastdecode.engine.state.states import StateSlots
from fastdecode.engine.state.totals import Totals
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.shape import LayerReads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from fastdecode.engine.scheduling.options import EngineOptions
    from fastdecode.engine.state.pages import Page, PageGroup, PageTable
    from fastdecode.engine.state.prefixes import Handle
    from fastdecode.engine.state.sequence import Sequence, SpilledPrefix
    from fastdecode.transports.base import DataPath, Link, StepCost

#: Pages between two snapshots that a long prompt leaves of its state.
_SNAPSHOT_PAGES = 32


class Cluster:
    """All R-nodes, in the order of the S-Part's links. A retired one keeps its position until another takes it."""

    def __init__(
        self,
        links: Iterable[Link],
        options: EngineOptions,
        reads: Iterable[LayerReads] = (LayerReads(),),
        state_slots: int | None = None,
    ):
        """`reads`: what a row reads in each layer. `state_slots`: sequences that can have a state at once; None: the
        model's layers keep none."""
        self.prefix_cache = options.prefix_cache
        self._options = options
        self.nodes = [self._ledger(position, link) for position, link in enumerate(links)]
        groups = layer_groups(reads)
        self.loads = Loads(groups, [[0.0] * len(groups) for _ in self.nodes])
        self.states = StateSlots(state_slots)
        self.totals = Totals()  # of the engine
        limits = options.watermark, options.max_uncached_suffix
        self.placer = Placer(self.nodes, self.loads, *limits, self.states, self.totals)

    def _ledger(self, position: int, link: Link) -> RNodeLedger:
        return RNodeLedger(position, link, self._options.grow_leases, self._options.limits.max_batch_tokens)

    @property
    def alive(self) -> list[RNodeLedger]:
        return [node for node in self.nodes if node.alive]

    @property
    def lost(self) -> bool:
        """True if no R-node is alive; the S-Part's own device is none."""
        return not any(node.alive and not node.resident for node in self.nodes)

    @property
    def open(self) -> list[RNodeLedger]:
        """The R-nodes that new sequences may be placed on. While all live R-nodes are draining: all of them, so that
        sequences wait for another R-node instead of failing."""
        return [node for node in self.nodes if node.open] or self.alive

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that a live R-node can cache once its lease has grown as far as it may."""
        return max((node.groups.capacity(node.max_pages) for node in self.open), default=0)

    @property
    def tokens(self) -> int:
        """Tokens that the leases of all live R-nodes can cache if no page is given back, grown as far as the R-nodes'
        memory allows."""
        return sum(node.obtainable // node.groups.block for node in self.open) * PAGE_TOKENS

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """The groups of the pages of a block; all R-nodes divide the layers alike."""
        return self.nodes[0].groups.groups

    def can_cache(self, tokens: int) -> bool:
        """True if a live R-node could cache `tokens` tokens if it were empty."""
        return bool(self.alive) and tokens <= self.capacity

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of `tokens` tokens needs to start; all R-nodes divide the layers alike."""
        return self.nodes[0].groups.pages_for(tokens)

    @property
    def room(self) -> tuple[int, int]:
        """Pages that new sequences could have (free, being freed, evictable, or to be leased), and how many sequences
        have an index and a slot for their state."""
        return sum(node.room[0] for node in self.open), min(sum(node.room[1] for node in self.open), self.states.free)

    @property
    def costs(self) -> list[float]:
        """Seconds for a token and layer on each R-node, as far as they are known; see placement.costs."""
        return costs(self.nodes, self.loads.n_layers)

    def r_part(self, running: Iterable[Sequence]) -> float | None:
        """Seconds of the slowest R-node's attention in a step of all `running` sequences; None before every R-node that
        has one was measured. Layers that read only a part of these are not considered."""
        tokens = [0] * len(self.nodes)
        for seq in running:
            tokens[seq.placed_on.position] += seq.cached
        seconds = 0.0
        for node, n in zip(self.nodes, tokens, strict=True):
            speed = node.bandwidth.bytes_per_second
            if n and speed is None:
                return None
            seconds = max(seconds, n * node.token_bytes / (speed or 1.0))
        return seconds

    def observe(self, link_costs: Mapping[DataPath, StepCost]) -> None:
        """Record how long the R-nodes behind these links worked on a step, and how much they read."""
        for node in self.nodes:
            times = link_costs.get(node.link)
            if times is not None:
                node.bandwidth.observe(times.busy_ns, times.kv_bytes)

    # -- life of a placed sequence --------------------------------------------------------------------------------

    def admit(self, seq: Sequence, placement: Placement) -> None:
        """Give `seq` a handle on the placement's R-node and a slot for its state, count the pages of its present tokens
        and pin its source."""
        node, source = placement.node, placement.source
        shared = source.share(placement.shared_tokens) if source is not None else None
        seq.handle, seq.pages = node.admit(len(seq.tokens), shared, seq.final_length, whole=placement.adopts)
        seq.key_due = seq.key is not None
        seq.node, seq.state = node, self.states.start(placement.snapshot)
        if seq.state is not None:
            seq.state.want_snapshots(self._borders(seq, placement.shared_tokens))
        seq.mean_length = mean_length(seq)
        self.loads.add(node.position, seq.mean_length)
        if seq.hashes:
            cached = CachedSequence(seq.handle, seq.pages)
            floor = seq.pages.floor
            seq.entry = PrefixEntry(cached, [], seq.hashes, seq.salt, running=True, computed=False, floor=floor)
            node.prefixes.insert(seq.entry)
        if source is not None:
            source.pins += 1
            seq.source, seq.shared_tokens = source, placement.shared_tokens

    def _borders(self, seq: Sequence, shared: int) -> Iterator[tuple[int, bytes]]:
        """The numbers of tokens after which a prompt leaves a snapshot of its state, and their keys: the last page
        border before the prompt's last token, the one where it parts from earlier prompts, and every _SNAPSHOT_PAGES.
        It shares the first `shared` tokens."""
        whole = min(len(seq.hashes), (len(seq.tokens) - 1) // PAGE_TOKENS)
        known = max(min(node.prefixes.known_pages(seq.hashes), whole) for node in self.nodes)
        for pages in sorted({known, whole, *range(_SNAPSHOT_PAGES, whole, _SNAPSHOT_PAGES)}):
            if pages * PAGE_TOKENS > shared:
                yield pages * PAGE_TOKENS, seq.hashes[pages - 1]

    def end_fork(self, seq: Sequence, succeeded: bool) -> bool:
        """Unpin the source of `seq`. After a failed FORK, evict that source and let `seq` share nothing.

        False if the R-node has too few pages for the prompt on its own; `seq` then has none.
        """
        node, source = seq.placed_on, seq.source
        assert source is not None, "a sequence without a source asks for no FORK"
        source.pins -= 1
        if succeeded:
            return True
        node.pages.unshare(seq.pages)
        if source in node.prefixes and not source.pins:
            node.evict(source)
        seq.source, seq.shared_tokens = None, 0
        if seq.state is not None:
            seq.state.forget_source()
        n_tokens = len(seq.tokens)
        enough = node.groups.pages_for(n_tokens) <= node.free_pages
        seq.pages = node.table(n_tokens) if enough else node.table(0)
        if seq.entry is not None:
            seq.entry.cached, seq.entry.floor = CachedSequence(seq.handle, seq.pages), 0
        return enough

    def mark_prefilled(self, seq: Sequence) -> None:
        """Record that all tokens `seq` was placed with are cached, so that other prompts may share them."""
        if seq.entry is not None and seq.entry in seq.placed_on.prefixes:
            seq.placed_on.prefixes.mark_computed(seq.entry)

    def cover(self, seq: Sequence, tokens: int) -> bool:
        """Count pages for the step of `seq` that is being planned and ends with `tokens` cached tokens. False if its
        R-node has too few.

        If pages are short, the step gives back the pages that no later row sees, unless a FORK from them is under way.
        """
        node, table = seq.placed_on, seq.pages
        lacking = table.lacking(tokens)
        if not lacking and not node.short:
            return True
        if (node.short or lacking > node.free_pages) and self.can_slide(seq):
            lacking -= table.reusable(seq.cached, tokens)
            if lacking > node.free_pages:
                return False
            seq.given_back = node.pages.slide(table, seq.cached, tokens)
            self._raise_floor(seq)
        return self.take_free(seq, tokens)

    def can_slide(self, seq: Sequence) -> bool:
        """True if the next step of `seq` may give back pages."""
        pinned = seq.entry is not None and seq.entry.pins
        return not (seq.migrating or pinned) and any(seq.pages.unseen(seq.cached))

    def take_free(self, seq: Sequence, tokens: int) -> bool:
        """Count free pages for `seq` ahead of a step that ends with `tokens` cached tokens; False if there are too
        few."""
        node, table = seq.placed_on, seq.pages
        if table.lacking(tokens) > node.free_pages:
            return False
        node.pages.extend(table, table.missing(tokens))
        return True

    def _raise_floor(self, seq: Sequence) -> None:
        """Let prompts share no beginning of `seq` that ends before the floor of its pages."""
        if seq.entry is None:
            return
        seq.entry.floor = seq.pages.floor
        prefixes = seq.placed_on.prefixes
        if seq.entry in prefixes and seq.entry.floor > PAGE_TOKENS * len(seq.entry.hashes):
            prefixes.remove(seq.entry)

    def end_slide(self, seq: Sequence) -> None:
        """Record that the R-node has completed the step of `seq` in flight."""
        if seq.given_back is not None:
            seq.placed_on.pages.freed(seq.given_back)
            seq.given_back = None

    def reclaim(self, node: RNodeLedger, pages: int) -> bool:
        """True if `node` will soon have a page: one is being freed, or the lease may grow. Evicts prefix entries if no
        page is being freed. `pages` are wanted."""
        node.short = True
        if not node.pages_freeing:
            node.evict_for(pages, index=False)
        if not node.pages_freeing and node.may_grow:
            node.need(pages)
            return True
        return node.pages_freeing > 0

    def release(self, seq: Sequence, sound: bool = False) -> None:
        """Take `seq` off its R-node. Its pages go to the prefix cache if its cached tokens are `sound` and fill a
        page; else the next FREE names it."""
        node, source = seq.placed_on, seq.source
        self._end_running(seq, node)
        cached = CachedSequence(seq.handle, seq.pages)
        entry = seq.entry if seq.entry in node.prefixes else None
        if sound and self.prefix_cache and node.open and seq.cached >= PAGE_TOKENS and seq.prefix is None:
            tokens = seq.tokens[: seq.cached]
            node.pages.make_idle(cached.pages)
            salt, floor = seq.salt, seq.pages.floor
            if entry is not None:
                node.prefixes.mark_ended(entry, cached, tokens, floor)
            else:
                hashes = page_hashes(tokens, salt, seq.hashes)
                entry = PrefixEntry(cached, tokens, hashes, salt, floor=floor)
                node.prefixes.insert(entry)
            if seq.state is not None and len(tokens) == seq.cached:
                seq.state.become_snapshot(entry)
                seq.state = None
            if source is not None and source in node.prefixes and not (source.pins or source.running):
                start, end = seq.shared_tokens, len(source.tokens)
                if tokens[start:end] == source.tokens[start:] and floor <= end:
                    node.evict(source)  # the new entry has all of its tokens
                    self.states.drop(source)
            node.keep_headroom()
        else:
            if entry is not None:
                node.prefixes.remove(entry)
            node.release(cached, seq.given_back or ())
        seq.forget_cache()

    def _end_running(self, seq: Sequence, node: RNodeLedger) -> None:
        node.end_running(seq.final_length)
        self.loads.add(node.position, seq.mean_length, -1)

    def pause(self, seq: Sequence) -> None:
        """Take `seq` out of the running ones; its R-node keeps its cache until the pages are needed."""
        node = seq.placed_on
        self._end_running(seq, node)
        node.pages.make_idle(seq.pages)
        node.paused[seq] = None
        seq.source = None

    def resume(self, seq: Sequence) -> Wait | None:
        """Let a paused sequence run again on its R-node. Returns None if it runs, else what it has to wait for.

        It needs a page for its next token, and the watermark, so that it is not paused again at once.
        """
        node = seq.placed_on
        needed = seq.pages.lacking(seq.cached + 1) + self.placer.watermark(node)
        if needed > node.free_pages:
            mine = seq.pages.evictable
            if needed > node.unused_pages - mine:
                node.short = True
                if node.may_grow:
                    node.need(needed)
                return Wait.ROOM
            return Wait.FREE if node.evict_for(needed, index=False, spare=seq) else Wait.ROOM
        del node.paused[seq]
        node.pages.resume(seq.pages)
        node.pages.extend(seq.pages, seq.pages.missing(seq.cached + 1))
        node.resume(seq.final_length)
        self.loads.add(node.position, seq.mean_length)
        return None

    # -- migrations -----------------------------------------------------------------------------------------------

    def migrate(self, seq: Sequence, target: RNodeLedger, handle: Handle, pages: PageTable) -> None:
        """Let `seq` continue on `target`, which has all of its cached tokens. `handle` and `pages`: from
        `target.admit`."""
        source = seq.placed_on
        self._end_running(seq, source)
        if seq.entry is not None and seq.entry in source.prefixes:
            source.prefixes.remove(seq.entry)
        source.release(CachedSequence(seq.handle, seq.pages))
        target.pages.unshare(pages.trim(seq.cached))  # the R-node keeps only the pages that it needs
        seq.leave_node()
        seq.node, seq.handle, seq.pages, seq.key_due = target, handle, pages, seq.key is not None
        if seq.hashes:
            cached = CachedSequence(handle, seq.pages)
            seq.entry = PrefixEntry(cached, [], seq.hashes, seq.salt, running=True)
            target.prefixes.insert(seq.entry)

    def spill(self, seq: Sequence, prefix: SpilledPrefix) -> list[Page]:
        """Let `seq`, which runs on the S-Part's device and is in no step, have the tokens of `prefix` on the prefix's
        R-node alone. No prompt shares its tokens any more. Returns the pages that the device is to give back; the
        caller passes them to PageBook.freed then."""
        node, old = seq.placed_on, seq.prefix
        if seq.entry is not None and seq.entry in node.prefixes:
            node.prefixes.remove(seq.entry)
        seq.entry = None
        given_back = node.pages.drop(seq.pages, prefix.length // PAGE_TOKENS)
        if old is not None:
            old.release()
        seq.prefix = prefix
        seq.decoding = seq.reusable = None
        return given_back

    def refill(self, seq: Sequence, prefix: SpilledPrefix | None, pages: PageTable) -> None:
        """Let `seq`, which is in no step, have the tokens behind `prefix` on the S-Part's device, in `pages` first of
        all. These leave the table `pages`."""
        old = seq.prefix
        assert old is not None, "the sequence is cut"
        seq.pages.put_first(pages)
        old.release()
        seq.prefix = prefix
        seq.decoding = seq.reusable = None

    def cancel_migration(self, seq: Sequence, target: RNodeLedger, handle: Handle, pages: PageTable) -> None:
        """Release the pages that `target.admit` has counted for a sequence that stays on its R-node after all."""
        self._end_running(seq, target)
        target.release(CachedSequence(handle, pages))

    def add_link(self, link: Link) -> RNodeLedger:
        """Start a ledger for one more R-node, at the position of a retired R-node, else at a new position."""
        position = next((node.position for node in self.nodes if node.retired), len(self.nodes))
        node = self._ledger(position, link)
        if position == len(self.nodes):
            self.loads.tokens.append([0.0] * len(self.loads.groups))
            self.nodes.append(node)
        else:
            self.nodes[position] = node
        return node

    def replace_link(self, position: int, link: Link) -> RNodeLedger:
        """Start a new ledger for the R-node at `position`, whose link was lost. Raises ValueError if it is alive."""
        lost = self.nodes[position]
        if lost.alive:
            raise ValueError(f"R-node {lost.url} is alive")
        self.nodes[position] = self._ledger(position, link)
        return self.nodes[position]
