"""Spread: how much longer slow steps take than predicted."""

from __future__ import annotations

#: The share of the steps that exceed the spread. The spread rises with each such step and falls with all others; it
#: settles where both changes cancel out.
_EXCEEDING = 0.01
_CHANGE = 0.05
_MOST = 2.0

#: The first observations do not count, because predictions are still learned.
_WARM_UP = 20


class Spread:
    """The quantile of real to predicted time that one step in a hundred exceeds, within 1 and 2.

    A target that is divided by it holds for slow steps too.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._observations = 0

    def observe(self, ratio: float) -> None:
        """Record the real time of a step, as a multiple of the predicted time."""
        self._observations += 1
        if self._observations <= _WARM_UP:
            return
        change = _CHANGE * (1 - _EXCEEDING if ratio > self.value else -_EXCEEDING)
        self.value = min(max(1.0, self.value + change), _MOST)
