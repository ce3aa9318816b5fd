"""Which rows go into the next step of which mini-batch. Pure bookkeeping: no torch, no links, no clock.

Iteration-level batching over n mini-batches. Each step of a mini-batch holds one row of every sequence that decodes,
then chunks of prompts, together at most `max_batch_tokens` rows. At most one prompt of a mini-batch is unfinished
between steps, so the S-node stages the K/V of at most n prompts.

The number of arrival is the only priority. Requests are admitted in that order; when an R-node runs out of pages
its newest sequence is preempted: its pages are freed and it waits, in its old place in the queue, to be recomputed. The
oldest sequence of a node is never preempted for another, so it ends, then the next one does: nothing starves.

A prompt that begins as another sequence (prefixes.py) is placed where that one's cache is and takes over its first
tokens: the R-node is asked for a FORK (`take_forks`, `forked`), and the rest of the prompt is attended there
like rows that decode, for the keys and values before it are not on the S-node.

A sequence may change its mini-batch between any two steps at no cost (its cache does not move), so mini-batches are
kept equal in number at every step by handing surplus over.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from fastdecode.engine.cluster import Cluster, RNodeLedger, pages_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastdecode.engine.prefixes import PrefixEntry
    from fastdecode.engine.sequence import Sequence
    from fastdecode.spart.batch import Sampled

_ORDER = attrgetter("order")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on a step. All counts are of one mini-batch."""

    mini_batches: int
    max_batch_tokens: int  # rows of a step; at most `max_rows` of every link's slots
    max_seqs: int  # sequences; at most max_batch_tokens, so that every one can decode in every step
    max_uncached_suffix: int | None = None  # tokens of a prompt that may be left to R-nodes to attend; None: any number

    def __post_init__(self) -> None:
        if self.mini_batches < 1:
            raise ValueError(f"mini_batches must be at least 1, not {self.mini_batches}")
        if not 1 <= self.max_seqs <= self.max_batch_tokens:
            raise ValueError(f"max_seqs must be within 1..max_batch_tokens, not {self.max_seqs}")


class Row(NamedTuple):
    """One sequence's share of a step: its tokens [seq.cached, seq.cached + n_tokens)."""

    seq: Sequence
    n_tokens: int
    prefill: bool  # attended on the S-node; else on the R-node: what decodes, and the rest of a prompt that was forked
    sample: bool  # False: more of the prompt follows


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Rows that attend on R-nodes come first; each kind is in order of link (spart/batch.py)."""

    mini_batch: int
    rows: list[Row]

    @property
    def n_tokens(self) -> int:
        return sum(row.n_tokens for row in self.rows)


class Outcome(NamedTuple):
    """One token that a completed step brought."""

    seq: Sequence
    sampled: Sampled
    finish_reason: str | None


class Scheduler:
    """Queue, mini-batches and preemption. Not thread-safe: the event loop's alone."""

    def __init__(self, cluster: Cluster, limits: SchedulerLimits):
        self.cluster = cluster
        self.limits = limits
        self.waiting: list[Sequence] = []  # in order of arrival
        self.mini_batches: list[list[Sequence]] = [[] for _ in range(limits.mini_batches)]  # each in order of arrival
        self.preemptions = 0
        self.changed = False  # something another mini-batch may have waited for has happened; the reader clears it
        self._starved: list[Sequence] = []  # need a page and wait for one, in order of arrival
        self._failed: list[tuple[Sequence, str]] = []
        self._forks: list[Sequence] = []
        self.prompt_tokens = self.reused_tokens = 0  # looked up among what is kept, and found there

    @property
    def n_running(self) -> int:
        return sum(map(len, self.mini_batches))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.n_running > 0

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_ORDER)

    def cancel(self, seq: Sequence) -> None:
        """Forget a sequence: now if it is not in flight, else when its step is completed. Idempotent."""
        if seq.cancelled:
            return
        seq.cancelled = True
        if seq.mini_batch is None:
            if seq in self.waiting:
                self.waiting.remove(seq)
        elif not seq.in_flight:
            self._leave(seq, keep=True)

    def take_failed(self) -> list[tuple[Sequence, str]]:
        """Sequences that cannot go on, and why. Each is returned once."""
        failed, self._failed = self._failed, []
        return failed

    def take_forks(self) -> list[Sequence]:
        """Sequences that are to share `shared` tokens of `source` on their node. Each is returned once, and `forked` is
        called for it then; until then it is in flight and its source is not dropped."""
        forks, self._forks = self._forks, []
        return forks

    def forked(self, seq: Sequence, done: bool) -> None:
        """The R-node has done so, or could not."""
        seq.in_flight = False
        seq.source.pins -= 1
        if done:
            seq.cached = seq.shared
            if seq.n_generated == 0:
                seq.reused = seq.shared
            self.reused_tokens += seq.shared
        else:
            if seq.source in seq.node.prefixes and not seq.source.pins:
                seq.node.drop(seq.source)
            seq.source, seq.shared = None, 0
        self.changed = True
        if seq.cancelled:
            self._leave(seq)
        elif not seq.node.alive:
            self._requeue(seq)

    # -- a step ---------------------------------------------------------------------------------------------------

    def schedule(self, mini_batch: int) -> Plan | None:
        """The next step of a mini-batch that has none in flight; None if it has nothing to do now."""
        self._feed_starved()
        self._hand_over(mini_batch)
        rows = self._decode_rows(mini_batch)
        rows += self._prefill_rows(mini_batch, self.limits.max_batch_tokens - len(rows))
        rows.sort(key=_place)
        return Plan(mini_batch, rows) if rows else None

    def complete(self, plan: Plan, sampled: Iterable[Sampled | None]) -> list[Outcome]:
        """Book a step that ran: `sampled` has one entry a row. Returns the new tokens in the rows' order."""
        outcomes = []
        for row, token in zip(plan.rows, sampled, strict=True):
            seq = row.seq
            seq.in_flight = False
            seq.cached += row.n_tokens
            sound = not (row.sample and token.error is not None)
            if seq.cancelled:
                self._leave(seq, keep=sound)
                continue
            if not sound:
                self._leave(seq)
                self._failed.append((seq, token.error))
                continue
            if seq.entry is not None and not seq.prefilling:
                seq.entry.computed = True
            reason = None
            if row.sample:
                seq.append(token.token)
                reason = seq.finish_reason()
                outcomes.append(Outcome(seq, token, reason))
            if reason is not None:
                self._leave(seq, keep=True)
            elif not seq.node.alive:
                self._requeue(seq)
        return outcomes

    def recompute(self, plan: Plan) -> None:
        """A step broke off because an R-node was lost. How much of it the others have cached is not known, so every
        sequence of the step starts again from its tokens."""
        for row in plan.rows:
            row.seq.in_flight = False
            if row.seq.cancelled:
                self._leave(row.seq)
            else:
                self._requeue(row.seq)

    def fail(self, plan: Plan) -> list[Sequence]:
        """A step failed for good: its sequences leave. Returns those whose client still waits."""
        failed = []
        for row in plan.rows:
            row.seq.in_flight = False
            self._leave(row.seq)
            if not row.seq.cancelled:
                failed.append(row.seq)
        return failed

    def lost(self, node: RNodeLedger) -> None:
        """An R-node is gone: its sequences wait to be recomputed elsewhere (those in flight when their step ends)."""
        node.lost()
        for seq in sorted(node.sequences, key=_ORDER):
            if not seq.in_flight:
                self._requeue(seq)
        for seq in [s for s in self.waiting if not self.cluster.can_hold(len(s.tokens))]:
            self.waiting.remove(seq)
            self._failed.append((seq, self._loss(node)))

    # -- rows -----------------------------------------------------------------------------------------------------

    def _decode_rows(self, mini_batch: int) -> list[Row]:
        rows = []
        for seq in list(self.mini_batches[mini_batch]):  # oldest first, so a victim of preemption has no row yet
            if seq.node is None or seq.prefilling:
                continue
            if pages_for(seq.cached + 1) > seq.pages and not self._find_page(seq):
                continue
            seq.in_flight = True
            rows.append(Row(seq, 1, prefill=False, sample=True))
        return rows

    def _prefill_rows(self, mini_batch: int, budget: int) -> list[Row]:
        rows: list[Row] = []
        for seq in self.mini_batches[mini_batch]:  # at most one prompt of those that the S-node attends is unfinished
            if seq.prefilling:
                budget -= self._add_chunk(rows, seq, budget)
        while budget > 0 and (seq := self._admit(mini_batch)) is not None:
            budget -= self._add_chunk(rows, seq, budget)
        return rows

    def _add_chunk(self, rows: list[Row], seq: Sequence, budget: int) -> int:
        n_tokens = 0 if seq.in_flight else min(budget, seq.prefill_end - seq.cached)
        if n_tokens > 0:
            seq.in_flight = True
            rows.append(Row(seq, n_tokens, prefill=not seq.shared, sample=seq.cached + n_tokens == seq.prefill_end))
        return n_tokens

    def _admit(self, mini_batch: int) -> Sequence | None:
        """Move the head of the queue into the mini-batch, if that has less than its share and an R-node has room."""
        if not self.waiting:
            return None
        running = self.mini_batches[mini_batch]
        share = -(-(self.n_running + len(self.waiting)) // len(self.mini_batches))
        if len(running) >= min(share, self.limits.max_seqs):
            return None
        seq = self.waiting[0]
        found, coming = self._place_by_prefix(seq), self._place_by_prefix(seq, computed=False)
        worth_it = coming and 2 * coming[2] >= len(seq.tokens) and (found is None or coming[2] > found[2])
        if worth_it and self.cluster.has_room(coming[0], len(seq.tokens)):
            return None  # most of the prompt will be there in a few steps
        node, source, shared = found or (None, None, 0)
        if source is not None:
            node.prefixes.touch(source)  # whatever must go to make room for the prompt, not this
        if node is None or not self.cluster.has_room(node, len(seq.tokens)):
            node, source, shared = self.cluster.place(len(seq.tokens)), None, 0
        if node is None:  # never one where somebody starves: that has no page left
            self.cluster.make_room(len(seq.tokens))
            return None
        del self.waiting[0]
        self.cluster.admit(seq, node)
        seq.mini_batch = mini_batch
        seq.prefill_end = len(seq.tokens)
        self.prompt_tokens += len(seq.tokens)
        if source is not None:
            source.pins += 1
            seq.source, seq.shared, seq.in_flight = source, shared, True
            self._forks.append(seq)
        insort(running, seq, key=_ORDER)
        return seq

    def _place_by_prefix(self, seq: Sequence, computed: bool = True) -> tuple[RNodeLedger, PrefixEntry, int] | None:
        """The R-node that has most of what the prompt begins with; whose it is, and how many tokens."""
        found = self.cluster.find(seq, computed)
        if (
            found is None
            or self.limits.max_uncached_suffix is None
            or len(seq.tokens) - found[2] <= self.limits.max_uncached_suffix
        ):
            return found
        return None

    # -- pages ----------------------------------------------------------------------------------------------------

    def _feed_starved(self) -> None:
        """Give pages that came free to those who starve, oldest first, before anybody else can take them."""
        for seq in list(self._starved):
            if seq in self._starved:
                self._find_page(seq)

    def _find_page(self, seq: Sequence) -> bool:
        """Count one more page for `seq`; if there is none, preempt the newest of its node.

        False: it must wait, until the R-node has acknowledged the FREE at the least, or was itself the newest.
        """
        node = seq.node
        if self.cluster.grow(seq):
            if seq in self._starved:
                self._starved.remove(seq)
            return True
        if seq not in self._starved:
            insort(self._starved, seq, key=_ORDER)
        if not node.pages_freeing:
            node.make_room(1, index=False)
        if not node.pages_freeing:  # else some are on their way
            newest = max(node.sequences, key=_ORDER)
            if not newest.in_flight:  # else it is preempted here when its step has ended
                self.preemptions += 1
                self._requeue(newest)
        return False

    def _requeue(self, seq: Sequence) -> None:
        """Let a running sequence wait to be recomputed, tokens and all."""
        node = seq.node
        self._leave(seq)
        seq.cached = seq.prefill_end = seq.shared = 0
        if self.cluster.can_hold(len(seq.tokens)):
            self.add(seq)
        else:
            self._failed.append((seq, self._loss(node)))

    def _leave(self, seq: Sequence, keep: bool = False) -> None:
        """Off its node. `keep`: what it has cached is sound. (Of a prompt in work, rows are staged on the S-node.)"""
        self.mini_batches[seq.mini_batch].remove(seq)
        seq.mini_batch = None
        if seq in self._starved:
            self._starved.remove(seq)
        self.cluster.release(seq, keep and not seq.prefilling)
        self.changed = True

    def _loss(self, node: RNodeLedger) -> str:
        if not self.cluster.alive:
            return f"R-node {node.url} was lost and no other is connected"
        return f"no R-node that is left can cache the sequence's tokens (at most {self.cluster.capacity})"

    # -- balance --------------------------------------------------------------------------------------------------

    def _hand_over(self, mini_batch: int) -> None:
        """Hand sequences of this mini-batch (none is in flight) to those that have fewer, picking the ones that even
        out the cached tokens best. A prompt in work stays: each mini-batch has at most one."""
        mine = self.mini_batches[mini_batch]
        while True:
            to = min(range(len(self.mini_batches)), key=lambda i: len(self.mini_batches[i]))
            other = self.mini_batches[to]
            movable = [seq for seq in mine if not seq.prefilling]
            if len(mine) - len(other) < 2 or not movable:
                return
            surplus = (sum(s.cached for s in mine) - sum(s.cached for s in other)) / 2
            seq = min(movable, key=lambda s: abs(surplus - s.cached))
            mine.remove(seq)
            insort(other, seq, key=_ORDER)
            seq.mini_batch = to
            self.changed = True


def _place(row: Row) -> tuple[bool, int]:
    return row.prefill, row.seq.node.position
