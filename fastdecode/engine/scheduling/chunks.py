"""ChunkPlanner: the tokens of each sequence in a step. It counts their pages, guesses and staged rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdecode.engine.state.sequence import PlannedChunk

if TYPE_CHECKING:
    from fastdecode.engine.scheduling.budgets import StagingBudget, StepBudget
    from fastdecode.engine.scheduling.pauses import Pauses
    from fastdecode.engine.scheduling.plan import SchedulerLimits
    from fastdecode.engine.scheduling.speculation import Speculation
    from fastdecode.engine.state.sequence import Sequence
    from fastdecode.engine.state.states import StateSlots


class ChunkPlanner:
    """Makes the chunks of a step that is being planned, and marks their sequences as in flight."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pauses: Pauses,
        staging: StagingBudget,
        states: StateSlots,
        speculation: Speculation | None,
    ):
        self._limits, self._pauses, self._staging = limits, pauses, staging
        self._states, self._speculation = states, speculation

    def decode(self, batch: list[Sequence]) -> tuple[list[PlannedChunk], int]:
        """The chunks of the sequences that decode, and the number of their rows."""
        # Every token passes here, so pages are counted only where they may be lacking, and one chunk serves all steps.
        chunks = []
        n, pauses = len(batch), self._pauses
        spare = all_spare = self._limits.max_batch_tokens - n  # rows besides one row for each sequence
        guessing = spare // 2  # rows for guesses; the others are left for prompts
        scarce = pauses.scarce
        for seq in batch:  # oldest first, so a victim of preemption has no chunk yet
            cached = seq.cached
            if seq.mini_batch is None or cached < seq.prefill_end or seq.frozen:
                continue
            chunk, n_tokens = seq.decoding, 1
            if chunk is None and len(seq.tokens) - cached > 1:  # it has migrated
                n_tokens = min(len(seq.tokens) - cached, 1 + spare)
            if scarce or cached + n_tokens > seq.pages.covered:
                covered = pauses.cover(seq, cached + n_tokens)
                scarce = pauses.scarce
                if not covered:
                    continue
            seq.in_flight = True
            if chunk is None:
                chunk = PlannedChunk(seq, n_tokens, False, cached + n_tokens == len(seq.tokens))
                if chunk.sample and n_tokens == 1 and not seq.key_due:
                    seq.decoding = chunk
                spare -= n_tokens - 1
            if self._speculation is not None and chunk is seq.decoding and seq.prefix is None:
                on_page = seq.pages.covered - cached - 1  # a guess is not worth a page
                most = min(spare, guessing, on_page, self._states.unused)
                guesses = self._speculation.guesses(seq, most, n)
                if guesses:
                    if seq.state is not None:
                        seq.state.begin_guesses(len(guesses))
                    spare -= len(guesses)
                    guessing -= len(guesses)
                    chunk = PlannedChunk(seq, 1 + len(guesses), False, True, tuple(guesses))
            chunks.append(chunk)
        return chunks, len(chunks) + all_spare - spare

    def belongs(self, seq: Sequence, slot: int) -> bool:
        """True if the steps of `slot` compute a prompt: the S-node attends to prompts of the last slot, if prompts are
        apart, and R-nodes attend to those of mini-batches."""
        if not self._limits.prompts_apart:
            return True
        return (slot == self._limits.mini_batches) == (seq.prefilling and self._attends_here(seq))

    def _attends_here(self, seq: Sequence) -> bool:
        """True if the S-node attends to a prompt even if that takes several steps."""
        return not seq.shared_tokens and self._staging.may_stage(seq.prefill_end)

    def append_prompt(self, chunks: list[PlannedChunk], seq: Sequence, budget: StepBudget) -> None:
        """Append the next chunk of a prompt, as long as the budget allows. A sequence that waits for a FORK, or that
        was preempted for an older sequence of this step, gets none."""
        if seq.in_flight or seq.mini_batch is None:
            return
        if not seq.prefilling:  # it was paused
            n_tokens = min(len(seq.tokens) - seq.cached, budget.rows)  # more than one after a migration
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
            in_one = last and not seq.cached and not self._limits.prompts_apart
            prefill = (in_one and not seq.shared_tokens) or self._attends_here(seq)
            if prefill and not last:
                self._staging.stage(seq, seq.prefill_end)
            if seq.state is not None:
                seq.state.begin_prompt(seq.cached, n_tokens)
            chunks.append(PlannedChunk(seq, n_tokens, prefill=prefill, sample=last))
