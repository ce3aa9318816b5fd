"""The timeline of the S-Part: each step's intervals of computing and of waiting for R-nodes.

A step of a model with n layers has n + 1 intervals. Interval 0 ends when the first layer's rows are posted and the
prompts' attention is computed; each later interval begins with the wait for the R-nodes' reply. From the end of one
interval to the reply at the beginning of the next one, the R-nodes have the rows: that is the R-Part of the step.
Captured steps (exchange/bypass.py) are not in the timeline.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: Intervals that a timeline keeps: at 32 layers, those of the last 120 steps.
_KEPT = 4096


class Interval(NamedTuple):
    """From one wait of a step to the next. Times are those of time.perf_counter, in seconds."""

    slot: int  # of the step's mini-batch
    number: int  # of the interval within the step, from 0
    asked: float  # the S-Part began to wait for the reply; in interval 0 the S-Part began to compute
    replied: float  # the S-Part began to compute; in interval 0 the same as `asked`
    ended: float  # the S-Part had no more to do before the reply, or the step's tokens were drawn


class Timeline:
    """The last intervals of all steps. Intervals are added in the S-Part's thread, and read in any other."""

    def __init__(self) -> None:
        self._intervals: deque[Interval] = deque(maxlen=_KEPT)

    def add(self, interval: Interval) -> None:
        self._intervals.append(interval)

    def last(self, n: int) -> list[Interval]:
        """The last `n` intervals, in the order in which they ended."""
        return list(self._intervals)[-n:]  # copying a deque is one operation under the GIL


class StepClock:
    """Measures one step: the sums that StepOutput reports, and its intervals for the timeline."""

    def __init__(self, timeline: Timeline, slot: int, started: float):
        """`started` is the time at which the step began."""
        self.s_seconds = self.r_wait_seconds = 0.0
        self._timeline, self._slot = timeline, slot
        self._number = 0
        self._asked = self._replied = started

    def interval_ended(self, at: float | None = None) -> None:
        """Note that the S-Part has no more to do before the reply, or that the step has ended; `at` None: now."""
        ended = time.perf_counter() if at is None else at
        self.s_seconds += ended - self._replied
        self._timeline.add(Interval(self._slot, self._number, self._asked, self._replied, ended))
        self._number += 1

    def waits(self, since: float | None) -> None:
        """Note that the S-Part has waited for the reply since this time (time.perf_counter); None: since now."""
        self._asked = time.perf_counter() if since is None else since

    def exchanged(self, times: npt.NDArray[np.float64]) -> None:
        """Note layers that ran one after another: when the wait for each began, and when its reply had come. float64
        [layers, 2]."""
        for asked, replied in times.tolist():
            self.interval_ended(asked)
            self.waits(asked)
            self.replied(replied)

    def replied(self, at: float | None = None) -> None:
        """Note that the reply has come, so the S-Part computes from this time on; `at` None: from now on."""
        self._replied = time.perf_counter() if at is None else at
        self.r_wait_seconds += self._replied - self._asked
