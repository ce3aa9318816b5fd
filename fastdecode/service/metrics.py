"""/metrics: vLLM's metric names under `fastdecode:`, and metrics of the R-nodes.

Metrics is the engine's observer, and fills the histograms as events happen. All that the engine counts by itself is
read from its statistics when Prometheus asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fastdecode.engine.stats import EngineObserver, EngineStats, NodeStats
from fastdecode.service.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "fastdecode:"
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
_REASONS = ("stop", "length", "abort", "error")


class Metrics(EngineObserver):
    """All metrics, in their own registry.."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]):
        """`model` is the label `model_name` of every sample; `stats()` takes a snapshot of the engine's counters."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From submit to the first token.", _FIRST_BUCKETS
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a request.", _TOKEN_BUCKETS
        )
        self._end_to_end = self._histogram(
            "e2e_request_latency_seconds", "From submit to the end of the request.", _REQUEST_BUCKETS
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From submit to the first step.", _REQUEST_BUCKETS
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _powers_of_two())
        self._output_length = self._histogram(
            "request_generation_tokens", "Tokens a request generated.", _powers_of_two()
        )
        self._iteration = self._histogram("iteration_tokens_total", "Rows of a step.", _powers_of_two())
        self._step = self._histogram(
            "step_seconds", "From the hand-over of a step to the S-Part to its end.", _TOKEN_BUCKETS
        )
        self._success = Counter(
            _PREFIX + "request_success",
            "Requests ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        for reason in _REASONS:
            self._success.labels(model, reason)
        self.registry.register(_EngineCollector(model, stats))

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(_PREFIX + name, documentation, self._labels, buckets)
        self.registry.register(histogram)
        return histogram

    def latencies(self) -> dict[str, dict[str, list[float]]]:
        """The histograms of the times to the first and between two tokens: `bounds`, the upper ones of all buckets but
        the last, in seconds, and `counts`, one for each bucket."""
        return {
            "first_token": _counts(self._time_to_first_token),
            "inter_token": _counts(self._inter_token),
        }

    def render(self) -> bytes:
        """The text exposition format (Prometheus 0.0.4)."""
        return generate_latest(self.registry)

    def choice_ended(self, reason: str, seconds: float) -> None:
        """Count a choice that has ended, `seconds` after submit.

        The reason is the client's view: "stop" also for a stop string, which the engine sees as a cancelled request.
        """
        self._success.labels(finished_reason=reason, **self._labels).inc()
        self._end_to_end.observe(seconds)

    # ---- EngineObserver ----

    def started(self, queue_seconds: float) -> None:
        self._queue_time.observe(queue_seconds)

    def first_token(self, seconds: float) -> None:
        self._time_to_first_token.observe(seconds)

    def inter_token(self, seconds: float, n: int) -> None:
        self._inter_token.observe(seconds, n)

    def finished(self, reason: str, seconds: float, prompt_tokens: int, generated_tokens: int) -> None:
        self._prompt_length.observe(prompt_tokens)
        self._output_length.observe(generated_tokens)

    def step(self, tokens: int, seconds: float) -> None:
        self._iteration.observe(tokens)
        self._step.observe(seconds)


class _EngineCollector(Collector):
    """Reads the engine's counters at the moment of a scrape."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]):
        self._model = model
        self._stats = stats

    def describe(self) -> list[Metric]:
        return []  # without this, registering would call `collect` before the engine has started

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        totals = stats.totals
        yield self._gauge("num_requests_running", "Requests in a mini-batch.", stats.running)
        yield self._gauge("num_requests_waiting", "Requests that wait, preempted ones included.", stats.waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Part of the KV-cache pages that all live R-nodes could give which is in use (1 is full).",
            stats.kv_usage,
        )
        yield self._counter(
            "num_preemptions", "Preemptions: running requests put back to be recomputed.", totals.preemptions
        )
        yield self._counter(
            "recomputed", "Running requests queued again without their cache, to be recomputed.", totals.recomputed
        )
        yield self._counter("moved", "Running requests moved from one R-node to another.", totals.migrated)
        yield self._counter("prompts_taken", "Prompts computed by a prefill S-node.", totals.remote_prefills)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.prefix_hits)
        yield self._counter("guessed_tokens", "Tokens guessed by speculation.", totals.guessed)
        yield self._counter("guessed_right_tokens", "Guessed tokens that were right.", totals.guessed_right)
        yield self._counter("prompt_tokens", "Prompt tokens of requests that were started.", totals.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", totals.generated_tokens)
        yield self._counter("admission_rejections", "Requests refused because the queue was full.", totals.rejected)
        yield self._counter("steps", "Steps completed.", totals.steps)
        yield self._counter("s_seconds", "Time the S-Part computed.", totals.s_seconds)
        yield self._counter("s_wait_for_r_seconds", "Time the S-Part waited for R-nodes.", totals.r_wait_seconds)
        yield self._counter("kv_bytes_read", "KV-cache bytes the R-nodes read.", totals.kv_bytes)
        yield from self._nodes(stats.nodes)
        yield from self._experts(stats.expert_load)

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _nodes(self, nodes: list[NodeStats]) -> Iterator[Metric]:
        for kind, name, documentation, value in _NODE_METRICS:
            family = kind(_PREFIX + "r_node_" + name, documentation, labels=["model_name", "r_node", "isa"])
            for node in nodes:
                family.add_metric([self._model, node.url, node.isa], value(node))
            yield family

    def _experts(self, load: dict[int, list[int]]) -> Iterator[Metric]:
        for name, documentation, value in _EXPERT_METRICS:
            family = GaugeMetricFamily(_PREFIX + name, documentation, labels=["model_name", "layer"])
            for layer, rows in load.items():
                family.add_metric([self._model, str(layer)], value(rows))
            yield family


_EXPERT_METRICS: tuple[tuple[str, str, Callable[[list[int]], float]], ...] = (
    (
        "expert_imbalance",
        "Rows of the layer's busiest expert since the start, over the mean of its experts (1 is even).",
        lambda rows: max(rows) * len(rows) / sum(rows),
    ),
    ("experts_unused", "Experts of the layer that have had no row since the start.", lambda rows: rows.count(0)),
)
_NODE_METRICS: tuple[tuple[type, str, str, Callable[[NodeStats], float]], ...] = (
    (GaugeMetricFamily, "alive", "1 while the R-node is connected.", lambda node: float(node.alive)),
    (
        GaugeMetricFamily,
        "draining",
        "1 while the R-node is emptied, because it is to leave.",
        lambda node: float(node.draining),
    ),
    (GaugeMetricFamily, "pages", "Cache pages of the lease.", lambda node: node.pages_total),
    (GaugeMetricFamily, "pages_max", "Cache pages that the lease could have.", lambda node: node.pages_max),
    (
        GaugeMetricFamily,
        "kv_bytes_leased",
        "Bytes of the lease's cache pages.",
        lambda node: node.pages_total * node.page_bytes if node.alive else 0,
    ),
    (GaugeMetricFamily, "region_bytes", "Bytes of the link's activation region.", lambda node: node.region_bytes),
    (
        GaugeMetricFamily,
        "pages_used",
        "Cache pages in use, including pages whose FREE is not yet acknowledged.",
        lambda node: node.pages_used,
    ),
    (
        GaugeMetricFamily,
        "kv_bytes_used",
        "Bytes of the cache pages in use.",
        lambda node: node.pages_used * node.page_bytes,
    ),
    (GaugeMetricFamily, "sequences", "Sequences placed on the R-node.", lambda node: node.sequences),
    (
        CounterMetricFamily,
        "attention_seconds",
        "Time the R-engine worked for this S-node.",
        lambda node: node.attention_seconds,
    ),
    (
        CounterMetricFamily,
        "kv_bytes_read",
        "KV-cache bytes the R-engine read for this S-node.",
        lambda node: node.kv_bytes_read,
    ),
    (CounterMetricFamily, "calls", "Layer calls the R-engine served for this S-node.", lambda node: node.calls),
)


def _counts(histogram: Histogram) -> dict[str, list[float]]:
    return {"bounds": list(histogram.bounds), "counts": [float(n) for n in histogram.counts]}


def _powers_of_two() -> tuple[float, ...]:
    return tuple(float(2**i) for i in range(18))
