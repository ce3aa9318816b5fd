"""Bounds on the prompts of a step: rows, attention work, and keys and values staged on the S-node."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdecode.engine.state.sequence import Sequence


#: Reading the keys before a chunk takes as long as the attention of this many rows to them, however few rows it has.
_KEY_ROWS = 8


def pairs(start: float, n: float) -> float:
    """The cost of a chunk's attention, in pairs of a row and a key: the keys that each of its `n` rows attends
    to behind `start` tokens, and as many pairs as reading these tokens' keys takes."""
    return (n + _KEY_ROWS) * start + n * (n + 1) / 2


@dataclass(slots=True)
class StepBudget:
    """The budget of a step for chunks of prompts.

    A chunk of n rows behind `start` tokens costs n rows and `row_cost` * n + `pair_cost` * pairs of work, where
    `pairs` counts the keys that its rows attend to. `least` rows are granted whatever the work, so that a prompt always
    advances, and up to `small` rows if their work is within `most_work`, because smaller chunks waste time.
    """

    rows: int
    work: float = inf  # in the unit of the costs
    row_cost: float = 0.0
    pair_cost: float = 0.0
    least: int = 1
    small: int = 1
    most_work: float = 0.0  # the work of all mini-batches together

    def chunk(self, start: int, n_tokens: int) -> int:
        """Rows for a prompt with `start` computed tokens and `n_tokens` tokens to come: 0..n_tokens."""
        n = min(n_tokens, self.rows)
        if n > self.least and self.work < inf:
            small = min(self.small, self._affordable(start, self.most_work))
            n = min(n, max(self.least, small, self._affordable(start, self.work)))
        return n

    def take(self, start: int, n_tokens: int) -> int:
        """Spend the rows that `chunk` grants, and return them. No budget is left after a chunk of fewer rows than
        `n_tokens`."""
        n = self.chunk(start, n_tokens)
        self.work -= self.row_cost * n + self.pair_cost * pairs(start, n)
        self.rows = self.rows - n if n == n_tokens and self.work > 0 else 0
        return n

    def _affordable(self, start: int, work: float) -> int:
        """The largest n whose work is at most `work`."""
        linear, square = self.row_cost + self.pair_cost * (start + 0.5), self.pair_cost / 2
        work -= self.pair_cost * pairs(start, 0)
        if work <= 0 or linear <= 0:
            return 0 if work <= 0 else self.rows
        if square * work < 1e-9 * linear * linear:
            return int(work / linear)
        return int((sqrt(linear * linear + 4 * square * work) - linear) / (2 * square))


@dataclass(slots=True)
class StagingBudget:
    """Bounds the prompt tokens whose keys and values are staged on the S-node.

    Only a prompt that takes several steps is staged. A prompt of more than `max_tokens` tokens is staged alone, or with
    `strict` not at all: then its R-node attends for all of its chunks.
    """

    max_tokens: int | None  # None: no bound
    strict: bool = False
    _staged: dict[Sequence, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts that are staged, counted in full from their first chunk on."""
        return sum(self._staged.values())

    def may_stage(self, n_tokens: int) -> bool:
        """False if a prompt of `n_tokens` tokens that takes several steps must be attended on its R-node."""
        return self.max_tokens is None or not self.strict or n_tokens <= self.max_tokens

    def has_room(self, n_tokens: int) -> bool:
        """True if a prompt of `n_tokens` tokens may start beside the staged prompts."""
        if self.max_tokens is None or not self._staged or not self.may_stage(n_tokens):
            return True
        return self.tokens + n_tokens <= self.max_tokens

    def stage(self, seq: Sequence, n_tokens: int) -> None:
        """Count the prompt of `seq`. Does nothing if it is counted."""
        self._staged.setdefault(seq, n_tokens)

    def drop(self, seq: Sequence) -> None:
        """Count the prompt of `seq` no longer. Does nothing if it is not counted."""
        self._staged.pop(seq, None)
