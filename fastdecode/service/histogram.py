"""A histogram that is cheap to fill."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """A histogram of one time series, for /metrics. prometheus_client's own takes two locks for each observation,
    which counts at every token; this one belongs to one thread."""

    def __init__(self, name: str, documentation: str, labels: Mapping[str, str], bounds: Sequence[float]):
        """`bounds` are the upper bounds of all buckets but the last, ascending; a value on a bound is within it."""
        self._name, self._documentation, self._labels = name, documentation, labels
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # observations, by bucket
        self._sum = 0.0

    def observe(self, value: float, n: int = 1) -> None:
        """Count `n` observations of a value."""
        self.counts[bisect_left(self.bounds, value)] += n
        self._sum += n * value

    def describe(self) -> list[HistogramMetricFamily]:
        """For the registry, which refuses two collectors with the same names."""
        return [HistogramMetricFamily(self._name, self._documentation, labels=list(self._labels))]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        [family] = self.describe()
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        buckets = [(name, float(n)) for name, n in zip(names, accumulate(self.counts), strict=True)]
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
