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

from bisect import insort
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING

from fastdecode.engine.cluster import Cluster
from fastdecode.engine.ledger import RNodeLedger
from fastdecode.engine.scheduling.admission import Greedy, Room
from fastdecode.engine.scheduling.balance import even_out
from fastdecode.engine.scheduling.budgets import StagingBudget, StepBudget
from fastdecode.engine.scheduling.fairness import OUTPUT_WEIGHT
from fastdecode.engine.scheduling.pace import Pace
from fastdecode.engine.scheduling.placement import Wait
from fastdecode.engine.scheduling.plan import Outcome, Plan, PlannedChunk, SchedulerLimits, step_order
from fastdecode.engine.scheduling.queue import BY_RANK, WaitingQueue
from fastdecode.engine.scheduling.speculation import Speculation
from fastdecode.engine.scheduling.step_time import NO_PROMPTS, PromptWork, StepTimes, pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastdecode.engine.pages import PageTable
    from fastdecode.engine.prefixes import Handle
    from fastdecode.engine.scheduling.placement import Placement
    from fastdecode.engine.sequence import Sequence
    from fastdecode.spart.batch import Sampled
    from fastdecode.transports.base import Link


#: Mini-batches are evened out after so many steps, and at once if one has more than twice the sequences of another. Not
#: in every step: a sequence that is moved waits for a step of its new mini-batch that is in flight.
_BALANCE_EVERY = 17  # a prime above the number of mini-batches, so that each has its turn

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
        self.mini_batches: list[list[Sequence]] = [[] for _ in range(limits.mini_batches)]  # each in order of arrival
        self.preemptions = 0
        self.recomputed = 0  # running sequences that were queued again without their cache
        self.recomputed_tokens = 0  # placed a second time, prompts included
        self.prompt_tokens = 0  # prompt tokens of all placed sequences, recomputed ones included
        self.reused_tokens = 0  # those of them that a FORK has shared
        self.changed = False  # another mini-batch may have work now; the reader clears it
        self._staging = StagingBudget(limits.max_staged_tokens, limits.strict_staging)
        self._calls = count(1)
        self._starved: list[Sequence] = []  # wait for a page, in order of arrival
        self.patient = False  # sequences may wait for an R-node when none is connected
        self._failed: list[tuple[Sequence, str]] = []
        self._forks: list[Sequence] = []
        #: Says which prompts another S-node computes, of sequences that start at a placement; None: none.
        self.hand_over: Callable[[Sequence, Placement], bool] | None = None
        self._handovers: list[Sequence] = []
        self._wants_room: Sequence | None = None  # the first one that no R-node had room for since `_give_way`

    @property
    def n_running(self) -> int:
        return sum(map(len, self.mini_batches))

    @property
    def running(self) -> list[Sequence]:
        """All running sequences, by mini-batch."""
        return [seq for batch in self.mini_batches for seq in batch]

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
        return sorted((seq for seq in self.running if seq.node is node), key=BY_RANK)

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
            self._remove(seq, sound=True)

    def take_failed(self) -> list[tuple[Sequence, str]]:
        """Sequences that cannot go on, and why. Each is returned once."""
        failed, self._failed = self._failed, []
        return failed

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
        self.changed = True
        if seq.cancelled:
            self._remove(seq)
        elif not (has_pages and seq.placed_on.alive):
            self._requeue(seq)

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
        self.changed = True
        if seq.cancelled:
            self._remove(seq)
        elif not (succeeded and seq.placed_on.alive):
            seq.prefill_here = True
            self._requeue(seq)

    def hold(self, seq: Sequence) -> None:
        """Leave a sequence that is not in flight out of steps, because the rest of it is being copied to another
        R-node. The caller then calls `let_go`."""
        seq.in_flight = True
        if seq in self._starved:
            self._starved.remove(seq)

    def let_go(self, seq: Sequence, place: tuple[RNodeLedger, Handle, PageTable] | None) -> None:
        """Let a sequence that was held go on at `place`: an R-node, and the handle and pages there. None: where it
        was."""
        seq.in_flight = seq.held = False
        if place is not None:
            self.cluster.move(seq, *place)
        self.changed = True
        if seq.cancelled:
            self._remove(seq, sound=True)
        elif not seq.placed_on.alive:
            self._requeue(seq)

    # -- a step ---------------------------------------------------------------------------------------------------

    def schedule(self, mini_batch: int) -> Plan | None:
        """Plan the next step of a mini-batch that has none in flight; None if it has nothing to do now."""
        self._serve_starved()
        self._balance(mini_batch)
        self._give_way(mini_batch)
        self._keep_pace(mini_batch)
        chunks = self._decode_chunks(mini_batch)
        n_streams = len(chunks)
        n_decoding = sum(chunk.n_tokens for chunk in chunks)
        chunks += self._prompt_chunks(mini_batch, self._budget(mini_batch, n_decoding))
        if not chunks:
            return None
        prompts = NO_PROMPTS
        for chunk in chunks[n_streams:]:
            prompts += PromptWork(chunk.n_tokens, pairs(chunk.seq.cached, chunk.n_tokens))
        self.step_times.begin(mini_batch, prompts, n_decoding > 0)
        self.pace.begin(mini_batch, n_decoding)
        self.admission.tick(1 / len(self.mini_batches))
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
        for chunk, token in zip(plan.chunks, sampled, strict=True):
            seq = chunk.seq
            seq.in_flight = False
            self.cluster.end_slide(seq)
            prefilled = seq.prefilling
            seq.cached += chunk.n_tokens - len(chunk.guesses)
            error = token.error if token is not None else None
            if seq.cancelled:
                self._remove(seq, sound=error is None)
                continue
            if error is not None:
                self._remove(seq)
                self._failed.append((seq, error))
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
                self._remove(seq, sound=True)
            elif not seq.placed_on.alive:
                self._requeue(seq)
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

    def fail(self, plan: Plan, link: Link | None = None) -> list[Sequence]:
        """Remove the sequences of a step that cannot be repeated: those on the R-node behind `link`, or all if it is
        None. The others are recomputed. Returns the removed ones that were not cancelled."""
        self._end_step(plan)
        failed = []
        for seq in (chunk.seq for chunk in plan.chunks):
            if link is not None and seq.placed_on.link is not link:
                self._recompute(seq)
                continue
            seq.in_flight = False
            self._remove(seq)
            if not seq.cancelled:
                failed.append(seq)
        return failed

    def _recompute(self, seq: Sequence) -> None:
        """Requeue a sequence of a step that failed, unless it was cancelled."""
        seq.in_flight = False
        if seq.cancelled:
            self._remove(seq)
        else:
            self._requeue(seq)

    def node_lost(self, node: RNodeLedger) -> None:
        """Requeue the sequences of a lost R-node, those in flight when their step ends. Sequences that no other R-node
        can hold fail; if none is left and the scheduler is patient, `fail_unplaced` says when."""
        node.mark_lost()
        for seq in self.running_on(node):
            if not seq.in_flight:
                self._requeue(seq)
        if not self._waits_for_r_nodes:
            self.fail_unplaced(node.url)

    @property
    def _waits_for_r_nodes(self) -> bool:
        return self.patient and not self.cluster.alive

    def fail_unplaced(self, url: str) -> None:
        """Fail the waiting sequences that no R-node can hold, now that the R-node at `url` is lost."""
        for seq in [s for s in self.waiting if not self.cluster.can_hold(len(s.tokens))]:
            self.waiting.remove(seq)
            self._failed.append((seq, self._loss_message(url)))

    # -- chunks ---------------------------------------------------------------------------------------------------

    def _decode_chunks(self, mini_batch: int) -> list[PlannedChunk]:
        chunks = []
        n = len(self.mini_batches[mini_batch])
        spare = (self.limits.max_batch_tokens - n) // 2  # rows for guesses; as many are left for prompts
        for seq in list(self.mini_batches[mini_batch]):  # oldest first, so a victim of preemption has no chunk yet
            if seq.node is None or seq.prefilling or seq.held:
                continue
            if not self._cover(seq, seq.cached + 1):
                continue
            seq.in_flight = True
            guesses: list[int] = []
            if self.speculation is not None:
                on_page = seq.pages.covered - seq.cached - 1  # a guess is not worth a page
                guesses = self.speculation.guesses(seq, min(spare, on_page), n)
                spare -= len(guesses)
            chunks.append(PlannedChunk(seq, 1 + len(guesses), False, True, tuple(guesses)))
        return chunks

    def _prompt_chunks(self, mini_batch: int, budget: StepBudget) -> list[PlannedChunk]:
        """Chunks of prompts within the budget: first of the mini-batch's unfinished prompts, then of newly admitted
        ones."""
        chunks: list[PlannedChunk] = []
        for seq in list(self.mini_batches[mini_batch]):  # at most one of them is prefilled on the S-node
            if seq.prefilling:
                self._append_prompt_chunk(chunks, seq, budget)
        n_forks = len(self._forks)
        while budget.rows > 0 and (admitted := self._admit(mini_batch, budget)) is not None:
            self._append_prompt_chunk(chunks, admitted, budget)
            if len(self._forks) - n_forks >= _MOST_FORKS:
                break
        return chunks

    def _append_prompt_chunk(self, chunks: list[PlannedChunk], seq: Sequence, budget: StepBudget) -> None:
        """Append the next chunk of a prompt, as long as the budget allows. During a FORK: none."""
        if seq.in_flight:
            return
        if not seq.prefilling:  # it was paused
            if not self._cover(seq, seq.cached + 1):
                return
            seq.in_flight = True
            budget.rows -= 1
            chunks.append(PlannedChunk(seq, 1, prefill=False, sample=True))
            return
        n_tokens = budget.take(seq.cached, seq.prefill_end - seq.cached)
        if n_tokens > 0 and self._cover(seq, seq.cached + n_tokens):
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
                self._wants_room = self._wants_room or seq
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
            if placement is Wait.ROOM and self._wants_room is None:
                self._wants_room = seq
        return None

    def _room(self, running: list[Sequence]) -> Room:
        """The room for newcomers beside the `running` sequences."""
        times, n_batches, shared = self.step_times, len(self.mini_batches), 0.0
        # With a target no stream is paused, because a pause is a long time between two tokens.
        if running and times.s_part and times.target is None:
            r_part = self.cluster.r_part(running)
            if r_part is not None and r_part <= _R_BOUND * (times.base or 0.0):
                shared = max(0.0, n_batches * times.s_part - times.prompt_seconds(len(running))) / len(running)
        slots = n_batches * self.limits.max_seqs
        return Room(slots, self.cluster.tokens, self.cluster.page_groups, shared, times.prompt_seconds)

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
        seq.mini_batch = mini_batch
        insort(self.mini_batches[mini_batch], seq, key=BY_RANK)
        self.pace.joined(seq)

    # -- pauses ---------------------------------------------------------------------------------------------------

    def _give_way(self, mini_batch: int) -> None:
        """Pause a sequence of this mini-batch if one of a lower priority number waits for a slot or for pages."""
        batch, wants_room = self.mini_batches[mini_batch], self._wants_room
        self._wants_room = None
        first = next(iter(self.waiting), None)
        if not batch or first is None:
            return
        last = batch[-1]
        full = len(batch) >= self.limits.max_seqs and first.priority < last.priority
        lacking = wants_room is not None and wants_room in self.waiting and wants_room.priority < last.priority
        if (full or lacking) and self._can_pause(last):
            self.preemptions += 1
            self._pause(last)

    def _keep_pace(self, mini_batch: int) -> None:
        """Pause choices of this mini-batch while steps are too long: the newest of the request that has most of them.
        One choice of each request goes on, so a request of one choice is never paused for the time of steps."""
        batch = self.mini_batches[mini_batch]
        self.pace.plan(mini_batch, batch)
        if not self.pace.late:
            return
        choices = Counter(seq.request for seq in self.running)
        del choices[None]
        while self.pace.over > 1:
            pausable = [s for s in batch if choices[s.request] > 1 and self._can_pause(s)]
            if not pausable:
                return
            seq = max(pausable, key=lambda s: (choices[s.request], s.order))
            choices[seq.request] -= 1
            self.preemptions += 1
            self.pace.joined(seq, -1)
            self._pause(seq)

    def _can_pause(self, seq: Sequence) -> bool:
        return not (seq.in_flight or seq.held or seq.prefilling or seq.cancelled) and seq.placed_on.alive

    def _pause(self, seq: Sequence) -> None:
        """Let a running sequence wait; its R-node keeps its cache until the pages are needed."""
        self._leave(seq)
        self.cluster.pause(seq)
        self.waiting.add(seq)

    # -- pages ----------------------------------------------------------------------------------------------------

    def _serve_starved(self) -> None:
        """Give free pages to starved sequences, oldest first, before any other sequence can take them."""
        for seq in list(self._starved):
            if seq in self._starved:  # else it was preempted for an older one
                self._take_free(seq)

    def _take_free(self, seq: Sequence) -> None:
        """Give free pages to a starved sequence. Does nothing to one whose next step gives back enough by itself."""
        node, tokens = seq.placed_on, seq.cached + 1
        if self.cluster.take_free(seq, tokens):
            self._starved.remove(seq)
        elif not self.cluster.can_slide(seq) or seq.pages.lacking(tokens) > seq.pages.reusable(seq.cached, tokens):
            self._reclaim(node, seq.pages.lacking(tokens))

    def _cover(self, seq: Sequence, tokens: int) -> bool:
        """Count the pages of the step of `seq` that is being planned, after which `tokens` tokens are cached. If its
        R-node has too few, preempt that node's newest sequence.

        False: `seq` must wait until the R-node has acknowledged a FREE or answered a RESIZE, until other sequences have
        given back pages in their steps, or `seq` itself was the newest and is preempted.
        """
        node = seq.placed_on
        if self.cluster.cover(seq, tokens):
            if seq in self._starved:
                self._starved.remove(seq)
            return True
        if seq not in self._starved:
            insort(self._starved, seq, key=BY_RANK)
        self._reclaim(node, seq.pages.lacking(tokens))
        return False

    def _reclaim(self, node: RNodeLedger, pages: int) -> None:
        """Bring about that `node` has free pages, `pages` of which a starved sequence lacks."""
        if self.cluster.reclaim(node, pages):
            return
        running = self.running_on(node)
        if any(other not in self._starved and self.cluster.can_slide(other) for other in running):
            return  # their next steps give back pages
        newest = running[-1]
        if len(running) == 1 and node.n_pages < node.max_pages:
            return  # recomputing it would need the same pages: it waits until the lease can grow
        if not (newest.in_flight or newest.held):  # else `_serve_starved` comes back here once its step has completed
            self.preemptions += 1
            if self._can_pause(newest):
                self._pause(newest)
                self.cluster.reclaim(node, 1)  # from the sequence that was paused longest ago
            else:
                self._requeue(newest)

    def _requeue(self, seq: Sequence) -> None:
        """Take a running sequence off its R-node and queue it, to be recomputed from all of its tokens."""
        node = seq.placed_on
        self.recomputed += 1
        self._remove(seq)
        if self.cluster.can_hold(len(seq.tokens)) or self._waits_for_r_nodes:
            self.add(seq)
        else:
            self._failed.append((seq, self._loss_message(node.url)))

    def _remove(self, seq: Sequence, sound: bool = False) -> None:
        """Take a running sequence off its R-node and out of its mini-batch.

        `sound`: its cached tokens are right, so they may enter the prefix cache. Those of an unfinished prompt may not,
        because the S-node still stages rows for it.
        """
        self._leave(seq)
        self.cluster.release(seq, sound and not seq.prefilling)

    def _leave(self, seq: Sequence) -> None:
        """Take a running sequence out of its mini-batch."""
        assert seq.mini_batch is not None, "the sequence does not run"
        self.mini_batches[seq.mini_batch].remove(seq)
        seq.mini_batch = None
        self._staging.drop(seq)
        if seq in self._starved:
            self._starved.remove(seq)
        self.changed = True

    def _loss_message(self, url: str) -> str:
        if not self.cluster.alive:
            return f"R-node {url} was lost and no other is connected"
        return f"no remaining R-node can cache the sequence's tokens (at most {self.cluster.capacity})"

    # -- balance --------------------------------------------------------------------------------------------------

    def _balance(self, mini_batch: int) -> None:
        """Now and then, move sequences from this mini-batch, which has none in flight, to those of shorter steps."""
        batches = self.mini_batches
        lopsided = len(batches[mini_batch]) > 1 + 2 * min(map(len, batches))
        if len(batches) > 1 and (lopsided or next(self._calls) % _BALANCE_EVERY == 0):
            groups, costs = self.cluster.loads.groups, self.cluster.costs
            self.changed |= even_out(batches, mini_batch, groups, costs, self.limits.max_seqs)
