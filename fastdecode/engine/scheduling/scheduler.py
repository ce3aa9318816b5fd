"""Decides what goes into the next step of each mini-batch. Bookkeeping only: no torch, no links, no clock.

Scheduling is iteration-level, over n mini-batches. A step of a mini-batch holds one token of every sequence that
decodes, then chunks of prompts, together at most `max_batch_tokens` rows. Between steps at most one prompt of a
mini-batch is partly prefilled, so the S-node stages the K and V of at most n prompts.

Requests are admitted in order of priority, then of the tokens that their clients were served, then of arrival. One that
cannot start is passed over within a bound (queue.py).
When an R-node runs out of pages, its newest sequence is preempted and waits at its old position in the queue: paused,
with its cache until the pages are needed, or to be recomputed if its prompt is unfinished. The oldest sequence of an
R-node is never preempted for another one, so it ends, then the next one does, and none starves.

A prompt that starts with a cached prefix (cluster.py) shares its first tokens with another sequence: the R-node is
asked for a FORK (`take_forks`, `fork_done`). The uncached suffix is then attended on the R-node like a token that
decodes, because the keys and values before it are not on the S-node.

A sequence may change its mini-batch between any two steps at no cost, because its cache stays where it is. So a step
first puts sequences into mini-batches whose steps are shorter, until all steps are about equal.

With SchedulerLimits.prompts_apart, a slot of its own has the steps of prompts. In these the S-node computes the prompts
of all mini-batches, while the sequences that decode go on in the steps of their mini-batches. Only this slot admits
sequences, each to the mini-batch that has fewest.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.admission import SCHEDULES, Room
from fastdecode.engine.scheduling.budgets import StagingBudget, StepBudget, pairs
from fastdecode.engine.scheduling.chunks import ChunkPlanner
from fastdecode.engine.scheduling.cluster import Cluster
from fastdecode.engine.scheduling.fairness import OUTPUT_WEIGHT
from fastdecode.engine.scheduling.pace import Pace
from fastdecode.engine.scheduling.pauses import Pauses
from fastdecode.engine.scheduling.placement import Wait
from fastdecode.engine.scheduling.plan import Outcome, Plan, step_order
from fastdecode.engine.scheduling.queue import BY_RANK, WaitingQueue
from fastdecode.engine.scheduling.running import Running
from fastdecode.engine.scheduling.speculation import Speculation
from fastdecode.engine.scheduling.step_time import NO_PROMPTS, PromptWork, StepTimes
from fastdecode.engine.scheduling.way_choice import FAR, NEAR, WayChoice
from fastdecode.engine.state.ledger import RNodeLedger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fastdecode.engine.scheduling.options import EngineOptions
    from fastdecode.engine.scheduling.placement import Placement
    from fastdecode.engine.state.pages import PageTable
    from fastdecode.engine.state.prefixes import Handle
    from fastdecode.engine.state.sequence import PlannedChunk, Sequence
    from fastdecode.spart.step.batch import Sampled
    from fastdecode.transports.base import DataPath


#: Most sequences that start with a FORK in one step. They cost no rows, so without a bound many sequences with one
#: prompt would start in one step and delay it.
_MOST_FORKS = 16

#: The R-Part binds if it takes more than this share of a step. Then more sequences bring no more tokens a second.
_R_BOUND = 0.95


class Scheduler:
    """Queue, mini-batches and preemption. Not thread-safe: only the event loop's thread calls it."""

    def __init__(self, cluster: Cluster, options: EngineOptions, mtp: bool = False):
        """`mtp`: the model has an MTP head, which makes the guesses."""
        self.cluster = cluster
        self.limits = limits = options.limits
        self.admission = SCHEDULES[options.schedule]()
        #: None: no tokens are guessed.
        self.speculation = Speculation(cluster.totals, options.guesses, mtp) if options.guesses else None
        self.step_times = StepTimes(options.target_tbt, limits.prompts_apart)
        self.pace = Pace(cluster, options.target_tbt, limits.mini_batches)
        #: None: the mini-batches are not the near and the far batch, and are evened out.
        self.way_choice: WayChoice | None = None
        self.waiting = WaitingQueue()
        self._staging = StagingBudget(limits.max_staged_tokens, limits.strict_staging)
        self.running = Running(cluster, self.waiting, self._staging, limits)
        self.mini_batches = self.running.batches
        self.pauses = Pauses(cluster, self.running, self.waiting, self.pace)
        if cluster.nodes[0].resident and limits.prompts_apart and limits.mini_batches == 2:
            self.way_choice = WayChoice(cluster, options.gpu_slowdown, options.s_part_seconds)
            self.running.near_and_far = self.pace.apart = True
            self.pauses.far_pays = self.far_pays
        self._chunks = ChunkPlanner(limits, self.pauses, self._staging, cluster.states, self.speculation)
        self.recomputed_tokens = 0  # placed a second time, prompts included
        self._forks: list[Sequence] = []
        #: True if a prefill S-node is to compute the prompt of a sequence that starts at a placement; None: there is
        #: none.
        self.wants_remote_prefill: Callable[[Sequence, Placement], bool] | None = None
        self._awaiting_kv: list[Sequence] = []

    @property
    def _most_sequences(self) -> int:
        """Sequences that may run at once."""
        return min(self.limits.mini_batches * self.limits.max_batch_size, self.cluster.states.total)

    def backlog(self, n_tokens: int) -> int:
        """How many sequences would wait for others to end if a sequence of `n_tokens` tokens joined the queue.

        The first sequences in the queue do not count if they have room to run beside the running ones. Room is free
        sequence slots, sequence indexes and pages of all R-nodes together. No sequence has room while steps may not get
        longer.
        """
        pages, indexes = self.cluster.room
        slots = self._most_sequences - len(self.running)
        limit = 0 if self.pace.refused and len(self.running) else min(slots, indexes)
        lengths = [len(seq.tokens) for seq in self.waiting] + [n_tokens]
        for n, length in enumerate(lengths):
            pages -= self.cluster.pages_for(length)
            if n >= limit or pages < 0:
                return len(lengths) - n
        return 0

    def add(self, seq: Sequence) -> None:
        """Put a sequence into the queue, at its position by priority and arrival."""
        self.waiting.add(seq)

    def cancel(self, seq: Sequence) -> None:
        """Remove a sequence now, or once its step in flight has completed. Idempotent."""
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
            self.running.remove(seq, sound=True)

    def take_changed(self) -> bool:
        """True if another mini-batch may have work since the last call."""
        changed, self.running.changed = self.running.changed, False
        return changed

    def take_forks(self) -> list[Sequence]:
        """Placed sequences that share `shared_tokens` tokens of their `source`. Each is returned once.

        The caller asks the R-node for a FORK and then calls `fork_done`; until then the sequence counts as in flight
        and its source is not evicted.
        """
        forks, self._forks = self._forks, []
        return forks

    def fork_done(self, seq: Sequence, succeeded: bool) -> None:
        """Record the result of a FORK. After a failed one the whole prompt is prefilled."""
        has_pages = self.cluster.end_fork(seq, succeeded)
        if succeeded:
            seq.cached = seq.shared_tokens
            if seq.n_generated == 0:
                seq.reused = seq.shared_tokens
            self.cluster.totals.prefix_hits += seq.shared_tokens
        self.running.changed = True
        self._came_back(seq, has_pages and seq.placed_on.alive)

    def take_awaiting_kv(self) -> list[Sequence]:
        """Placed sequences whose K and V this S-node does not compute: they are adopted (Sequence.adopts), or a prefill
        S-node computes the prompt. Each is returned once.

        Until the caller calls `kv_came`, the sequence counts as in flight.
        """
        awaiting, self._awaiting_kv = self._awaiting_kv, []
        return awaiting

    def kv_came(self, seq: Sequence, succeeded: bool) -> None:
        """Record the result of an adoption or a remote prefill: with `succeeded`, the R-node has all tokens of `seq`
        but the last. After a failed one, this S-node computes the tokens."""
        seq.adopts = None
        if succeeded:
            seq.cached = seq.shared_tokens = len(seq.tokens) - 1
        self.running.changed = True
        self._came_back(seq, succeeded and seq.placed_on.alive)

    def migrate(self, seq: Sequence, target: RNodeLedger, handle: Handle, pages: PageTable, cached: int) -> None:
        """Let a running sequence that is not in flight continue on `target`, which has its first `cached` tokens. Steps
        may have cached more tokens on the old R-node meanwhile; the sequence's next step computes them again."""
        if seq in self.running.starved:
            self.running.starved.remove(seq)
        seq.cached, seq.frozen = cached, False
        self.cluster.migrate(seq, target, handle, pages)
        self.running.join_next(seq)

    # -- a step ---------------------------------------------------------------------------------------------------

    def schedule(self, slot: int) -> Plan | None:
        """Plan the next step of a mini-batch, or the next step of prompts, for a slot that has no step in flight; None
        if it has nothing to do now."""
        self.pauses.serve_starved()
        chunks: list[PlannedChunk] = []
        n_decoding, together = 0, False
        if slot < len(self.mini_batches):
            self.running.even_out(slot)
            self.pauses.give_way(slot)
            self.pauses.keep_pace(slot)
            batch = list(self.mini_batches[slot])
            if self.way_choice is not None and slot == NEAR:
                together = self.way_choice.plan(batch, self.mini_batches[FAR], self.limits.max_batch_size)
                batch = sorted(self.running, key=BY_RANK) if together else batch
            if self.way_choice is None or slot == NEAR or self.way_choice.far_step:
                chunks, n_decoding = self._chunks.decode(batch)
            if self.way_choice is not None and slot == NEAR and not n_decoding:
                self.running.changed |= self.way_choice.near_idles()
        n_streams = len(chunks)
        chunks += self._prompt_chunks(slot, self._budget(slot, n_decoding))
        if not chunks:
            return None
        prompts = NO_PROMPTS
        for chunk in chunks[n_streams:]:
            prompts += PromptWork(chunk.n_tokens, pairs(chunk.seq.cached, chunk.n_tokens))
        self.step_times.begin(slot, prompts, n_decoding > 0)
        if slot < len(self.mini_batches):
            self.running.begin(slot)
            self.pace.begin(slot, n_decoding)
            if self.way_choice is not None and n_decoding:
                self.way_choice.begin(slot, together)
            self.admission.tick(1 / len(self.mini_batches))
        if len(chunks) > n_streams or len(self.cluster.nodes) > 1:
            chunks.sort(key=step_order)
        return Plan(slot, chunks, prompts)

    def _budget(self, slot: int, n_decoding: int) -> StepBudget:
        """The budget of the prompts of a slot's next step beside `n_decoding` decoding rows."""
        others = [batch for i, batch in enumerate(self.mini_batches) if i != slot]
        apart = self.limits.prompts_apart
        return self.step_times.budget(
            slot,
            self.limits.max_batch_tokens - n_decoding,
            sharers=1 if apart else 1 + sum(any(seq.prefilling for seq in batch) for batch in others),
            streams=n_decoding > 0 or any(not (seq.prefilling or seq.frozen) for batch in others for seq in batch),
        )

    def complete(
        self,
        plan: Plan,
        sampled: Iterable[Sampled | None],
        seconds: float | None = None,
        s_seconds: float | None = None,
    ) -> list[Outcome]:
        """Record a step that ran. Returns the new tokens in the chunks' order.

        `sampled` has one entry for each chunk; None: the chunk drew no token. The step took `seconds`, and its S-Part
        computed for `s_seconds`; None: not known.
        """
        self._end_step(plan, seconds, s_seconds)
        if self.speculation is not None and seconds is not None and plan.prompts is NO_PROMPTS:
            self.speculation.took(plan.n_tokens, seconds)
        outcomes: list[Outcome] = []
        clients: list[str] = []  # one entry for each token of `decodes_on`
        plain = self.speculation is None
        for chunk, token in zip(plan.chunks, sampled, strict=True):
            seq = chunk.seq
            seq.in_flight = False
            if plain and chunk is seq.decoding and token is not None and seq.decodes_on(token):
                clients.append(seq.params.client)
                outcomes.append(Outcome(seq, token, None))
            else:
                self._complete_chunk(chunk, token, outcomes)
        for client, n in Counter(clients).items():
            self.waiting.shares.charge(client, n * OUTPUT_WEIGHT)
        return outcomes

    def _complete_chunk(self, chunk: PlannedChunk, token: Sampled | None, outcomes: list[Outcome]) -> None:
        """Record a chunk that a step has computed, and add the tokens drawn after it to `outcomes`."""
        seq = chunk.seq
        self.cluster.end_slide(seq)
        prefilled = seq.prefilling
        if seq.state is not None:
            seq.state.end_step()
        seq.cached += chunk.n_tokens - len(chunk.guesses)
        error = token.error if token is not None else None
        if seq.cancelled:
            self.running.remove(seq, sound=error is None)
            return
        if error is not None:
            self.running.remove(seq)
            self.running.fail(seq, error)
            return
        if prefilled and not seq.prefilling:
            self._staging.drop(seq)
            self.cluster.mark_prefilled(seq)
        if seq.key_due and not seq.prefilling:
            seq.placed_on.give_key(seq.handle, seq.key)
            seq.key_due = False
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
            if seq.key is not None:
                seq.placed_on.give_key(seq.handle, None)
            self.running.remove(seq, sound=True)
        elif seq.lost:
            self.running.requeue(seq)

    def _end_step(self, plan: Plan, seconds: float | None = None, s_seconds: float | None = None) -> None:
        """Learn from the times of a step; it has failed if `seconds` is None."""
        undisturbed = self.step_times.end(plan.slot, seconds, s_seconds)
        self.pace.end(plan.slot, undisturbed, s_seconds if plan.prompts is NO_PROMPTS else None)
        if self.way_choice is not None and plan.slot < len(self.mini_batches):
            self.way_choice.end(plan.slot, undisturbed)

    def _drawn(self, chunk: PlannedChunk, first: Sampled | None) -> list[Sampled]:
        """The tokens that a step has drawn after a chunk: one token, and one more for each right guess."""
        if first is None or self.speculation is None:
            return [] if first is None else [first]
        drawn = self.speculation.judge(chunk.seq, chunk.guesses, first)
        if chunk.seq.state is not None:
            chunk.seq.state.end_guesses(len(drawn) - 1)
        chunk.seq.cached += len(drawn) - 1
        chunk.seq.overrun = len(drawn) <= len(chunk.guesses)
        return drawn

    def drafts(self, plan: Plan) -> int:
        """The tokens that the model's MTP head shall draft at the end of a step; see Speculation.drafts."""
        if self.speculation is None:
            return 0
        return self.speculation.drafts([chunk.seq for chunk in plan.chunks if chunk.sample])

    def recompute(self, plan: Plan) -> None:
        """Requeue the sequences of a step whose R-node was lost."""
        self._end_step(plan)
        for chunk in plan.chunks:
            self._came_back(chunk.seq, sound=False)

    def fail(self, plan: Plan, link: DataPath | None = None) -> list[Sequence]:
        """Remove the sequences of a step on the R-node behind `link`, because the step cannot be repeated, and
        recompute the others. `link` None: remove all. Returns the removed sequences that were not cancelled."""
        self._end_step(plan)
        failed = []
        for seq in (chunk.seq for chunk in plan.chunks):
            if link is not None and all(node.link is not link for node in seq.places):
                self._came_back(seq, sound=False)
                continue
            seq.in_flight = False
            self.running.remove(seq)
            if not seq.cancelled:
                failed.append(seq)
        return failed

    def _came_back(self, seq: Sequence, sound: bool) -> None:
        """Take back a sequence that was in flight, and requeue it unless its R-node has done what it was asked for
        (`sound`). A cancelled sequence ends."""
        seq.in_flight = False
        if seq.cancelled:
            self.running.remove(seq)
        elif not sound:
            self.running.requeue(seq)

    # -- prompts and newcomers ------------------------------------------------------------------------------------

    def _prompt_chunks(self, slot: int, budget: StepBudget) -> list[PlannedChunk]:
        """Chunks of prompts within the budget: the slot's unfinished prompts first, then newly admitted ones."""
        chunks: list[PlannedChunk] = []
        unfinished = self.mini_batches[slot] if slot < len(self.mini_batches) else self.running
        for seq in [seq for seq in unfinished if seq.cached < seq.prefill_end]:
            if self._chunks.belongs(seq, slot):
                self._chunks.append_prompt(chunks, seq, budget)  # at most one of them is prefilled on the S-node
        if self.limits.prompts_apart and slot < len(self.mini_batches):
            return chunks
        n_forks = len(self._forks)
        while budget.rows > 0 and len(self._forks) - n_forks < _MOST_FORKS:
            admitted = self._admit(slot, budget)
            if admitted is None:
                break
            if self._chunks.belongs(admitted, slot):
                self._chunks.append_prompt(chunks, admitted, budget)
            else:
                self.running.changed = True
        return chunks

    def _admit(self, slot: int, budget: StepBudget) -> Sequence | None:
        """Move the first waiting sequence that can start into the slot's mini-batch, if that has less than its share.
        The slot of prompts moves it into the mini-batch that has fewest sequences."""
        mini_batch = slot
        if slot == len(self.mini_batches):
            mini_batch = min(range(slot), key=lambda i: len(self.mini_batches[i]))
            for i in range(slot) if self.way_choice is not None else [mini_batch]:
                self.pace.plan(i, self.mini_batches[i])
        running = self.mini_batches[mini_batch]
        share = -(-(len(self.running) + len(self.waiting)) // len(self.mini_batches))
        if self.way_choice is not None:
            share = self.limits.max_batch_size
        if not self.waiting or not self.cluster.alive or len(running) >= min(share, self.limits.max_batch_size):
            return None
        everywhere = list(self.running)
        room = self._room(everywhere)
        for seq in self.waiting.candidates():
            if not self.admission.may_start(seq, everywhere, self.waiting, room):
                return None
            self._bar(seq)
            if not self.pace.allows(seq):
                self.pauses.wanted(seq)
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
            whole = seq.adopts is not None or budget.chunk(0, n_tokens) >= n_tokens
            if not (whole or self._staging.has_room(n_tokens)):
                continue
            placement = self.cluster.placer.place(seq, self.waiting)
            if placement is Wait.FREE:
                return None  # a sequence behind it would take the pages that are being freed for it
            if not isinstance(placement, Wait):
                self.waiting.start(seq)
                self._start(seq, placement, mini_batch)
                return seq
            if placement is Wait.ROOM:
                self.pauses.wanted(seq)
        return None

    def _bar(self, seq: Sequence) -> None:
        """Say which places take no newcomers, before `seq` is placed: those whose batch is full, and R-nodes as long as
        their rows would not pay. A sequence that the GPU could not hold may go to R-nodes nevertheless."""
        if self.way_choice is None:
            return
        near, far = map(self.running.full, (NEAR, FAR))
        gpu, *r_nodes = self.cluster.nodes
        gpu.barred = near
        fits = len(seq.tokens) < gpu.groups.capacity(gpu.max_pages)
        barred = far or (fits and not self.far_pays(joining=1))
        for node in r_nodes:
            node.barred = barred

    def far_pays(self, joining: int = 0) -> bool:
        """True if sequences on R-nodes bring more than they cost, together with as many of the waiting sequences as
        are best. `joining` of these go there for certain."""
        if self.way_choice is None:
            return True
        near, far = self.mini_batches
        # Half of them: for the others there may be room on the GPU before they are placed.
        most = min(max(joining, len(self.waiting) // 2), self.limits.max_batch_size - len(far))
        numbers = {joining, most, *(1 << i for i in range(most.bit_length()))}
        return self.way_choice.pays(near, far, sorted(n for n in numbers if joining <= n <= most))

    def _room(self, running: list[Sequence]) -> Room:
        """The room for newcomers beside the `running` sequences."""
        times, n_batches, shared, covered = self.step_times, len(self.mini_batches), 0.0, 0.0
        r_part = self.cluster.r_part(running) if running and times.s_part else None
        if times.s_part and r_part:
            covered = n_batches * times.s_part / r_part * sum(seq.cached for seq in running)
            # With a target no stream is paused, because a pause is a long time between two tokens.
            if times.target is None and r_part <= _R_BOUND * (times.base or 0.0):
                shared = max(0.0, n_batches * times.s_part - times.prompt_seconds(len(running))) / len(running)
        return Room(
            self._most_sequences, self.cluster.tokens, self.cluster.page_groups, shared, times.prompt_seconds, covered
        )

    def _start(self, seq: Sequence, placement: Placement, mini_batch: int) -> None:
        awaits_kv = placement.adopts or (
            self.wants_remote_prefill is not None and self.wants_remote_prefill(seq, placement)
        )
        self.cluster.admit(seq, placement)
        self.admission.started(seq)
        if not seq.n_generated:
            self.waiting.shares.charge(seq.client, len(seq.tokens) - seq.shared_tokens)
        elif not placement.adopts:
            self.recomputed_tokens += len(seq.tokens) - seq.shared_tokens
        seq.prefill_end = len(seq.tokens)
        if self.cluster.prefix_cache:
            self.cluster.totals.prefix_queries += len(seq.tokens)
        if seq.source is not None:
            seq.in_flight = True
            self._forks.append(seq)
        if awaits_kv:
            seq.in_flight = True
            self._awaiting_kv.append(seq)
        self._join(seq, mini_batch)

    def _join(self, seq: Sequence, mini_batch: int) -> None:
        self.running.join(seq, mini_batch if self.way_choice is None else self.running.home(seq))
        self.pace.joined(seq)
