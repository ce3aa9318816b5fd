"""Keeps decoding steps within the target time: which sequences may start to decode, and which choices must pause.

A step of a mini-batch takes the S-Part of its rows and the R-Part of the tokens that they read. Mini-batches in flight
share the S-node and the R-nodes, so a step takes

    scale * max(sum of the S-Parts, sum of the R-Parts, S-Part + R-Part of the longest mini-batch)

where `scale` is learned from the steps that ran. Real steps spread around that time: the target is divided by their
spread, so that slow steps keep the target too. Where S-Part and R-Part take equally long (FastDecode, arXiv 2403.11421,
equation 10), more sequences make every step longer and bring no more tokens a second, so waiting sequences lose little.
Without a target no step is bounded. The caller measures the seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.line import Line
from fastdecode.engine.scheduling.rtime import Loads
from fastdecode.engine.scheduling.spread import Spread
from fastdecode.engine.scheduling.way_choice import FAR, NEAR
from fastdecode.spart.shape import LayerReads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastdecode.engine.scheduling.cluster import Cluster
    from fastdecode.engine.state.sequence import Sequence

#: Steps may take this multiple of their fixed cost, whatever the target: the first number if the fixed cost is within
#: the target, the second if it exceeds the target.
_ROOM, _STRETCH = 1.1, 1.5

#: Running choices pause when steps would take this many times the limit for newcomers. The gap keeps a choice from
#: pausing and going on again and again.
_LATE = 1.15

#: Weight of the older observations of `scale` after each new one, and the bounds of one observation.
_MEMORY = 0.9
_LEAST_SCALE, _MOST_SCALE = 0.5, 4.0


class Pace:
    """The predicted time of decoding steps. Times are in seconds."""

    def __init__(self, cluster: Cluster, target: float | None, mini_batches: int):
        """`target`: the time between two tokens of a stream that should not be exceeded; None: no bound."""
        self.refused = False  # the last sequence that wanted to start would have made steps too long
        self._cluster, self._target = cluster, target
        self._s_part = Line()  # x: rows, y: seconds of a step that only decodes
        self._scale, self._spread = 1.0, Spread()
        # Rows and seconds of the R-Part of each mini-batch: now, and once its prompts are computed.
        self._now = [(0, 0.0)] * mini_batches
        self._prefilled = [(0, 0.0)] * mini_batches
        self._predicted: dict[int, tuple[int, float]] = {}  # of steps in flight: rows and seconds, without `scale`
        #: True if the mini-batches are the near and the far batch (way_choice.py), which do not wait for each other.
        self.apart = False
        self._mini_batch, self._costs = 0, [1.0]
        #: Of all sequences of each mini-batch, when it was planned last.
        self._loads = [Loads(cluster.loads.groups) for _ in range(mini_batches)]

    def plan(self, mini_batch: int, batch: Iterable[Sequence]) -> None:
        """Begin to plan a step of a mini-batch, which consists of the sequences `batch`."""
        if self._target is None:
            return
        self._mini_batch, self._costs = mini_batch, self._cluster.costs
        prompts, rows = [], 0
        groups, totals = self._cluster.loads.groups, [0] * len(self._cluster.nodes)
        decoding = Loads(groups, [[0.0] * len(groups) for _ in totals])
        limited = any(reads != LayerReads() for reads, _ in groups)
        # Every step passes every sequence: lengths are summed first, unless a layer reads only some of the tokens.
        for seq in batch:
            if seq.cached < seq.prefill_end:
                prompts.append(seq)
                continue
            rows += 1
            if limited:
                decoding.add(seq.placed_on.position, seq.cached)
            else:
                totals[seq.placed_on.position] += seq.cached
        for position, total in enumerate(totals):
            if total:
                decoding.add(position, total)
        self._now[mini_batch] = rows, decoding.seconds(self._costs)
        for seq in prompts:
            decoding.add(seq.placed_on.position, seq.prefill_end)
        self._loads[mini_batch] = decoding
        self._prefilled[mini_batch] = rows + len(prompts), decoding.seconds(self._costs)

    @property
    def known(self) -> bool:
        """True if there is a target, and steps and R-nodes were measured."""
        if self._target is None or not self._s_part.n:
            return False
        return any(node.bandwidth.bytes_per_second for node in self._cluster.nodes if not node.resident)

    def allows(self, seq: Sequence) -> bool:
        """True if steps stay within the limit when `seq` joins the mini-batch that is being planned. If no other
        sequence decodes, it may always start."""
        self.refused = self.known and any(rows for rows, _ in self._prefilled) and not self._fits(seq)
        return not self.refused

    def _fits(self, seq: Sequence) -> bool:
        nodes = [seq.placed_on] if seq.paused else self._cluster.open
        return min(self._seconds_with(seq, node.position) for node in nodes) <= self.limit

    def _seconds_with(self, seq: Sequence, position: int) -> float:
        mini_batch = (FAR if position else NEAR) if self.apart else self._mini_batch
        loads, batches = self._loads[mini_batch], self._prefilled[:]
        loads.add(position, len(seq.tokens))
        batches[mini_batch] = batches[mini_batch][0] + 1, loads.seconds(self._costs)
        loads.add(position, len(seq.tokens), -1)
        return self._scale * self._seconds(batches)

    def joined(self, seq: Sequence, sign: int = 1) -> None:
        """Count a sequence that has joined the mini-batch that is being planned or (with `sign` -1) has left it."""
        if self._target is None:
            return
        mini_batch = self._mini_batch if seq.mini_batch is None else seq.mini_batch
        loads = self._loads[mini_batch]
        loads.add(seq.placed_on.position, len(seq.tokens), sign)
        rows = self._prefilled[mini_batch][0] + sign
        self._prefilled[mini_batch] = rows, loads.seconds(self._costs)

    @property
    def limit(self) -> float:
        """Seconds that a step may take; infinite without a target."""
        if self._target is None:
            return float("inf")
        fixed = self._s_part.fixed if self._s_part.slope is not None else self._s_part.mean
        fixed_cost = self._scale * len(self._prefilled) * fixed
        if fixed_cost > self._target:
            return _STRETCH * fixed_cost
        return max(self._target / self._spread.value, _ROOM * fixed_cost)

    @property
    def excess(self) -> float:
        """Seconds of the next steps, all prompts computed, as a multiple of the limit; 0 if that is not known."""
        return self._scale * self._seconds(self._prefilled) / self.limit if self.known else 0.0

    @property
    def late(self) -> bool:
        """True if choices should pause."""
        return self.excess > _LATE

    def begin(self, mini_batch: int, rows: int) -> None:
        """Record that a step with `rows` decoding rows begins."""
        if self._target is not None and rows:
            now = self._now[:]
            now[mini_batch] = rows, now[mini_batch][1]
            beside = [now[mini_batch]] if self.apart else now
            self._predicted[mini_batch] = rows, self._seconds(beside) if self.known else 0.0

    def end(self, mini_batch: int, seconds: float | None, s_seconds: float | None) -> None:
        """Record the seconds of a step and of its S-Part. Each is None if a prompt has lengthened it or the step has
        failed."""
        rows, predicted = self._predicted.pop(mini_batch, (0, 0.0))
        if s_seconds is not None and s_seconds > 0 and rows:
            self._s_part.observe(rows, s_seconds)
        if seconds is not None and predicted > 0:
            self._spread.observe(seconds / (self._scale * predicted))
            scale = min(max(seconds / predicted, _LEAST_SCALE), _MOST_SCALE)
            self._scale = _MEMORY * self._scale + (1 - _MEMORY) * scale

    def _seconds(self, batches: list[tuple[int, float]]) -> float:
        """Seconds of a step, without `scale`; `batches` as in `_now`."""
        s_parts = [self._s_seconds(rows) if rows else 0.0 for rows, _ in batches]
        r_parts = [seconds for _, seconds in batches]
        alone = max(s + r for s, r in zip(s_parts, r_parts, strict=True))
        if self.apart:
            return alone
        return max(sum(s_parts), sum(r_parts), alone)

    def _s_seconds(self, rows: int) -> float:
        line = self._s_part
        return line.mean if line.slope is None else line.fixed + line.slope * rows
