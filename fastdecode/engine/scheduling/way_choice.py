"""WayChoice: the way in which the near and the far batch decode, chosen anew for each near step.

The times of steps are predicted from tables: the S-Part by its rows, attention on the GPU and on R-nodes by the bytes
that it reads, and the round trip. The GPU and the R-nodes have measured how fast they read; running means of the steps
correct the tables. Bookkeeping only: the caller measures the seconds.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.s_part_forecast import SPartForecast
from fastdecode.engine.scheduling.ways import LONGEST_WAIT, SLOWDOWN, BatchTimes, Rate, Way, best, rates
from fastdecode.spart.shape import LayerReads

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fastdecode.engine.scheduling.cluster import Cluster
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.sequence import Sequence

log = logging.getLogger(__name__)

#: The mini-batches: sequences whose K and V all lie on the S-Part's GPU, and the others.
NEAR, FAR = 0, 1

#: After this number of steps in a row that take longer or shorter than predicted, by more than the share `_OFF`, the
#: tables are measured again, during as many near steps.
_OFF_STEPS, _OFF = 50, 0.1

#: Assumed of a layer's way to R-nodes and back before the first step with far rows, seconds.
_LAYER_SECONDS = 50e-6

#: Weight of the older observations of the round trip after each new one.
_MEMORY = 0.9


@dataclass(slots=True)
class _Load:
    """What the decoding sequences of a step read."""

    rows: int
    resident: float = 0.0  # bytes on the GPU
    remote: dict[int, float] = field(default_factory=dict)  # bytes on each R-node, by its position

    def __add__(self, other: _Load) -> _Load:
        remote = Counter(self.remote)
        remote.update(other.remote)
        return _Load(self.rows + other.rows, self.resident + other.resident, dict(remote))


@dataclass(slots=True)
class _Flight:
    load: _Load
    seconds: float | None  # predicted, with nothing beside it; None: not known
    beside: bool  # a step of the other batch was in flight meanwhile


class WayChoice:
    """The way of the next steps, and the tables that it is chosen by."""

    def __init__(self, cluster: Cluster, slowdown: float = SLOWDOWN, measured: Mapping[int, float] | None = None):
        """`slowdown`: by which share near steps may become longer because of far rows. `measured`: see
        SPartForecast."""
        self.way = Way.NEAR  # of the next steps
        self._cluster, self._slowdown = cluster, slowdown
        self._s_part = SPartForecast(measured)
        self._round_trip = _LAYER_SECONDS * cluster.loads.n_layers
        self._near, self._far = _Load(0), _Load(0)
        self._wait = 0  # near steps between two steps with far rows
        self._joint = False  # steps with far rows have the near rows, too
        self._near_idle = True  # no near step could be planned last: near sequences lack pages, are frozen, or ended
        self._waited = 0  # near steps since the last step with far rows
        self._flights: dict[int, _Flight] = {}  # by mini-batch
        self._off = 0  # steps in a row whose times differ from the predicted ones
        self._measuring = 0  # near steps during which the tables are measured again
        self._limited = any(reads != LayerReads() for reads, _ in cluster.loads.groups)

    def plan(self, near: Iterable[Sequence], far: Iterable[Sequence], most: int) -> bool:
        """Choose the way of the next steps of the near and the far batch. True if the next near step has all rows, at
        most `most`. Far rows that are due join it, too, where that takes less of the GPU's time than a step of their
        own."""
        self._near, self._far = self._load(near), self._load(far)
        rate = self._best(self._near, self._far)
        self.way, self._wait = (Way.APART, 0) if rate is None else (rate.way, rate.wait)
        if self._near.rows and (self._measuring or not self._s_part.known):
            self.way, self._wait = Way.NEAR, LONGEST_WAIT
        fits = self._near.rows + self._far.rows <= most
        self._joint = fits and (self.way is Way.TOGETHER or self._cheaper_together())
        return self._joint and self._waited >= self._wait and FAR not in self._flights

    @property
    def far_step(self) -> bool:
        """True if the far batch is to have a step of its own now."""
        return self._near_idle or (not self._joint and self._waited >= self._wait)

    def near_idles(self) -> bool:
        """Record that no near step can begin now. True if the far batch, which has waited for near steps, may go on."""
        changed, self._near_idle = not self._near_idle, True
        return changed

    def pays(self, near: Iterable[Sequence], far: Iterable[Sequence], numbers: Iterable[int]) -> bool:
        """True if far rows bring more tokens a second than they cost, with one of these `numbers` of further far rows,
        and all prompts computed. A further row is taken to read as much as a near one. As long as times are not known,
        a single row pays, so that they become known."""
        on_gpu, off_gpu = self._load(near, prompts=True), self._load(far, prompts=True)
        nodes = [node for node in self._cluster.nodes if node.open and not node.resident]
        return not on_gpu.rows or any(self._pays(on_gpu, off_gpu, more, nodes) for more in numbers)

    def _pays(self, on_gpu: _Load, off_gpu: _Load, more: int, nodes: list[RNodeLedger]) -> bool:
        if more > 0 and nodes:
            each = more * on_gpu.resident / on_gpu.rows / len(nodes)
            off_gpu += _Load(more, 0.0, {node.position: each for node in nodes})
        rate = self._best(on_gpu, off_gpu)
        return rate.way is not Way.NEAR if rate is not None else self._s_part.known and off_gpu.rows == more

    def begin(self, mini_batch: int, together: bool) -> None:
        """Record that a step of a mini-batch begins, or one of all rows."""
        load = self._near + self._far if together else (self._near, self._far)[mini_batch]
        for flight in self._flights.values():
            flight.beside = True
        self._flights[mini_batch] = _Flight(load, self._seconds(load), bool(self._flights))
        if mini_batch == NEAR:
            self._near_idle, with_far_rows = False, together or FAR in self._flights
            self._waited = 0 if with_far_rows else self._waited + 1
            if together:
                self._cluster.totals.steps_together += 1
            elif with_far_rows:
                self._cluster.totals.steps_apart += 1
            else:
                self._cluster.totals.steps_near += 1
            self._measuring = max(0, self._measuring - 1)

    def end(self, mini_batch: int, seconds: float | None) -> None:
        """Record the seconds of a step; None: it has failed, or prompts have lengthened it."""
        flight = self._flights.pop(mini_batch, None)
        if mini_batch == FAR:
            self._waited = 0
        if flight is None or seconds is None or not flight.load.rows:
            return
        load, predicted = flight.load, flight.seconds
        if flight.beside and mini_batch == NEAR:
            return  # the far step has taken a part of the GPU that its times do not tell
        reading, on_gpu = self._reading(load), self._gpu_attention(load)
        if not load.remote or (reading is not None and reading + self._round_trip <= on_gpu):
            self._s_part.observe(load.rows, max(0.0, seconds - on_gpu))
        elif reading is not None and self._s_part.known:
            round_trip = max(0.0, seconds - self._s_part.seconds(load.rows) - reading)
            self._round_trip = _MEMORY * self._round_trip + (1 - _MEMORY) * round_trip
        if predicted is not None and not flight.beside:
            self._judge(predicted, seconds)

    def _judge(self, predicted: float, seconds: float) -> None:
        """Measure the tables again if predictions have been wrong for long."""
        self._cluster.totals.predicted_seconds += predicted
        self._cluster.totals.measured_seconds += seconds
        self._off = self._off + 1 if abs(seconds - predicted) > _OFF * predicted else 0
        if self._off < _OFF_STEPS:
            return
        log.warning(
            "%d steps in a row took other times than predicted, the last one %.1f ms instead of %.1f: sequences on the "
            "GPU go first while the times are measured again",
            self._off,
            1e3 * seconds,
            1e3 * predicted,
        )
        self._s_part.forget()
        self._off, self._measuring = 0, _OFF_STEPS

    # -- predictions ----------------------------------------------------------------------------------------------

    def _load(self, batch: Iterable[Sequence], prompts: bool = False) -> _Load:
        """What the sequences of a batch that decode will read in a step, or all sequences once their prompts are
        computed."""
        load = _Load(0)
        nodes = self._cluster.nodes
        for seq in batch:
            if not prompts and (seq.cached < seq.prefill_end or seq.frozen):
                continue
            load.rows += 1
            node, length = seq.placed_on, float(max(seq.cached, seq.prefill_end))
            if seq.prefix is not None:
                position, prefix = seq.prefix.node.position, seq.prefix.length
                load.remote[position] = load.remote.get(position, 0.0) + prefix * nodes[position].token_bytes
                length -= prefix
            elif self._limited:
                length = self._read(length)
            if node.resident:
                load.resident += length * node.token_bytes
            else:
                load.remote[node.position] = load.remote.get(node.position, 0.0) + length * node.token_bytes
        return load

    def _read(self, length: float) -> float:
        """Tokens that a sequence of `length` tokens reads, as an average over the layers."""
        loads = self._cluster.loads
        return sum(n * reads.tokens(length) for reads, n in loads.groups) / loads.n_layers

    def _best(self, near: _Load, far: _Load) -> Rate | None:
        """The best way for these rows; None: a time is not known."""
        if not (near.rows and far.rows):
            return Rate(Way.NEAR if near.rows else Way.APART, 0.0, 0.0, 0)
        times = [self._seconds(load) for load in (near, far, near + far)]
        if any(seconds is None for seconds in times):
            return None
        near_seconds, far_seconds, together = (seconds or 0.0 for seconds in times)
        alone = (
            BatchTimes(near.rows, near_seconds, near_seconds),
            BatchTimes(far.rows, far_seconds, self._gpu_seconds(far)),
        )
        return best(rates(*alone, together, self._slowdown))

    def _cheaper_together(self) -> bool:
        """True if far rows in a near step are known to take less of the GPU's time than in a step of their own."""
        near, both = self._seconds(self._near), self._seconds(self._near + self._far)
        if near is None or both is None or not (self._near.rows and self._far.rows):
            return False
        return both - near <= self._gpu_seconds(self._far)

    def _seconds(self, load: _Load) -> float | None:
        """Seconds of a step; None: not known."""
        reading = self._reading(load)
        if reading is None or not self._s_part.known:
            return None
        remote = reading + self._round_trip if load.remote else 0.0
        return self._s_part.seconds(load.rows) + max(remote, self._gpu_attention(load))

    def _reading(self, load: _Load) -> float | None:
        """Seconds in which R-nodes read; None: not known."""
        longest = 0.0
        for position, n_bytes in load.remote.items():
            node = self._cluster.nodes[position]
            speed = node.bandwidth.bytes_per_second or node.link.bytes_per_second
            if speed is None:
                return None
            longest = max(longest, n_bytes / speed)
        return longest

    def _gpu_seconds(self, load: _Load) -> float:
        """Seconds of a step in which the GPU computes."""
        return self._s_part.seconds(load.rows) + self._gpu_attention(load)

    def _gpu_attention(self, load: _Load) -> float:
        return load.resident / (self._cluster.nodes[0].bandwidth.bytes_per_second or float("inf"))
