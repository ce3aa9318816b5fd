"""Decides which running sequences pause for others that need a slot, pages or time. A paused sequence waits, and its
R-node keeps its cache until the pages are needed."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.queue import BY_RANK

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastdecode.engine.scheduling.cluster import Cluster
    from fastdecode.engine.scheduling.pace import Pace
    from fastdecode.engine.scheduling.queue import WaitingQueue
    from fastdecode.engine.scheduling.running import Running
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.sequence import Sequence


class Pauses:
    """Pauses and preempts running sequences."""

    def __init__(self, cluster: Cluster, running: Running, waiting: WaitingQueue, pace: Pace):
        self._cluster, self._running, self._waiting, self._pace = cluster, running, waiting, pace
        #: True if sequences that lie on R-nodes, in whole or in part, bring more than they cost. None: always.
        self.far_pays: Callable[[], bool] | None = None
        #: Begins to spill pages of the S-Part's device; see Spiller.spill. None: nothing can be spilled.
        self.spill: Callable[[RNodeLedger], bool] | None = None
        self._wants_room: Sequence | None = None  # the first sequence without room since `give_way`

    def wanted(self, seq: Sequence) -> None:
        """Record that a waiting sequence has found no room."""
        if self._wants_room is None:
            self._wants_room = seq

    def give_way(self, mini_batch: int) -> None:
        """Pause a sequence of this mini-batch if one of a lower priority number waits for a slot or for pages."""
        batch, wants_room = self._running.batches[mini_batch], self._wants_room
        self._wants_room = None
        first = next(iter(self._waiting), None)
        if not batch or first is None:
            return
        last = batch[-1]
        full = self._running.full(mini_batch) and first.priority < last.priority
        lacking = wants_room is not None and wants_room in self._waiting and wants_room.priority < last.priority
        if (full or lacking) and self._running.can_pause(last):
            self._pause(last)

    def keep_pace(self, mini_batch: int) -> None:
        """Pause choices of this mini-batch while steps are too long: the newest of the request that has most of them.
        One choice of each request goes on, so a request of one choice is never paused for the time of steps."""
        batch = self._running.batches[mini_batch]
        self._pace.plan(mini_batch, batch)
        if not self._pace.late:
            return
        choices = Counter(seq.request for seq in self._running)
        del choices[None]
        while self._pace.excess > 1:
            pausable = [s for s in batch if choices[s.request] > 1 and self._running.can_pause(s)]
            if not pausable:
                return
            seq = max(pausable, key=lambda s: (choices[s.request], s.order))
            choices[seq.request] -= 1
            self._pace.joined(seq, -1)
            self._pause(seq)

    @property
    def scarce(self) -> bool:
        """True if a sequence lacks pages."""
        return bool(self._running.starved) or any(node.short for node in self._cluster.nodes)

    # -- pages ----------------------------------------------------------------------------------------------------

    def serve_starved(self) -> None:
        """Give free pages to starved sequences, oldest first, before any other sequence can take them."""
        starved = self._running.starved
        for seq in list(starved):
            if seq in starved:  # else it was preempted for an older one
                self._take_free(seq)

    def _take_free(self, seq: Sequence) -> None:
        """Give free pages to a starved sequence. Does nothing to one whose next step gives back enough by itself."""
        node, tokens = seq.placed_on, seq.cached + 1
        if self._cluster.take_free(seq, tokens):
            self._running.starved.remove(seq)
        elif not self._cluster.can_slide(seq) or seq.pages.lacking(tokens) > seq.pages.reusable(seq.cached, tokens):
            self._reclaim(node, seq.pages.lacking(tokens))

    def cover(self, seq: Sequence, tokens: int) -> bool:
        """Count the pages of the step of `seq` that is being planned, after which `tokens` tokens are cached. If its
        R-node has too few, preempt that node's newest sequence.

        False: `seq` must wait until the R-node has acknowledged a FREE or answered a RESIZE, until other sequences have
        given back pages in their steps, or `seq` itself was the newest and is preempted.
        """
        node, starved = seq.placed_on, self._running.starved
        if self._cluster.cover(seq, tokens):
            if seq in starved:
                starved.remove(seq)
            return True
        if seq not in starved:
            insort(starved, seq, key=BY_RANK)
        self._reclaim(node, seq.pages.lacking(tokens))
        return False

    def _reclaim(self, node: RNodeLedger, pages: int) -> None:
        """Bring about that `node` has free pages, `pages` of which a starved sequence lacks."""
        if self._cluster.reclaim(node, pages):
            return
        on_node, starved = self._running.on_node(node), self._running.starved
        pays = self.far_pays is None or len(on_node) == 1 or self.far_pays()
        if node.resident and self.spill is not None and pays and self.spill(node):
            return
        if any(other not in starved and self._cluster.can_slide(other) for other in on_node):
            return  # their next steps give back pages
        newest = on_node[-1]
        if len(on_node) == 1 and node.n_pages < node.max_pages:
            return  # recomputing it would need the same pages: it waits until the lease can grow
        if newest.in_flight or newest.frozen:
            return  # `serve_starved` comes back here once its step has completed
        if self._running.can_pause(newest):
            self._pause(newest)
            self._cluster.reclaim(node, pages)  # from the sequence that was paused longest ago
        else:
            self._cluster.totals.preemptions += 1
            self._running.requeue(newest)

    def _pause(self, seq: Sequence) -> None:
        self._cluster.totals.preemptions += 1
        self._running.pause(seq)
