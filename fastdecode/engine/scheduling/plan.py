"""A step as the scheduler plans it, the outcome of the step, and the bounds on every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fastdecode.engine.scheduling.step_time import NO_PROMPTS, PromptWork

if TYPE_CHECKING:
    from fastdecode.engine.state.sequence import PlannedChunk, Sequence
    from fastdecode.spart.step.batch import Sampled


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on a step. All counts are of one mini-batch, except `max_staged_tokens` (see budgets.StagingBudget).

    `prompts_apart`: prompts that the S-node attends to have steps of their own, beside those of the mini-batches.

    Raises ValueError for bounds that no step can keep.
    """

    mini_batches: int = 2
    max_batch_tokens: int = 512  # rows of a step; at most `max_rows` of every link's slots
    max_batch_size: int = 256  # sequences; at most max_batch_tokens, so that all of them can decode in every step
    max_staged_tokens: int | None = None  # None: no bound
    strict_staging: bool = False  # no prompt may exceed max_staged_tokens
    prompts_apart: bool = False

    def __post_init__(self) -> None:
        if self.mini_batches < 1:
            raise ValueError(f"mini_batches must be at least 1, not {self.mini_batches}")
        if not 1 <= self.max_batch_size <= self.max_batch_tokens:
            raise ValueError(f"max_batch_size must be within 1..max_batch_tokens, not {self.max_batch_size}")
        if self.max_staged_tokens is not None and self.max_staged_tokens < 0:
            raise ValueError(f"max_staged_tokens must not be negative, as {self.max_staged_tokens} is")

    @property
    def slots(self) -> int:
        """Steps that may be in flight at once. With `prompts_apart` the last slot has the steps of prompts."""
        return self.mini_batches + self.prompts_apart


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Chunks that attend on R-nodes come first; each kind is in order of link (see spart/step/batch.py)."""

    slot: int  # the mini-batch, or the slot of the steps of prompts
    chunks: list[PlannedChunk]
    prompts: PromptWork = NO_PROMPTS  # the work of its chunks of prompts

    @property
    def n_tokens(self) -> int:
        return sum(chunk.n_tokens for chunk in self.chunks)


class Outcome(NamedTuple):
    """One token that a completed step generated."""

    seq: Sequence
    sampled: Sampled
    finish_reason: str | None


def step_order(chunk: PlannedChunk) -> tuple[bool, int]:
    """Sort key of a step's chunks: chunks that attend on R-nodes first, then by link."""
    return chunk.prefill, chunk.seq.placed_on.position
