"""Decides what goes into the next step of each mini-batch. Bookkeeping only: no torch, no links, no clock.

Scheduling is iteration-level, over n mini-batches. A step of a mini-batch holds one token of every sequence that
decodes, then chunks of prompts, together at most `max_batch_tokens` rows. Between steps at most one prompt of a
mini-batch is partly prefilled, so the S-node stages the K and V of at most n prompts.

Requests are admitted in order of arrival, but one that cannot start is passed over within a bound (scheduling/
queue.py). When an R-node runs out of pages, its newest sequence is preempted: its pages are freed, and it waits at its
old position in the queue to be recomputed. The oldest sequence of an R-node is never preempted for another one, so it
ends, then the next one does, and none starves.

A prompt that starts with a cached prefix (cluster.py) shares its first tokens with another sequence: the R-node is
asked for a FORK (`take_forks`, `fork_done`). The uncached suffix is then attended on the R-node like a token that
decodes, because the keys and values before it are not on the S-node.

A sequence may change its mini-batch between any two steps at no cost, because its cache does not move. So a step first
moves sequences to mini-batches whose steps are shorter, until all are about equal.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.admission import Greedy, Room
from fastdecode.engine.scheduling.budgets import StagingBudget, StepBudget, pairs
from fastdecode.engine.scheduling.cluster import Cluster
from fastdecode.engine.scheduling.fairness import OUTPUT_WEIGHT
from fastdecode.engine.scheduling.pace import Pace
from fastdecode.engine.scheduling.pauses import Pauses
from fastdecode.engine.scheduling.placement import Wait
from fastdecode.engine.scheduling.plan import Outcome, Plan, SchedulerLimits, step_order
from fastdecode.engine.scheduling.queue import WaitingQueue
from fastdecode.engine.scheduling.running import Running
from fastdecode.engine.scheduling.speculation import Speculation
from fastdecode.engine.scheduling.step_time import NO_PROMPTS, PromptWork, StepTimes
from fastdecode.engine.state.ledger import RNodeLedger
from fastdecode.engine.state.sequence import PlannedChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastdecode.engine.scheduling.placement import Placement
    from fastdecode.engine.state.pages import PageTable
    from fastdecode.engine.state.prefixes import Handle
    from fastdecode.engine.state.sequence import Sequence
    from fastdecode.spart.step.batch import Sampled
    from fastdecode.transports.base import DataPath


#: Sequences that start with a FORK in one step. They cost no rows, so a crowd with one prompt would start at once and
#: hold up the step.
_MOST_FORKS = 16

#: The R-Part binds if it takes more than this part of a step. Then more sequences in a step bring nothing.
_R_BOUND = 0.95


class Scheduler:
    """Queue, mini-batches and preemption. Not thread-safe: only the event loop's thread calls it."""

    def __init__(
        self,
        cluster: Cluster,
        limits: SchedulerLimits,
        *,
        target_tbt: float | None = None,
        admission: Greedy | None = None,
        speculation: Speculation | None = None,
    ):
        """`target_tbt`: seconds between two tokens of a stream that should not be exceeded; see StepTimes and Pace.
        `admission` None: every sequence that has room starts. `speculation` None: no tokens are guessed."""
        self.cluster = cluster
        self.admission = admission or Greedy()
        self.limits = limits
        self.speculation = speculation
        self.step_times = StepTimes(target_tbt)
        self.pace = Pace(cluster, target_tbt, limits.mini_batches)
        self.waiting = WaitingQueue()
        self._staging = StagingBudget(limits.max_staged_tokens, limits.strict_staging)
        self._running = Running(cluster, self.waiting, self._staging, limits.mini_batches)
        self.mini_batches = self._running.batches
        self._pauses = Pauses(cluster, self._running, self.waiting, self.pace, limits.max_seqs)
        self.recomputed_tokens = 0  # placed a second time, prompts included
        self.prompt_tokens = 0  # prompt tokens of all placed sequences, recomputed ones included
        self.reused_tokens = 0  # those of them that a FORK has shared
        self._forks: list[Sequence] = []
        #: Says which prompts another S-node computes, of sequences that start at a placement; None: none.
        self.hand_over: Callable[[Sequence, Placement], bool] | None = None
        self._handovers: list[Sequence] = []

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """All running sequences, by mini-batch."""
        return list(self._running)

    @property
    def preemptions(self) -> int:
        """Running sequences that were paused, or taken off their R-nodes for want of pages."""
        return self._pauses.preemptions

    @property
    def recomputed(self) -> int:
        """Running sequences that were queued again without their cache."""
        return self._running.recomputed

    @property
    def has_work(self) -> bool:
        return len(self.waiting) > 0 or self.n_running > 0

    def backlog(self, n_tokens: int) -> int:
        """How many sequences would wait for others to end if one of `n_tokens` tokens joined the queue.

        The first ones in the queue, which have room to run beside the running ones, do not count. Room is free sequence
        slots, sequence indexes and pages, of all R-nodes together; there is none while steps may not get longer.
        """
        pages, indexes = self.cluster.room
        slots = self.limits.mini_batches * self.limits.max_seqs - self.n_running
        limit = 0 if self.pace.refused and self.n_running else min(slots, indexes)
        lengths = [len(seq.tokens) for seq in self.waiting] + [n_tokens]
        for n, length in enumerate(lengths):
            pages -= self.cluster.pages_for(length)
            if n >= limit or pages < 0:
                return len(lengths) - n
        return 0

    def running_on(self, node: RNodeLedger) -> list[Sequence]:
        """The running sequences that `node` caches, in order of arrival."""
        return self._running.on(node)

    def add(self, seq: Sequence) -> None:
        """Put a sequence into the queue, at its position by arrival."""
        self.waiting.add(seq)

    def cancel(self, seq: Sequence) -> None:
        """Remove a sequence: now if it is not in flight, else when its step has completed. Idempotent."""
        if seq.cancelled:
            return
        seq.cancelled = True
        self.admission.left(seq, ended=False)
        if seq.mini_batch is None:
            if seq in self.waiting:
                self.waiting.remove(seq)
            if seq.paused:
                seq.placed_on.drop_paused(seq)
        elif not seq.in_flight:
            self._running.remove(seq, sound=True)

    def take_failed(self) -> list[tuple[Sequence, str]]:
        """Sequences that cannot go on, and why. Each is returned once."""
        return self._running.take_failed()

    def take_changed(self) -> bool:
        """True if another mini-batch may have work since the last call."""
        changed, self._running.changed = self._running.changed, False
        return changed

    def wait_for_r_nodes(self) -> None:
        """Let sequences wait for an R-node when none is connected."""
        self._running.patient = True

    def take_forks(self) -> list[Sequence]:
        """Placed sequences that share `shared_tokens` tokens of their `source`. Each is returned once.

        The caller asks the R-node for a FORK and then calls `fork_done`; until then the sequence counts as in flight
        and its source is not evicted.
        """
        forks, self._forks = self._forks, []
        return forks

    def fork_done(self, seq: Sequence, succeeded: bool) -> None:
        """Record the result of a FORK. After a failed one the whole prompt is prefilled."""
        seq.in_flight = False
        has_pages = self.cluster.end_fork(seq, succeeded)
        if succeeded:
            seq.cached = seq.shared_tokens
            if seq.n_generated == 0:
                seq.reused = seq.shared_tokens
            self.reused_tokens += seq.shared_tokens
        self._running.changed = True
        if seq.cancelled:
            self._running.remove(seq)
        elif not (has_pages and seq.placed_on.alive):
            self._running.requeue(seq)

    def take_handovers(self) -> list[Sequence]:
        """Placed sequences whose prompts another S-node is to compute. Each is returned once.

        Until the caller calls `taken`, the sequence counts as in flight.
        """
        handovers, self._handovers = self._handovers, []
        return handovers

    def taken(self, seq: Sequence, succeeded: bool) -> None:
        """Record whether the R-node has all tokens of `seq` but the last. If not, its prompt is computed here."""
        seq.in_flight = False
        if succeeded:
            seq.cached = seq.shared_tokens = len(seq.tokens) - 1
        self._running.changed = True
        if seq.cancelled:
            self._running.remove(seq)
        elif not (succeeded and seq.placed_on.alive):
            seq.prefill_here = True
            self._running.requeue(seq)

    def move(self, seq: Sequence, target: RNodeLedger, handle: Handle, pages: PageTable, cached: int) -> None:
        """Let a running sequence that is not in flight go on at `target`, which has its first `cached` tokens. Tokens
        beyond these, which steps have cached at the old place meanwhile, are computed again by its next step."""
        if seq in self._running.starved:
            self._running.starved.remove(seq)
        seq.cached, seq.held, seq.decoding = cached, False, None
        self.cluster.move(seq, target, handle, pages)
        self._running.join_next(seq, self.limits.max_seqs)

    # -- a step ---------------------------------------------------------------------------------------------------

    def schedule(self, mini_batch: int) -> Plan | None:
        """Plan the next step of a mini-batch that has none in flight; None if it has nothing to do now."""
        self._pauses.serve_starved()
        self._running.balance(mini_batch, self.limits.max_seqs)
        self._pauses.give_way(mini_batch)
        self._pauses.keep_pace(mini_batch)
        chunks, n_decoding = self._decode_chunks(mini_batch)
        n_streams = len(chunks)
        chunks += self._prompt_chunks(mini_batch, self._budget(mini_batch, n_decoding))
        if not chunks:
            return None
        self._running.begin(mini_batch)
        of = (PromptWork(chunk.n_tokens, pairs(chunk.seq.cached, chunk.n_tokens)) for chunk in chunks[n_streams:])
        prompts = sum(of, NO_PROMPTS)
        self.step_times.begin(mini_batch, prompts, n_decoding > 0)
        self.pace.begin(mini_batch, n_decoding)
        self.admission.tick(1 / len(self.mini_batches))
        if len(chunks) > n_streams or len(self.cluster.nodes) > 1:
            chunks.sort(key=step_order)
        return Plan(mini_batch, chunks, prompts)

    def _budget(self, mini_batch: int, n_decoding: int) -> StepBudget:
        """The budget of the prompts of a mini-batch's next step beside `n_decoding` decoding rows."""
        others = [batch for i, batch in enumerate(self.mini_batches) if i != mini_batch]
        return self.step_times.budget(
            mini_batch,
            self.limits.max_batch_tokens - n_decoding,
            sharers=1 + sum(any(seq.prefilling for seq in batch) for batch in others),
            streams=n_decoding > 0 or any(not seq.prefilling for batch in others for seq in batch),
        )

    def complete(
        self,
        plan: Plan,
        sampled: Iterable[Sampled | None],
        seconds: float | None = None,
        s_seconds: float | None = None,
    ) -> list[Outcome]:
        """Record a step that ran. `sampled` has one entry for each chunk, None if nothing was sampled; `seconds` is how
        long it took, and `s_seconds` how long its S-Part computed, if that is known. Returns the new tokens in the
        chunks' order."""
        self._end_step(plan, seconds, s_seconds)
        if self.speculation is not None and seconds is not None and plan.prompts is NO_PROMPTS:
            self.speculation.took(plan.n_tokens, seconds)
        outcomes = []
        clients: list[str] = []  # one entry for each token of `decodes_on`
        plain = self.speculation is None
        for chunk, token in zip(plan.chunks, sampled, strict=True):
            seq = chunk.seq
            seq.in_flight = False
            if plain and chunk is seq.decoding and token is not None and seq.decodes_on(token):
                clients.append(seq.params.client)
                outcomes.append(Outcome(seq, token, None))
                continue
            self.cluster.end_slide(seq)
            prefilled = seq.prefilling
            seq.cached += chunk.n_tokens - len(chunk.guesses)
            error = token.error if token is not None else None
            if seq.cancelled:
                self._running.remove(seq, sound=error is None)
                continue
            if error is not None:
                self._running.remove(seq)
                self._running.fail(seq, error)
                continue
            if prefilled and not seq.prefilling:
                self._staging.drop(seq)
                self.cluster.mark_prefilled(seq)
            reason = None
            for drawn in self._drawn(chunk, token):
                seq.append(drawn.token)
                self.waiting.shares.charge(seq.client, OUTPUT_WEIGHT)
                reason = seq.finish_reason()
                outcomes.append(Outcome(seq, drawn, reason))
                if reason is not None:
                    break
            if reason is not None:
                self.admission.left(seq, ended=reason == "stop")
                self._running.remove(seq, sound=True)
            elif not seq.placed_on.alive:
                self._running.requeue(seq)
        for client, n in Counter(clients).items():
            self.waiting.shares.charge(client, n * OUTPUT_WEIGHT)
        return outcomes

    def _end_step(self, plan: Plan, seconds: float | None = None, s_seconds: float | None = None) -> None:
        """Learn from the times of a step; it has failed if `seconds` is None."""
        undisturbed = self.step_times.end(plan.mini_batch, seconds, s_seconds)
        self.pace.end(plan.mini_batch, undisturbed, s_seconds if plan.prompts is NO_PROMPTS else None)

    def _drawn(self, chunk: PlannedChunk, first: Sampled | None) -> list[Sampled]:
        """The tokens that a step has drawn after a chunk: one, and one for each guess that was right."""
        if first is None or self.speculation is None:
            return [] if first is None else [first]
        drawn = self.speculation.judge(chunk.seq, chunk.guesses, first)
        chunk.seq.cached += len(drawn) - 1
        chunk.seq.overrun = len(drawn) <= len(chunk.guesses)
        return drawn

    def recompute(self, plan: Plan) -> None:
        """Requeue the sequences of a step whose R-node was lost."""
        self._end_step(plan)
        for chunk in plan.chunks:
            self._recompute(chunk.seq)

    def fail(self, plan: Plan, link: DataPath | None = None) -> list[Sequence]:
        """Remove the sequences of a step that cannot be repeated: those on the R-node behind `link`, or all if it is
        None. The others are recomputed. Returns the removed ones that were not cancelled."""
        self._end_step(plan)
        failed = []
        for seq in (chunk.seq for chunk in plan.chunks):
            if link is not None and seq.placed_on.link is not link:
                self._recompute(seq)
                continue
            seq.in_flight = False
            self._running.remove(seq)
            if not seq.cancelled:
                failed.append(seq)
        return failed

    def _recompute(self, seq: Sequence) -> None:
        """Requeue a sequence of a step that failed, unless it was cancelled."""
        seq.in_flight = False
        if seq.cancelled:
            self._running.remove(seq)
        else:
            self._running.requeue(seq)

    def node_lost(self, node: RNodeLedger) -> None:
        """Requeue the sequences of a lost R-node, those in flight when their step ends. Sequences that no other R-node
        can hold fail; if none is left and sequences may wait for one, `fail_unplaced` says when."""
        self._running.node_lost(node)

    def fail_unplaced(self, url: str) -> None:
        """Fail the waiting sequences that no R-node can hold, now that the R-node at `url` is lost."""
        self._running.fail_unplaced(url)

    # -- chunks ---------------------------------------------------------------------------------------------------

    def _decode_chunks(self, mini_batch: int) -> tuple[list[PlannedChunk], int]:
        """The chunks of the sequences that decode, and how many rows they have together."""
        # Every token passes here: pages are asked for only where they may be lacking, and one chunk serves all steps.
        chunks = []
        n, pauses = len(self.mini_batches[mini_batch]), self._pauses
        beside = spare = self.limits.max_batch_tokens - n  # rows beside one of each sequence
        guessing = spare // 2  # rows for guesses; as many are left for prompts
        scarce = pauses.scarce
        for seq in list(self.mini_batches[mini_batch]):  # oldest first, so a victim of preemption has no chunk yet
            cached = seq.cached
            if seq.mini_batch is None or cached < seq.prefill_end or seq.held:
                continue
            n_tokens = 1
            if (chunk := seq.decoding) is None and len(seq.tokens) - cached > 1:  # it has moved
                n_tokens = min(len(seq.tokens) - cached, 1 + spare)
            if scarce or cached + n_tokens > seq.pages.covered:
                covered = pauses.cover(seq, cached + n_tokens)
                scarce = pauses.scarce
                if not covered:
                    continue
            seq.in_flight = True
            if chunk is None:
                chunk = PlannedChunk(seq, n_tokens, False, cached + n_tokens == len(seq.tokens))
                if chunk.sample and n_tokens == 1:
                    seq.decoding = chunk
                spare -= n_tokens - 1
            if self.speculation is not None and chunk is seq.decoding:
                on_page = seq.pages.covered - cached - 1  # a guess is not worth a page
                if guesses := self.speculation.guesses(seq, min(spare, guessing, on_page), n):
                    spare -= len(guesses)
                    guessing -= len(guesses)
                    chunk = PlannedChunk(seq, 1 + len(guesses), False, True, tuple(guesses))
            chunks.append(chunk)
        return chunks, len(chunks) + beside - spare

    def _prompt_chunks(self, mini_batch: int, budget: StepBudget) -> list[PlannedChunk]:
        """Chunks of prompts within the budget: first of the mini-batch's unfinished prompts, then of newly admitted
        ones."""
        chunks: list[PlannedChunk] = []
        for seq in [seq for seq in self.mini_batches[mini_batch] if seq.cached < seq.prefill_end]:
            self._append_prompt_chunk(chunks, seq, budget)  # at most one of them is prefilled on the S-node
        n_forks = len(self._forks)
        while budget.rows > 0 and (admitted := self._admit(mini_batch, budget)) is not None:
            self._append_prompt_chunk(chunks, admitted, budget)
            if len(self._forks) - n_forks >= _MOST_FORKS:
                break
        return chunks

    def _append_prompt_chunk(self, chunks: list[PlannedChunk], seq: Sequence, budget: StepBudget) -> None:
        """Append the next chunk of a prompt, as long as the budget allows. A sequence that waits for a FORK, or that
        was preempted for an older sequence of this step, gets none."""
        if seq.in_flight or seq.mini_batch is None:
            return
        if not seq.prefilling:  # it was paused
            n_tokens = min(len(seq.tokens) - seq.cached, budget.rows)  # more than one if it had moved just before
            if not self._pauses.cover(seq, seq.cached + n_tokens):
                return
            seq.in_flight = True
            budget.rows -= n_tokens
            sample = seq.cached + n_tokens == len(seq.tokens)
            chunks.append(PlannedChunk(seq, n_tokens, prefill=False, sample=sample))
            return
        n_tokens = budget.take(seq.cached, seq.prefill_end - seq.cached)
        if n_tokens > 0 and self._pauses.cover(seq, seq.cached + n_tokens):
            seq.in_flight = True
            last = seq.cached + n_tokens == seq.prefill_end
            in_one = last and not seq.cached
            prefill = not seq.shared_tokens and (in_one or self._staging.holds(seq.prefill_end))
            if prefill and not last:
                self._staging.stage(seq, seq.prefill_end)
            chunks.append(PlannedChunk(seq, n_tokens, prefill=prefill, sample=last))

    def _admit(self, mini_batch: int, budget: StepBudget) -> Sequence | None:
        """Move the first waiting sequence that can start into the mini-batch, if that has less than its share."""
        running = self.mini_batches[mini_batch]
        share = -(-(self.n_running + len(self.waiting)) // len(self.mini_batches))
        if not self.waiting or not self.cluster.alive or len(running) >= min(share, self.limits.max_seqs):
            return None
        everywhere = self.running
        room = self._room(everywhere)
        for seq in self.waiting.candidates():
            if not self.admission.may_start(seq, everywhere, self.waiting, room):
                return None
            if not self.pace.allows(seq):
                self._pauses.wanted(seq)
                continue
            if seq.paused:
                wait = self.cluster.resume(seq)
                if wait is Wait.FREE:
                    return None
                if wait is None:
                    self.waiting.start(seq)
                    self._join(seq, mini_batch)
                    return seq
                continue
            n_tokens = len(seq.tokens)
            if budget.chunk(0, n_tokens) < n_tokens and not self._staging.has_room(n_tokens):
                continue
            placement = self.cluster.place(seq, self.waiting)
            if placement is Wait.FREE:
                return None  # a sequence behind it would take the pages that are being freed for it
            if not isinstance(placement, Wait):
                self.waiting.start(seq)
                self._start(seq, placement, mini_batch)
                return seq
            if placement is Wait.ROOM:
                self._pauses.wanted(seq)
        return None

    def _room(self, running: list[Sequence]) -> Room:
        """The room for newcomers beside the `running` sequences."""
        times, n_batches, shared, covered = self.step_times, len(self.mini_batches), 0.0, 0.0
        if running and times.s_part and (r_part := self.cluster.r_part(running)):
            covered = n_batches * times.s_part / r_part * sum(seq.cached for seq in running)
            # With a target no stream is paused, because a pause is a long time between two tokens.
            if times.target is None and r_part <= _R_BOUND * (times.base or 0.0):
                shared = max(0.0, n_batches * times.s_part - times.prompt_seconds(len(running))) / len(running)
        slots = n_batches * self.limits.max_seqs
        return Room(slots, self.cluster.tokens, self.cluster.page_groups, shared, times.prompt_seconds, covered)

    def _start(self, seq: Sequence, placement: Placement, mini_batch: int) -> None:
        handed_over = self.hand_over is not None and self.hand_over(seq, placement)
        self.cluster.admit(seq, placement)
        self.admission.started(seq)
        if not seq.n_generated:
            self.waiting.shares.charge(seq.client, len(seq.tokens) - seq.shared_tokens)
        else:
            self.recomputed_tokens += len(seq.tokens) - seq.shared_tokens
        seq.prefill_end = len(seq.tokens)
        self.prompt_tokens += len(seq.tokens)
        if seq.source is not None:
            seq.in_flight = True
            self._forks.append(seq)
        if handed_over:
            seq.in_flight = True
            self._handovers.append(seq)
        self._join(seq, mini_batch)

    def _join(self, seq: Sequence, mini_batch: int) -> None:
        self._running.join(seq, mini_batch)
        self.pace.joined(seq)
