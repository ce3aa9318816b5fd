"""The predicted time of the R-Part: how fast each R-node reads KV-cache, and which of them a step waits for.

A layer of a step ends when its slowest R-node has answered. So the R-Part of a step takes the sum over the layers of
the slowest R-node's bytes divided by its bandwidth. In a layer with a sliding window a sequence is read up to that
window, so layers of one window make a group. Pure arithmetic.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

#: Steps of which the one of median speed counts, because a step that other processes have delayed says nothing.
_MEDIAN_OF = 5

#: Medians that are remembered, and that it takes to tell a bandwidth from another one. Processes that delay an R-node
#: for less than half of them change nothing.
_MEDIANS = 15

#: Part of the mean bytes by which two medians must differ to tell the fixed time from the slope.
_APART = 0.1

#: A bandwidth is known no better than by this part of it.
_MARGIN = 0.1


@dataclass(slots=True)
class Bandwidth:
    """One R-node's bandwidth, from the busy time and the bytes of its steps.

    A step takes a fixed time and then its bytes divided by the bandwidth. Without the fixed time, an R-node with little
    load would look slow and be given ever less. The fixed time is uncertain too: how far is what `range` says.
    """

    bytes_per_second: float | None = None  # None before the first step that read KV-cache
    range: tuple[float, float] | None = None  # bytes a second at least and at most; None: measured too few times
    _latest: list[tuple[float, int, float]] = field(default_factory=list)  # seconds a byte, bytes, seconds
    _medians: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MEDIANS))  # bytes, seconds
    _slope: float = 0.0  # seconds a byte beyond the fixed time; 0: not known yet

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
        """Put a line through the medians that is itself made of medians: of their slopes, then of their fixed times."""
        steps = sorted(self._medians)
        least = _APART * sum(x for x, _ in steps) / len(steps)
        pairs = zip(steps, steps[(len(steps) + 1) // 2 :], strict=False)  # one of the smaller half, one of the larger
        slopes = [(v - y) / (u - x) for (x, y), (u, v) in pairs if u - x > least]
        if len(slopes) > _MEDIANS // 4 and (slope := median(slopes)) > 0:
            self._slope = slope
        fixed = max(0.0, median(y - self._slope * x for x, y in steps)) if self._slope else 0.0
        # A step cannot be all fixed time: that would be an infinite bandwidth.
        speed = self.bytes_per_second = median(x / max(y - fixed, 0.05 * y) for x, y in steps)
        if len(steps) == _MEDIANS:
            self.range = (1 - _MARGIN) * median(x / y for x, y in steps), (1 + _MARGIN) * speed


def alike(bandwidths: Sequence[Bandwidth]) -> list[float | None]:
    """Bytes a second of each R-node, the same for those whose measurements allow the same bandwidth: placement by noise
    would give equal R-nodes unequal loads. An R-node that was measured too few times has the median of all; None: none
    has been measured.
    """
    known = [speed for bandwidth in bandwidths if (speed := bandwidth.bytes_per_second)]
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


@dataclass(slots=True)
class Loads:
    """Tokens to read on each R-node in each group of layers: `tokens[node][group]`."""

    groups: tuple[tuple[int, int], ...]  # (window, layers); window 0: full attention
    tokens: list[list[float]] = field(default_factory=list)

    @property
    def n_layers(self) -> int:
        return sum(layers for _, layers in self.groups)

    def add(self, node: int, length: float, sign: int = 1) -> None:
        """Add (or with `sign` -1 take away) a sequence of `length` tokens."""
        row = self.tokens[node]
        for i, (window, _) in enumerate(self.groups):
            row[i] += sign * (min(length, window) if window else length)

    def seconds(self, costs: Sequence[float]) -> float:
        """The R-Part of a step over these loads. `costs` has each R-node's seconds a token and layer."""
        return sum(
            layers * max(row[i] * cost for row, cost in zip(self.tokens, costs, strict=True))
            for i, (_, layers) in enumerate(self.groups)
        )

    def evenness(self, costs: Sequence[float]) -> float:
        """Sum over the R-nodes of their own time squared: tells apart two loads with the same slowest R-node."""
        layers = [n for _, n in self.groups]
        return sum(
            (cost * sum(n * tokens for n, tokens in zip(layers, row, strict=True))) ** 2
            for row, cost in zip(self.tokens, costs, strict=True)
        )


def layer_groups(windows: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """(window, number of layers with it) of a model whose layers have these windows; 0: full attention."""
    return tuple(sorted(Counter(windows).items()))


def assign(
    loads: Loads, costs: Sequence[float], lengths: Sequence[float], allowed: Sequence[Sequence[int]]
) -> list[int]:
    """Distribute sequences of `lengths` tokens over R-nodes beside `loads`, so that the R-Part of a step is short.

    `allowed` lists for each sequence the R-nodes that have room for it, at least one. Longest first, each goes where it
    lengthens the step least; then single moves and exchanges of two are made as long as they shorten the step. Returns
    each sequence's R-node. `loads` is unchanged.
    """
    work = Loads(loads.groups, [row[:] for row in loads.tokens])
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    places = [-1] * len(lengths)
    for i in order:
        places[i] = min(allowed[i], key=lambda node: _with(work, costs, [(i, -1, node)], lengths))
        work.add(places[i], lengths[i])
    best = work.seconds(costs), work.evenness(costs)
    for _ in range(4 * len(lengths)):
        changes = [[(i, places[i], node)] for i in order for node in allowed[i] if node != places[i]]
        changes += [
            [(i, places[i], places[j]), (j, places[j], places[i])]
            for i in order
            for j in order
            if i < j and places[i] != places[j] and places[j] in allowed[i] and places[i] in allowed[j]
        ]
        if not changes:
            break
        scores = [_with(work, costs, change, lengths) for change in changes]
        score = min(scores)
        if score >= (best[0] * (1 - 1e-9), best[1]):
            break
        best = score
        for i, source, target in changes[scores.index(score)]:
            work.add(source, lengths[i], -1)
            work.add(target, lengths[i])
            places[i] = target
    return places


def _with(
    loads: Loads, costs: Sequence[float], moves: list[tuple[int, int, int]], lengths: Sequence[float]
) -> tuple[float, float]:
    """The R-Part of a step, and its evenness, after `moves` of (sequence, from R-node or -1, to R-node)."""
    for i, source, target in moves:
        if source >= 0:
            loads.add(source, lengths[i], -1)
        loads.add(target, lengths[i])
    score = loads.seconds(costs), loads.evenness(costs)
    for i, source, target in moves:
        if source >= 0:
            loads.add(source, lengths[i])
        loads.add(target, lengths[i], -1)
    return score
