"""How fast each R-node reads KV-cache, from the times that its steps took. Pure arithmetic."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

#: One step of this many counts, the one of median speed, because other processes delay single steps.
_MEDIAN_OF = 5

#: The number of medians that are remembered, and that tell two bandwidths apart. Processes that delay an R-node during
#: less than half of them change no estimate.
_MEDIANS = 15

#: Two medians must differ by this share of the mean bytes to tell the fixed cost from the slope.
_LEAST_DIFFERENCE = 0.1

#: The uncertainty of a bandwidth, as a share of it.
_MARGIN = 0.1


@dataclass(slots=True)
class Bandwidth:
    """One R-node's bandwidth, from the busy time and the bytes of its steps.

    A step takes a fixed cost and then its bytes divided by the bandwidth. Without the fixed cost, an R-node with little
    load would look slow and be given ever less. `range` covers the uncertainty of the fixed cost too.
    """

    bytes_per_second: float | None = None  # None before the first step that read KV-cache
    range: tuple[float, float] | None = None  # bytes a second at least and at most; None: measured too few times
    _latest: list[tuple[float, int, float]] = field(default_factory=list)  # seconds a byte, bytes, seconds
    _medians: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MEDIANS))  # bytes, seconds
    _slope: float = 0.0  # seconds a byte beyond the fixed cost; 0: not known yet

    def observe(self, busy_ns: int, kv_bytes: int) -> None:
        """Record a step that read `kv_bytes` bytes of KV-cache in `busy_ns` nanoseconds. Ignores one that read none."""
        if kv_bytes <= 0 or busy_ns <= 0:
            return
        self._latest.append((busy_ns / kv_bytes / 1e9, kv_bytes, busy_ns / 1e9))
        if not self._medians:
            self.bytes_per_second = 1 / median(seconds for seconds, _, _ in self._latest)
        if len(self._latest) == _MEDIAN_OF:
            self._medians.append(sorted(self._latest)[_MEDIAN_OF // 2][1:])
            self._latest.clear()
            self._fit()

    def _fit(self) -> None:
        """Put a line through the medians that is itself made of medians: of their slopes, then of their fixed costs."""
        steps = sorted(self._medians)
        least = _LEAST_DIFFERENCE * sum(x for x, _ in steps) / len(steps)
        pairs = zip(steps, steps[(len(steps) + 1) // 2 :], strict=False)  # one of the smaller half, one of the larger
        slopes = [(v - y) / (u - x) for (x, y), (u, v) in pairs if u - x > least]
        if len(slopes) > _MEDIANS // 4 and median(slopes) > 0:
            self._slope = median(slopes)
        fixed = max(0.0, median(y - self._slope * x for x, y in steps)) if self._slope else 0.0
        # The fixed cost cannot be all of a step: that would be an infinite bandwidth.
        speed = self.bytes_per_second = median(x / max(y - fixed, 0.05 * y) for x, y in steps)
        if len(steps) == _MEDIANS:
            self.range = (1 - _MARGIN) * median(x / y for x, y in steps), (1 + _MARGIN) * speed


def alike(bandwidths: Sequence[Bandwidth]) -> list[float | None]:
    """Bytes a second of each R-node. R-nodes whose measurements allow the same bandwidth get the same value, because
    placement by noise would give equal R-nodes unequal loads. An R-node that was measured too few times gets the median
    of all; None: no R-node was measured.
    """
    known = [bandwidth.bytes_per_second for bandwidth in bandwidths if bandwidth.bytes_per_second]
    usual = [median(known) if known else None] * len(bandwidths)
    ranges = sorted(((*bandwidth.range, i) for i, bandwidth in enumerate(bandwidths) if bandwidth.range), reverse=True)
    while ranges:
        # The R-nodes whose ranges reach the fastest one's lower bound have this bandwidth in common.
        group = [i for _, high, i in ranges if high >= ranges[0][0]]
        speed = median(bandwidths[i].bytes_per_second or 0.0 for i in group)
        for i in group:
            usual[i] = speed
        ranges = [(low, high, i) for low, high, i in ranges if i not in group]
    return usual
