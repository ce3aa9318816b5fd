"""What the engine counts, for /metrics and /health."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class EngineObserver(Protocol):
    """Told of single events, for histograms. Called in the event loop; must not block or raise. Times: seconds."""

    def started(self, queue_seconds: float) -> None:
        """A request was scheduled for the first time."""

    def first_token(self, seconds: float) -> None:
        """Time to first token, from submit."""

    def inter_token(self, seconds: float) -> None:
        """Time between two tokens of one request."""

    def finished(self, reason: str, seconds: float, prompt_tokens: int, generated_tokens: int) -> None:
        """A request ended, `seconds` after submit; `reason` is "stop", "length", "cancelled" or "error"."""

    def step(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` rows ended `seconds` after it was handed to the S-Part."""


class NullObserver:
    """Observes nothing."""

    def started(self, queue_seconds: float) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def inter_token(self, seconds: float) -> None: ...
    def finished(self, reason: str, seconds: float, prompt_tokens: int, generated_tokens: int) -> None: ...
    def step(self, tokens: int, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeStats:
    """One R-node as the S-node sees it."""

    url: str
    node: str
    isa: str
    threads: int
    alive: bool
    pages_total: int
    pages_used: int  # counted for sequences, FREE not acknowledged included; not what is kept of those that ended
    sequences: int
    load: int  # tokens that its sequences will have at most
    page_bytes: int
    attention_seconds: float  # time its R-engine worked for this S-node, as of the last refresh
    kv_bytes_read: int  # as of the last refresh
    calls: int  # as of the last refresh


@dataclass(slots=True)
class EngineStats:
    """A snapshot; the totals count from the engine's start."""

    running: int
    waiting: int
    kv_usage: float  # pages used / pages of all live leases, 0..1
    nodes: list[NodeStats] = field(default_factory=list)
    totals: Totals = field(default_factory=lambda: Totals())


@dataclass(slots=True)
class Totals:
    requests: int = 0
    rejected: int = 0  # Overloaded
    preemptions: int = 0
    prompt_tokens: int = 0  # of requests that were started
    generated_tokens: int = 0
    steps: int = 0
    s_seconds: float = 0.0  # the S-Part computed
    r_wait_seconds: float = 0.0  # the S-Part stood waiting for R-nodes
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of them, those found
    kv_bytes: int = 0  # KV-cache bytes that the R-nodes read
