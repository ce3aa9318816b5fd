"""The running sequences by mini-batch, and their ways in and out."""

from __future__ import annotations

from bisect import insort
from itertools import chain, count
from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.even_out import even_out
from fastdecode.engine.scheduling.queue import BY_RANK
from fastdecode.engine.scheduling.way_choice import FAR, NEAR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastdecode.engine.scheduling.budgets import StagingBudget
    from fastdecode.engine.scheduling.cluster import Cluster
    from fastdecode.engine.scheduling.plan import SchedulerLimits
    from fastdecode.engine.scheduling.queue import WaitingQueue
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.sequence import Sequence

#: Mini-batches are evened out after this many steps, and at once if one has more than twice the sequences of another.
#: Not in every step: a sequence that changes its mini-batch waits for the new one's step in flight.
_EVEN_OUT_EVERY = 17  # a prime above the number of mini-batches, so that each has its turn


class Running:
    """An iterable of the running sequences. A sequence that leaves has ended, pauses, or is queued to be recomputed."""

    def __init__(self, cluster: Cluster, waiting: WaitingQueue, staging: StagingBudget, limits: SchedulerLimits):
        self.limits = limits
        self.batches: list[list[Sequence]] = [[] for _ in range(limits.mini_batches)]  # each in order of arrival
        self.starved: list[Sequence] = []  # sequences that lack a page, in order of arrival
        #: True if the mini-batches are the near and the far batch (way_choice.py), which are not evened out.
        self.near_and_far = False
        self.patient = False  # sequences may wait for an R-node when none is connected
        self.changed = False  # another mini-batch may have work now; the reader clears it
        self._cluster, self._waiting, self._staging = cluster, waiting, staging
        self._failed: list[tuple[Sequence, str]] = []
        self._calls = count(1)  # of `even_out`
        self._begun = [0] * limits.mini_batches  # the number of steps that were planned before each one's last step
        self._steps = count(1)

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self.batches)

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def full(self, mini_batch: int) -> bool:
        """True if a mini-batch has as many sequences as it may."""
        return len(self.batches[mini_batch]) >= self.limits.max_batch_size

    def on_node(self, node: RNodeLedger) -> list[Sequence]:
        """The running sequences that `node` caches, in order of arrival."""
        return sorted((seq for seq in self if seq.node is node), key=BY_RANK)

    def with_kv_on(self, node: RNodeLedger) -> list[Sequence]:
        """The running sequences of which `node` has all K and V, or those of a spilled prefix."""
        return [seq for seq in self if node in seq.places]

    def join(self, seq: Sequence, mini_batch: int) -> None:
        """Put a sequence that is placed on an R-node into a mini-batch."""
        seq.mini_batch = mini_batch
        insort(self.batches[mini_batch], seq, key=BY_RANK)

    def home(self, seq: Sequence) -> int:
        """The mini-batch of a sequence, if the mini-batches are the near and the far one."""
        return NEAR if seq.placed_on.resident and seq.prefix is None else FAR

    def go_home(self, seq: Sequence) -> None:
        """Put a running sequence that is not in flight, and that has come to lie elsewhere, into the near or the far
        batch, if these are the mini-batches."""
        if not self.near_and_far or seq.mini_batch is None:
            return
        home = self.home(seq)
        if seq.mini_batch != home and not self.full(home):
            self.batches[seq.mini_batch].remove(seq)
            self.join(seq, home)
            self.changed = True

    def begin(self, mini_batch: int) -> None:
        """Record that a step of a mini-batch begins."""
        self._begun[mini_batch] = next(self._steps)

    def join_next(self, seq: Sequence) -> None:
        """Put a running sequence that is not in flight into the mini-batch whose next step comes first: the one whose
        last step began first."""
        assert seq.mini_batch is not None, "the sequence does not run"
        if self.near_and_far:
            self.go_home(seq)
            return
        with_room = [i for i in range(len(self.batches)) if i == seq.mini_batch or not self.full(i)]
        self.batches[seq.mini_batch].remove(seq)
        self.join(seq, min(with_room, key=self._begun.__getitem__))
        self.changed = True

    def even_out(self, mini_batch: int) -> None:
        """Now and then, put sequences of this mini-batch, which has no step in flight, into mini-batches of shorter
        steps."""
        if self.near_and_far:
            return
        lopsided = len(self.batches[mini_batch]) > 1 + 2 * min(map(len, self.batches))
        if len(self.batches) > 1 and (lopsided or next(self._calls) % _EVEN_OUT_EVERY == 0):
            groups, costs = self._cluster.loads.groups, self._cluster.costs
            self.changed |= even_out(self.batches, mini_batch, groups, costs, self.limits.max_batch_size)

    def remove(self, seq: Sequence, sound: bool = False) -> None:
        """Take a running sequence off its R-node and out of its mini-batch.

        `sound`: its cached tokens are right, so they may enter the prefix cache. The tokens of an unfinished prompt may
        not, because the S-node still stages rows for it.
        """
        self._leave(seq)
        self._cluster.release(seq, sound and not seq.prefilling)

    def can_pause(self, seq: Sequence) -> bool:
        """True if a running sequence may be paused now."""
        return not (seq.in_flight or seq.frozen or seq.prefilling or seq.cancelled) and seq.placed_on.alive

    def pause(self, seq: Sequence) -> None:
        """Let a running sequence wait; its R-node keeps its cache until the pages are needed."""
        self._leave(seq)
        self._cluster.pause(seq)
        self._waiting.add(seq)

    def requeue(self, seq: Sequence) -> None:
        """Take a running sequence off its R-node and queue it, to be recomputed from all of its tokens."""
        node = seq.placed_on
        self._cluster.totals.recomputed += 1
        self.remove(seq)
        if self._cluster.can_cache(len(seq.tokens)) or self._waits_for_r_nodes:
            self._waiting.add(seq)
        else:
            self._failed.append((seq, self._loss_message(node.url)))

    def node_lost(self, node: RNodeLedger) -> None:
        """Requeue the sequences of a lost R-node; a sequence in flight follows when its step ends. Sequences that no
        other R-node can cache fail: now, or on `fail_unplaced` if no R-node is left and sequences may wait for one."""
        node.mark_lost()
        for other in self._cluster.nodes:
            for paused in [seq for seq in other.paused if seq.has_prefix_on(node)]:
                other.drop_paused(paused)
        for seq in sorted(self.with_kv_on(node), key=BY_RANK):
            if not seq.in_flight:
                self.requeue(seq)
        if not self._waits_for_r_nodes:
            self.fail_unplaced(node.url)

    def fail_unplaced(self, url: str) -> None:
        """Fail the waiting sequences that no R-node can cache, now that the R-node at `url` is lost."""
        for seq in [s for s in self._waiting if not self._cluster.can_cache(len(s.tokens))]:
            self._waiting.remove(seq)
            self.fail(seq, self._loss_message(url))

    def fail(self, seq: Sequence, reason: str) -> None:
        """Record that a sequence that neither runs nor waits cannot go on."""
        self._failed.append((seq, reason))

    def take_failed(self) -> list[tuple[Sequence, str]]:
        """Sequences that cannot go on, and why. Each is returned once."""
        failed, self._failed = self._failed, []
        return failed

    def _leave(self, seq: Sequence) -> None:
        """Take a running sequence out of its mini-batch."""
        assert seq.mini_batch is not None, "the sequence does not run"
        self.batches[seq.mini_batch].remove(seq)
        seq.mini_batch = None
        self._staging.drop(seq)
        if seq in self.starved:
            self.starved.remove(seq)
        self.changed = True

    @property
    def _waits_for_r_nodes(self) -> bool:
        return self.patient and self._cluster.lost

    def _loss_message(self, url: str) -> str:
        if self._cluster.lost:
            return f"R-node {url} was lost and no other is connected"
        return f"no remaining R-node can cache the sequence's tokens (at most {self._cluster.capacity})"
