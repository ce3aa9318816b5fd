"""Reports the node's state. /health says whether the node can take requests and whether its running requests make
progress. /cluster says in one JSON object, for the page, what the engine and the metrics count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from fastdecode import __version__
from fastdecode.engine.stats import StepInterval
from fastdecode.service.client import EngineClient, EngineStatus

#: A report answers all requests of this time, so that many open pages cost the R-nodes one question.
_FRESH_SECONDS = 0.5
#: Intervals of steps in a report: with 32 layers, those of the last six steps.
_INTERVALS = 200
#: What /health says of an R-node.
_NODE_FIELDS = (
    *("url", "alive", "draining", "isa", "threads", "pages_used", "pages_total", "pages_max", "page_bytes"),
    *("region_bytes", "sequences"),
)


def health(engine: EngineStatus, *, closing: bool, stalled_after: float) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body of /health.

    The status is 503 while the node cannot take requests, or if it has work and has completed no step for
    `stalled_after` seconds.
    """
    stats = engine.stats
    alive = sum(node.alive for node in stats.nodes)
    if closing:
        status = "closing"
    elif not alive:
        status = "no R-node is connected"
    elif not engine.ready:
        status = "not ready"
    elif engine.stalled_seconds > stalled_after:
        status = f"stalled: no step was completed in the last {engine.stalled_seconds:.0f} s"
    else:
        status = "ok"
    body = {
        "status": status,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_cache_usage": stats.kv_usage,
        "exchange": stats.exchange,
        "isa": sorted({node.isa for node in stats.nodes if node.alive}),
        "nodes": [{"part": node.member} | {name: getattr(node, name) for name in _NODE_FIELDS} for node in stats.nodes],
    }
    return (200 if status == "ok" else 503), body


class ClusterReport:
    """Answers GET /cluster."""

    def __init__(self, engine: EngineClient, model: str, *, chat: bool, name_state: Callable[[EngineStatus], str]):
        """`chat`: the model has a chat template. `name_state` gives the state that /health reports."""
        self._engine, self._name_state = engine, name_state
        self._constant = {"version": __version__, "model": model, "chat": chat, "max_model_len": engine.max_model_len}
        self._body, self._made = b"", float("-inf")
        self._lock = asyncio.Lock()

    async def handle(self, request: web.Request) -> web.Response:
        async with self._lock:
            if time.monotonic() - self._made > _FRESH_SECONDS:
                self._body = orjson.dumps(await self._report())
                self._made = time.monotonic()
        return web.Response(body=self._body, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def _report(self) -> dict[str, Any]:
        report = await self._engine.report(_INTERVALS)
        stats = report.status.stats
        return self._constant | {
            "status": self._name_state(report.status),
            "seconds": time.monotonic(),  # only differences between two reports mean anything
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_cache_usage": stats.kv_usage,
            "cut_sequences": stats.cut_sequences,
            "totals": asdict(stats.totals),
            "nodes": [asdict(node) for node in stats.nodes],
            "timeline": _relative(report.timeline),
            "histograms": report.latencies,
        }


def _relative(intervals: list[StepInterval]) -> list[list[int]]:
    """Intervals as [slot, number, asked, replied, ended], times in microseconds since the first one's `asked`."""
    if not intervals:
        return []
    origin = min(asked for _, _, asked, _, _ in intervals)
    return [[slot, number, *(round((t - origin) * 1e6) for t in times)] for slot, number, *times in intervals]
