"""The queue of sequences that wait to run.

A sequence that cannot start now is passed over, so that it does not delay the sequences behind it. The number of
sequences that may start before it is bounded: after that, the sequences behind it wait until it has started.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.fairness import FairShares

if TYPE_CHECKING:
    from fastdecode.engine.state.sequence import Sequence

#: Waiting sequences that one search for the next sequence to start looks at.
LOOK_AHEAD = 32
_LOOK_AHEAD_CHOICES = 512  # further choices of a request included

#: How often a sequence that has not run yet may be passed over.
MAX_PASSED = 64

#: Starts from which the rate of the queue is measured, and bounds on the seconds that a refused client is told to wait.
_RATE_STARTS = 64
_RETRY_AFTER = (1, 300)

#: Sort key of sequences: a lower priority number goes first, then an earlier arrival.
BY_RANK = attrgetter("priority", "order")


class WaitingQueue:
    """The waiting sequences in order of priority, then of arrival."""

    def __init__(self) -> None:
        self.shares = FairShares()
        self._waiting: list[Sequence] = []
        self._offered: list[Sequence] = []  # the sequences of the last iteration of `candidates`

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def __contains__(self, seq: object) -> bool:
        return seq in self._waiting

    def add(self, seq: Sequence) -> None:
        """Put `seq` in at its position by priority and arrival."""
        insort(self._waiting, seq, key=BY_RANK)
        self.shares.join(seq.client)

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out without having started it. Raises ValueError if it does not wait."""
        self._waiting.remove(seq)
        self.shares.leave(seq.client)

    def candidates(self) -> Iterator[Sequence]:
        """The sequences that may start next, best first: by priority, then by the tokens that their clients were
        served, then by arrival. The queue must not change during the iteration.

        A request offers only the first of its waiting choices: the reason that keeps it from starting keeps the others
        too, and they must not hide the requests behind them. The iteration ends after LOOK_AHEAD sequences, and after a
        sequence that may not be passed over again: it was passed over MAX_PASSED times, or it must be recomputed and a
        newer sequence would take its pages.
        """
        order = self._waiting
        if self.shares.contended:
            order = sorted(order, key=lambda seq: (seq.priority, self.shares.served(seq.client), seq.order))
        self._offered, requests = [], set()
        for seq in order[:_LOOK_AHEAD_CHOICES]:
            if seq.request is not None:
                if seq.request in requests:
                    continue
                requests.add(seq.request)
            self._offered.append(seq)
            yield seq
            if seq.passed_over >= MAX_PASSED or (seq.n_generated and not seq.paused):
                return
            if len(self._offered) == LOOK_AHEAD:
                return

    def start(self, seq: Sequence) -> None:
        """Take out the candidate that was offered last, which starts now. Earlier candidates are passed over."""
        self.remove(seq)
        for other in self._offered[:-1]:
            other.passed_over += 1


class StartRate:
    """The rate at which the queue empties, measured over its last starts. Times are in seconds, of any clock."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=_RATE_STARTS)

    def started(self, now: float) -> None:
        """Record that a sequence has started."""
        self._starts.append(now)

    def seconds_for(self, n: int, now: float) -> int:
        """Seconds in which `n` sequences will have started at the present rate, at least 1 and at most 300.

        The rate is that of the last starts up to `now`, so it falls while nothing starts.
        """
        least, most = _RETRY_AFTER
        if len(self._starts) < 2:
            return least
        return min(max(least, ceil(n * (now - self._starts[0]) / len(self._starts))), most)
