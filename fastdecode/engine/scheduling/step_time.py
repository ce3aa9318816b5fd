"""How long steps take, learned from the steps that ran, and the chunks of prompts that keep a target time.

A step that decodes takes a base time, and its prompts add to it. Real steps spread around the predicted time; chunks
are chosen so that slow steps keep the target too. The cost of a prompt's chunk is fitted to two measures of the chunk:
its rows (projections, MLP) and its pairs of a row and a key that the row attends to (attention).
The steps of several mini-batches share the S-node, so the chunks of a step that is in flight slow down those beside it.

Where prompts have steps of their own (SchedulerLimits.prompts_apart), streams do not wait for these steps, but their
own steps take longer beside them: the cost of a chunk is what it adds to one step that decodes beside it.

Pure arithmetic: the caller measures the seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from fastdecode.engine.scheduling.budgets import StepBudget, pairs
from fastdecode.engine.scheduling.spread import Spread

#: Weight of the older observations after each new one.
_COST_MEMORY = 0.9
_BASE_MEMORY = 0.8
_BASE_MEMORY_BESIDE_PROMPTS = 0.95

#: The base time follows the median of this many steps, because other work on the machine delays two or three steps at a
#: time.
_MEDIAN_OF = 5

#: A step takes _LEAST_ROWS of a prompt however slow it is, so that every prompt advances; and _SMALL_ROWS if their work
#: is within that allowed for the prompts of all mini-batches together, because smaller chunks waste time.
_LEAST_ROWS = 4
_SMALL_ROWS = 16

#: Prompts may lengthen a step by this share of its base time even if the base time alone exceeds the target.
_STRETCH = 0.3


class PromptWork(NamedTuple):
    """The work of the prompts of a step."""

    rows: int
    pairs: float  # keys that the rows attend to, summed over the rows

    def __add__(self, other: object) -> PromptWork:
        if not isinstance(other, PromptWork):
            return NotImplemented
        return PromptWork(self.rows + other.rows, self.pairs + other.pairs)


NO_PROMPTS = PromptWork(0, 0.0)


def _decayed(mean: float | None, seconds: float, memory: float) -> float:
    return seconds if mean is None else memory * mean + (1 - memory) * seconds


@dataclass(slots=True)
class _StepInFlight:
    decodes: bool
    neighbours_decode: bool  # a step that began while this step ran, or ran when it began, decodes
    work: PromptWork  # of this step
    neighbours_work: PromptWork  # of the steps that began while this step ran, or ran when it began


class StepTimes:
    """The time of steps as a function of their work. Times are in seconds."""

    def __init__(self, target: float | None, prompts_apart: bool = False):
        """`target` is the time between two tokens of a stream that prompts should not exceed; None: they may take all
        rows of a step."""
        self.target = target
        self._apart = prompts_apart
        self.base: float | None = None  # of a step that only decodes
        self._bases: deque[float] = deque(maxlen=_MEDIAN_OF)
        self.s_part: float | None = None  # of a step that only decodes: the S-Part alone
        self._in_flight: dict[int, _StepInFlight] = {}  # by mini-batch
        self._rr = self._rp = self._pp = self._ry = self._py = 0.0  # decayed sums of products; y: seconds
        self._costs = (0.0, 0.0)  # seconds a row, seconds a pair
        self._spread = Spread()
        self._next: int | None = None  # the mini-batch whose prompts have waited for the prompts of another one

    def begin(self, mini_batch: int, work: PromptWork, decodes: bool) -> None:
        """Record that a step begins. `decodes`: it has rows of decoding sequences."""
        step = _StepInFlight(decodes, False, work, NO_PROMPTS)
        for other in self._in_flight.values():
            other.neighbours_work = self._together(other.neighbours_work, work)
            other.neighbours_decode |= decodes
            step.neighbours_work = self._together(step.neighbours_work, other.work)
            step.neighbours_decode |= other.decodes
        self._in_flight[mini_batch] = step

    def end(self, mini_batch: int, seconds: float | None, s_seconds: float | None = None) -> float | None:
        """Record that a step took `seconds`, `s_seconds` of them for the S-Part, or (`seconds` None) that it failed.
        Returns the seconds of a step that decoded with no prompt in it or beside it, None for any other."""
        step = self._in_flight.pop(mini_batch, None)
        if step is None or seconds is None or (self._apart and not step.decodes):
            return None
        # A step overlaps with about half of its two neighbours in each other mini-batch. Steps of prompts apart are
        # longer than the decoding steps beside them.
        share = 1.0 if self._apart else 0.5
        rows = step.work.rows + share * step.neighbours_work.rows
        n_pairs = step.work.pairs + share * step.neighbours_work.pairs
        if s_seconds is not None and not step.work.rows:
            self.s_part = _decayed(self.s_part, s_seconds, _BASE_MEMORY_BESIDE_PROMPTS)
        if step.decodes and self.base:
            self._spread.observe(seconds / (self.base + self._cost(rows, n_pairs)))
        if step.decodes and not (self._apart and rows and self.base is None):
            self._observe_base(seconds - self._cost(rows, n_pairs), rows > 0)
        if rows > 0:
            # A step of prompts alone that runs beside a decoding one reads the weights too, and waits its turn.
            base = (self.base or 0.0) if step.decodes or step.neighbours_decode else 0.0
            self._observe_costs(rows, n_pairs, max(0.0, seconds - base))
        return seconds if step.decodes and not rows else None

    def budget(self, mini_batch: int, rows: int, *, sharers: int, streams: bool) -> StepBudget:
        """The budget of the prompts of a mini-batch's next step, at most `rows` rows.

        `sharers` counts the mini-batches that have unfinished prompts, this one included. `streams`: a sequence decodes
        somewhere; if none does, the time of the step has no bound.
        """
        row_cost, pair_cost = self._costs
        if self._apart and self.target is not None and streams and self.base is None:
            return StepBudget(0)  # until a step has decoded with no prompts beside it
        if self.target is None or not streams or self.base is None or not (row_cost or pair_cost):
            return StepBudget(rows)
        allowed = max(self.target / self._spread.value - self.base, _STRETCH * self.base)
        others = [step for other, step in self._in_flight.items() if other != mini_batch]
        left = allowed - sum(self._cost(step.work.rows, step.work.pairs) for step in others)
        if others and (left <= 0 or self._next not in (None, mini_batch)):
            # The least chunks of two mini-batches may be too much for one step: then they take turns.
            self._next = mini_batch if left <= 0 else None
            return StepBudget(0)
        self._next = None
        return StepBudget(
            rows,
            min(left, allowed / sharers),
            row_cost=row_cost,
            pair_cost=pair_cost,
            least=_LEAST_ROWS,
            small=_SMALL_ROWS,
            most_work=allowed,
        )

    def _together(self, a: PromptWork, b: PromptWork) -> PromptWork:
        """The work beside a step of two steps that have run beside it."""
        return max(a, b) if self._apart else a + b

    def prompt_seconds(self, n_tokens: float) -> float:
        """How much a prompt of `n_tokens` tokens adds to the steps that it is in; 0 before the first one."""
        return self._cost(n_tokens, pairs(0, n_tokens))

    def _cost(self, rows: float, n_pairs: float) -> float:
        return self._costs[0] * rows + self._costs[1] * n_pairs

    def _observe_base(self, seconds: float, beside_prompts: bool) -> None:
        memory = _BASE_MEMORY_BESIDE_PROMPTS if beside_prompts else _BASE_MEMORY
        self._bases.append(max(0.0, seconds))
        self.base = _decayed(self.base, median(self._bases), memory)

    def _observe_costs(self, rows: float, n_pairs: float, seconds: float) -> None:
        """Fit the two costs to the steps with prompts by least squares; neither may be negative."""
        self._rr = _COST_MEMORY * self._rr + rows * rows
        self._rp = _COST_MEMORY * self._rp + rows * n_pairs
        self._pp = _COST_MEMORY * self._pp + n_pairs * n_pairs
        self._ry = _COST_MEMORY * self._ry + rows * seconds
        self._py = _COST_MEMORY * self._py + n_pairs * seconds
        determinant = self._rr * self._pp - self._rp * self._rp
        if determinant > 1e-6 * self._rr * self._pp:
            row = (self._ry * self._pp - self._py * self._rp) / determinant
            pair = (self._py * self._rr - self._ry * self._rp) / determinant
            if row >= 0 and pair >= 0:
                self._costs = row, pair
                return
            if row < 0:
                self._costs = 0.0, self._py / self._pp
                return
        self._costs = self._ry / self._rr, 0.0
