"""SPartForecast: how long the S-Part of a step takes, by its rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from fastdecode.engine.scheduling.line import Line

#: Weight of the older observations after each new one.
_MEMORY = 0.95


class SPartForecast:
    """A forecast of the S-Part's seconds. Where seconds were measured at start, they are scaled by what steps have
    taken since. Where nothing was measured, the line through the times of steps gives the forecast."""

    def __init__(self, measured: Mapping[int, float] | None = None):
        """`measured`: seconds by rows, before there was work."""
        self._measured = sorted((measured or {}).items())
        self._line = Line()  # without measured times
        # Decayed sums of the observed seconds, and of the measured ones beside them.
        self._taken = self._predicted = 0.0

    @property
    def known(self) -> bool:
        """True if times can be predicted."""
        return bool(self._measured) or self._line.n > 0

    def observe(self, rows: int, seconds: float) -> None:
        """Add the seconds of a step's S-Part."""
        if self._measured:
            self._taken = _MEMORY * self._taken + seconds
            self._predicted = _MEMORY * self._predicted + self._at_start(rows)
        else:
            self._line.observe(rows, seconds)

    def forget(self) -> None:
        """Forget the observations."""
        self._line, self._taken, self._predicted = Line(), 0.0, 0.0

    def seconds(self, rows: int) -> float:
        """The seconds of a step of `rows` rows. Times must be known.

        Without measured times, and until steps have told the fixed cost from that of a row, more rows than they had
        count as if there were no fixed cost, so that they are not taken to be cheaper than they are."""
        if self._measured:
            return self._at_start(rows) * (self._taken / self._predicted if self._predicted else 1.0)
        line = self._line
        if line.slope is None:
            return line.mean * max(1.0, rows * line.n / line.x)
        return line.fixed + line.slope * rows

    def _at_start(self, rows: int) -> float:
        """The measured seconds: those of the next larger size, because steps are padded to it; beyond the largest one,
        in proportion to the rows."""
        i = bisect_left(self._measured, (rows, 0.0))
        if i < len(self._measured):
            return self._measured[i][1]
        most, seconds = self._measured[-1]
        return seconds * rows / most
