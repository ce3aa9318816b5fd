"""Decides which waiting sequences that have room may start: greedy, or the load-stabilising schedule.

FastDecode (arXiv 2403.11421, section 5.2) starts groups of sequences at intervals, so that short and long ones run
together and the R-Part of every step is about as long. Its Algorithm 1 needs all outputs to have one known length, and
from a cold start it settles at half the batch. `Stable` forecasts the load sequence by sequence instead, from the
distribution of output lengths (as Past-Future does, arXiv 2507.10150), and spaces starts while the batch fills.
Pure arithmetic: time is counted in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from fastdecode.engine.scheduling.lengths import Floats, OutputLengths
from fastdecode.engine.state.pages import PageGroup, PageGroups
from fastdecode.region.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from fastdecode.engine.state.sequence import Sequence

#: Points of the forecast, besides the ends of sequences that are known.
_POINTS = 64

#: Steps for which a forecast holds if no sequence starts or leaves.
_FORECAST_STEPS = 4.0

#: The mean load may exceed the load of a full batch of mixed ages by this share before newcomers wait.
_SLACK = 0.1

#: A sequence too long for the target starts nevertheless when the load without it is below this share of the target.
_LOW = 0.75

#: The share of the pages that the forecast load and this many of its standard deviations may take.
_FULL, _DEVIATIONS = 0.97, 1.0

#: Starts are spaced if the batch is less than half full and at least this many batches wait, because filling a batch
#: slowly costs time.
_LEAST_BACKLOG = 4

#: The number of waiting sequences whose lengths stand for all.
_SAMPLE = 32


@dataclass(frozen=True, slots=True)
class Room:
    """The room that all sequences share."""

    slots: int  # sequences that may run at the same time
    tokens: int  # tokens that the R-nodes can cache if no page is given back
    groups: tuple[PageGroup, ...] = PageGroups().groups  # of the pages of a block
    #: The fixed cost of the S-Parts of all mini-batches, divided by the number of running sequences, in seconds; 0 if
    #: the R-Part takes as long, or if streams should not be paused.
    shared_seconds: float = 0.0
    recompute_seconds: Callable[[float], float] = float  # seconds to recompute a number of tokens
    covered_tokens: float = 0.0  # tokens whose R-Part takes no longer than the S-Part; 0: not known

    def footprint(self, tokens: Floats) -> Floats:
        """The room that sequences of `tokens` tokens (any shape) hold at least: a page beyond all windows of its layers
        is given back when pages are short. The half page that windows begin within on average counts, the half page
        that the last token is in does not."""
        pages = np.zeros_like(tokens)
        for group in self.groups:
            pages += group.size * (np.minimum(tokens, group.reach + PAGE_TOKENS / 2) if group.reach else tokens)
        return pages / sum(group.size for group in self.groups)


class Greedy:
    """Every sequence that has room starts."""

    def __init__(self) -> None:
        self.lengths = OutputLengths()

    def tick(self, steps: float) -> None:
        """Let `steps` steps pass: a step of one of n mini-batches is 1 / n."""

    def may_start(self, seq: Sequence, running: Seq[Sequence], waiting: Collection[Sequence], room: Room) -> bool:
        """True if `seq`, one of the `waiting`, may start beside the `running`."""
        return True

    def started(self, seq: Sequence) -> None:
        """Record that a sequence has started, for the first time or again."""

    def left(self, seq: Sequence, *, ended: bool) -> None:
        """Record that a sequence will generate no more; `ended`: because of an end token."""
        self.lengths.observe(seq.client, seq.n_generated, ended=ended)


class Stable(Greedy):
    """Sequences start so that the forecast load stays under that of a full batch of mixed ages, and under the pages."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0  # steps
        self._filling_until = -inf  # while the batch fills from cold, starts are spaced
        self._next_start = -inf
        self._forecast: tuple[Floats, Floats, Floats] | None = None  # steps ahead, mean load, its variance
        self._forecast_at = -inf
        self._target = 0.0
        self._mean_output = 1.0
        self._slots = 1

    def tick(self, steps: float) -> None:
        self._now += steps

    def may_start(self, seq: Sequence, running: Seq[Sequence], waiting: Collection[Sequence], room: Room) -> bool:
        if self._forecast is None or self._now >= self._forecast_at + _FORECAST_STEPS:
            self._forecast_at = self._now
            self._look_ahead(running, waiting, room)
        cold = 2 * len(running) < room.slots and len(waiting) >= _LEAST_BACKLOG * room.slots
        if cold and self._now >= self._filling_until:
            self._filling_until, self._next_start = self._now + self._mean_output, self._now
        if not running:
            return True
        if self._next_start > self._now and self._now < self._filling_until:
            return False
        assert self._forecast is not None
        ahead, mean, variance = self._forecast
        added, added_variance = self._load([seq], ahead, room)
        if not self._pausing_pays(seq, room):
            # The last page of a sequence is half empty on average.
            pages = PAGE_TOKENS / 2 * (len(running) + 1)
            full = (mean + added + _DEVIATIONS * np.sqrt(variance + added_variance)).max() + pages
            if full > _FULL * room.tokens:
                return False
        # Above the target, the load delays no step as long as the S-Part takes longer than the R-Part.
        most = max((1 + _SLACK) * self._target, room.covered_tokens)
        return bool((mean + added).max() <= most or mean.max() <= _LOW * self._target)

    def _pausing_pays(self, seq: Sequence, room: Room) -> bool:
        """True if steps gain more by one more sequence than it costs to recompute it when it is paused for lack of
        pages after half of its output."""
        half = self._mean_output / 2
        return half * room.shared_seconds > room.recompute_seconds(seq.n_prompt + half)

    def started(self, seq: Sequence) -> None:
        self._forecast = None
        if self._now < self._filling_until:
            self._next_start += self._mean_output / self._slots

    def left(self, seq: Sequence, *, ended: bool) -> None:
        super().left(seq, ended=ended)
        self._forecast = None

    def _look_ahead(self, running: Seq[Sequence], waiting: Collection[Sequence], room: Room) -> None:
        """Forecast the load of the running sequences, and the load that they would have at mixed ages."""
        lengths: dict[Hashable, list[int]] = {}
        for seq in running:
            lengths.setdefault(seq.client, []).append(seq.n_generated)
        self.lengths.set_running(lengths)
        known = [*running, *islice(waiting, _SAMPLE)]
        kinds = _by_kind(known)
        horizon = 0.0
        for (client, bounded, bound), seqs in kinds.items():
            longest = max(seq.n_generated for seq in seqs)
            usual = self.lengths.horizon(client, bounded=bounded)
            horizon = max(horizon, min(bound, max(usual, 2 * longest)))
        ends = {seq.max_new - seq.n_generated - 1 for seq in known}
        exact = [end for end in sorted(ends) if end <= horizon]
        exact = exact[:: len(exact) // _POINTS + 1]
        ahead = np.unique(np.concatenate([np.linspace(0.0, horizon, _POINTS), exact]).round())
        self._forecast = (ahead, *self._load(running, ahead, room))
        # Over its life a sequence is cached for as many steps as it has outputs, with 1, 2, ... of them and its prompt.
        steps = tokens = 0.0
        for (client, bounded, bound), seqs in kinds.items():
            generated, n_steps = self.lengths.spread(client, bound, bounded=bounded)
            prompts = _column(seq.n_prompt for seq in seqs)
            steps += len(seqs) * float(n_steps.sum())
            tokens += float((room.footprint(prompts + generated) * n_steps).sum())
        self._mean_output, self._slots = steps / len(known), room.slots
        self._target = room.slots * tokens / steps

    def _load(self, seqs: Seq[Sequence], ahead: Floats, room: Room) -> tuple[Floats, Floats]:
        """The mean and the variance of the room that `seqs` will hold `ahead` steps from now, in tokens, [steps]."""
        mean, variance = np.zeros(len(ahead)), np.zeros(len(ahead))
        for client, bounded in {_class(seq) for seq in seqs}:
            members = [seq for seq in seqs if _class(seq) == (client, bounded)]
            length = _column(len(seq.tokens) for seq in members)
            generated = _column(seq.n_generated for seq in members)
            bound = _column(seq.max_new for seq in members)
            forecast = generated + ahead
            reached = self.lengths.survival(client, generated, bounded=bounded)
            alive = self.lengths.survival(client, forecast, bounded=bounded) / np.maximum(reached, 1e-9)
            alive = np.where(forecast < bound, np.minimum(alive, 1.0), 0.0)
            tokens = room.footprint(length + ahead)
            mean += (tokens * alive).sum(0)
            variance += (tokens * tokens * alive * (1 - alive)).sum(0)
        return mean, variance


def _column(values: Iterable[int]) -> Floats:
    return np.array(list(values), np.float64)[:, None]


def _class(seq: Sequence) -> tuple[str, bool]:
    """The class that the estimate of a sequence's output depends on, apart from its bound."""
    return seq.client, seq.params.max_tokens is not None


def _by_kind(seqs: Iterable[Sequence]) -> dict[tuple[str, bool, int], list[Sequence]]:
    """Sequences by class and bound."""
    kinds: dict[tuple[str, bool, int], list[Sequence]] = {}
    for seq in seqs:
        kinds.setdefault((*_class(seq), seq.max_new), []).append(seq)
    return kinds


#: The values of --schedule.
SCHEDULES: dict[str, type[Greedy]] = {"greedy": Greedy, "stable": Stable}
