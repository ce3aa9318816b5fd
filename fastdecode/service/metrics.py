"""/metrics: vLLM's metric names under `fastdecode:`, and metrics of the R-nodes.

Metrics is the engine's observer, and fills the histograms as events happen. All that the engine counts by itself is
read from its statistics when Prometheus asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import attrgetter
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fastdecode.engine.state.totals import Totals
from fastdecode.engine.stats import EngineObserver, EngineStats, NodeStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "fastdecode:"
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_REQUEST_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
_POWERS_OF_TWO = tuple(float(2**i) for i in range(18))
_REASONS = ("stop", "length", "abort", "error")
_T = TypeVar("_T")
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
#: Metrics that are read from a statistic: their kind, name, documentation and value.
_Table = tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[_T], float]], ...]


class Histogram:
    """A histogram of one time series. prometheus_client's own takes two locks for each observation, which counts at
    every token; this one belongs to one thread."""

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]):
        """`bounds` are the upper bounds of all buckets but the last, ascending; a value on a bound is within it."""
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._counts = [0] * (len(bounds) + 1)  # observations, by bucket
        self._sum = 0.0

    def observe(self, value: float, n: int = 1) -> None:
        """Count `n` observations of a value."""
        self._counts[bisect_left(self._bounds, value)] += n
        self._sum += n * value

    def buckets(self) -> dict[str, list[float]]:
        """The `bounds` and the `counts` of all buckets."""
        return {"bounds": list(self._bounds), "counts": [float(n) for n in self._counts]}

    def family(self, model: str) -> Metric:
        """The histogram as Prometheus has it."""
        family = HistogramMetricFamily(_PREFIX + self._name, self._documentation, labels=["model_name"])
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = [(name, float(n)) for name, n in zip(names, accumulate(self._counts), strict=True)]
        family.add_metric([model], buckets, self._sum)
        return family


#: The histograms, by the event at which they are filled: their name, documentation and bounds.
_HISTOGRAMS = {
    "first_token": ("time_to_first_token_seconds", "From submit to the first token.", _FIRST_BUCKETS),
    "inter_token": ("inter_token_latency_seconds", "Time between two tokens of a request.", _TOKEN_BUCKETS),
    "end": ("e2e_request_latency_seconds", "From submit to the end of the request.", _REQUEST_BUCKETS),
    "start": ("request_queue_time_seconds", "From submit to the first step.", _REQUEST_BUCKETS),
    "prompt": ("request_prompt_tokens", "Prompt tokens of a request.", _POWERS_OF_TWO),
    "output": ("request_generation_tokens", "Tokens a request generated.", _POWERS_OF_TWO),
    "rows": ("iteration_tokens_total", "Rows of a step.", _POWERS_OF_TWO),
    "step": ("step_seconds", "From the hand-over of a step to the S-Part to its end.", _TOKEN_BUCKETS),
}


class Metrics(Collector, EngineObserver):
    """All metrics, in their own registry."""

    def __init__(self, model: str, stats: Callable[[], EngineStats]):
        """`model` is the label `model_name` of every sample; `stats()` takes a snapshot of the engine's counters."""
        self._model, self._stats = model, stats
        self._histograms = {event: Histogram(*definition) for event, definition in _HISTOGRAMS.items()}
        self._registry = CollectorRegistry()
        labels = ("model_name", "finished_reason")
        self._success = Counter(
            f"{_PREFIX}request_success", "Requests ended, by reason.", labels, registry=self._registry
        )
        for reason in _REASONS:
            self._success.labels(model, reason)
        self._registry.register(self)

    def latencies(self) -> dict[str, dict[str, list[float]]]:
        """The histograms of the times to the first and between two tokens: `bounds`, the upper ones of all buckets but
        the last, in seconds, and `counts`, one for each bucket."""
        return {event: self._histograms[event].buckets() for event in ("first_token", "inter_token")}

    def render(self) -> bytes:
        """The text exposition format (Prometheus 0.0.4)."""
        return generate_latest(self._registry)

    def choice_ended(self, reason: str, seconds: float) -> None:
        """Count a choice that has ended, `seconds` after submit.

        The reason is the client's view: "stop" also for a stop string, which the engine sees as a cancelled request.
        """
        self._success.labels(self._model, reason).inc()
        self._histograms["end"].observe(seconds)

    # ---- EngineObserver ----

    def started(self, queue_seconds: float) -> None:
        self._histograms["start"].observe(queue_seconds)

    def first_token(self, seconds: float) -> None:
        self._histograms["first_token"].observe(seconds)

    def inter_token(self, seconds: float, n: int) -> None:
        self._histograms["inter_token"].observe(seconds, n)

    def finished(self, prompt_tokens: int, generated_tokens: int) -> None:
        self._histograms["prompt"].observe(prompt_tokens)
        self._histograms["output"].observe(generated_tokens)

    def step(self, tokens: int, seconds: float) -> None:
        self._histograms["rows"].observe(tokens)
        self._histograms["step"].observe(seconds)

    # ---- Collector ----

    def describe(self) -> list[Metric]:
        return []  # without this, registering would call `collect` before the engine has started

    def collect(self) -> Iterator[Metric]:
        for histogram in self._histograms.values():
            yield histogram.family(self._model)
        stats = self._stats()
        yield from self._read(_ENGINE_METRICS, [([], stats)])
        yield from self._read(_TOTALS, [([], stats.totals)])
        nodes = [([node.url, node.isa], node) for node in stats.nodes]
        yield from self._read(_NODE_METRICS, nodes, "r_node_", "r_node", "isa")
        layers = [([str(layer)], rows) for layer, rows in stats.expert_load.items()]
        yield from self._read(_EXPERT_METRICS, layers, "", "layer")

    def _read(
        self, table: _Table[_T], series: list[tuple[list[str], _T]], prefix: str = "", *labels: str
    ) -> Iterator[Metric]:
        """The metrics of a table, with a sample for each of `series`: the values of `labels`, and a statistic."""
        for kind, name, documentation, value in table:
            family = kind(_PREFIX + prefix + name, documentation, labels=["model_name", *labels])
            for values, statistic in series:
                family.add_metric([self._model, *values], value(statistic))
            yield family


_ENGINE_METRICS: _Table[EngineStats] = (
    (_GAUGE, "num_requests_running", "Requests in a mini-batch.", lambda stats: stats.running),
    (_GAUGE, "num_requests_waiting", "Requests that wait, preempted ones included.", lambda stats: stats.waiting),
    (
        _GAUGE,
        "kv_cache_usage_perc",
        "Part of the KV-cache pages that all live R-nodes could give which is in use (1 is full).",
        lambda stats: stats.kv_usage,
    ),
    (
        _GAUGE,
        "cut_sequences",
        "Running sequences on the S-node's GPU whose first tokens are on an R-node.",
        lambda stats: stats.cut_sequences,
    ),
)
_TOTALS: _Table[Totals] = tuple(
    (_COUNTER, name, documentation, attrgetter(field))
    for name, documentation, field in (
        ("num_preemptions", "Preemptions: running requests put back to be recomputed.", "preemptions"),
        ("recomputed", "Running requests queued again without their cache, to be recomputed.", "recomputed"),
        ("moved", "Running requests moved from one R-node to another.", "migrated"),
        ("adopted", "Requests of another S-node that went on with their KV-cache.", "adopted"),
        (
            "adoptions_failed",
            "Requests of another S-node that were recomputed: their KV-cache was not found.",
            "not_adopted",
        ),
        ("prompts_taken", "Prompts computed by a prefill S-node.", "remote_prefills"),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
        ("guessed_tokens", "Tokens guessed by speculation.", "guessed"),
        ("guessed_right_tokens", "Guessed tokens that were right.", "guessed_right"),
        ("prompt_tokens", "Prompt tokens of requests that were started.", "prompt_tokens"),
        ("generation_tokens", "Tokens generated.", "generated_tokens"),
        ("admission_rejections", "Requests refused because the queue was full.", "rejected"),
        ("steps", "Steps completed.", "steps"),
        ("steps_gpu_alone", "Steps of sequences on the S-Part's GPU without any others (A).", "steps_near"),
        ("steps_gpu_together", "Steps of all sequences, on the S-Part's GPU and on R-nodes (B).", "steps_together"),
        ("steps_gpu_apart", "Steps of sequences on the S-Part's GPU beside steps of the others (C).", "steps_apart"),
        ("steps_predicted_seconds", "Predicted time of steps with sequences on the S-Part's GPU.", "predicted_seconds"),
        ("steps_measured_seconds", "Measured time of the steps whose time was predicted.", "measured_seconds"),
        ("s_seconds", "Time the S-Part computed.", "s_seconds"),
        ("s_wait_for_r_seconds", "Time the S-Part waited for R-nodes.", "r_wait_seconds"),
        ("kv_bytes_read", "KV-cache bytes the R-nodes read.", "kv_bytes"),
        ("kv_bytes_spilled", "Bytes of cache pages that went from the S-node's GPU to R-nodes.", "spilled_bytes"),
        ("kv_bytes_refilled", "Bytes of cache pages that came back to the S-node's GPU.", "refilled_bytes"),
    )
)
_NODE_METRICS: _Table[NodeStats] = (
    (_GAUGE, "alive", "1 while the R-node is connected.", lambda n: float(n.alive)),
    (_GAUGE, "draining", "1 while the R-node is emptied, because it is to leave.", lambda n: float(n.draining)),
    (_GAUGE, "pages", "Cache pages of the lease.", lambda n: n.pages_total),
    (_GAUGE, "pages_max", "Cache pages that the lease could have.", lambda n: n.pages_max),
    (
        _GAUGE,
        "kv_bytes_leased",
        "Bytes of the lease's cache pages.",
        lambda n: n.pages_total * n.page_bytes if n.alive else 0,
    ),
    (_GAUGE, "region_bytes", "Bytes of the link's activation region.", lambda n: n.region_bytes),
    (
        _GAUGE,
        "pages_used",
        "Cache pages in use, including pages whose FREE is not yet acknowledged.",
        lambda n: n.pages_used,
    ),
    (_GAUGE, "kv_bytes_used", "Bytes of the cache pages in use.", lambda n: n.pages_used * n.page_bytes),
    (_GAUGE, "sequences", "Sequences placed on the R-node.", lambda n: n.sequences),
    (_COUNTER, "attention_seconds", "Time the R-engine worked for this S-node.", lambda n: n.attention_seconds),
    (_COUNTER, "kv_bytes_read", "KV-cache bytes the R-engine read for this S-node.", lambda n: n.kv_bytes_read),
    (_COUNTER, "calls", "Layer calls the R-engine served for this S-node.", lambda n: n.calls),
)
_EXPERT_METRICS: _Table[list[int]] = (
    (
        _GAUGE,
        "expert_imbalance",
        "Rows of the layer's busiest expert since the start, over the mean of its experts (1 is even).",
        lambda rows: max(rows) * len(rows) / max(sum(rows), 1),
    ),
    (
        _GAUGE,
        "experts_unused",
        "Experts of the layer that have had no row since the start.",
        lambda rows: rows.count(0),
    ),
)
