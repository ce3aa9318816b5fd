"""The counters that a router shows at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fastdecode.router.pool import Pool


class RouterMetrics(Collector):
    """Counters of one router."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests sent to an S-node.", "s_node")
        self.retries = self._counter("retries", "Requests sent to a further S-node.")
        self.continued = self._counter("continued_streams", "Streams continued at another S-node.")
        self.broken = self._counter("broken_streams", "Streams whose S-node was lost.")

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"fastdecode:router_{name}", documentation, labels, registry=self._registry)

    def watch(self, pool: Pool) -> None:
        """Show the S-nodes of a pool, too."""
        self._pool = pool
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> list[GaugeMetricFamily]:
        """The gauges of the S-nodes, for the registry."""
        healthy = GaugeMetricFamily(
            "fastdecode:router_s_node_healthy", "1 while the S-node takes requests.", labels=["s_node"]
        )
        load = GaugeMetricFamily(
            "fastdecode:router_s_node_load", "Requests at the S-node, those of others included.", labels=["s_node"]
        )
        for s_node in self._pool.s_nodes:
            healthy.add_metric([s_node.url], float(s_node.healthy))
            load.add_metric([s_node.url], s_node.load)
        return [healthy, load]
