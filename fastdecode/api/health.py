"""/health: is the node able to serve, and is what it has been given moving."""

from __future__ import annotations

from typing import Any, Protocol

from fastdecode.engine.stats import EngineStats


class Reports(Protocol):
    """The engine, as far as its health goes."""

    ready: bool
    stalled_seconds: float
    stats: EngineStats


def health(engine: Reports, *, closing: bool, stalled_after: float) -> tuple[int, dict[str, Any]]:
    """HTTP status and body. 503 while the node cannot take requests, or has work and completed no step for
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
        "isa": sorted({node.isa for node in stats.nodes if node.alive}),
        "nodes": [
            {
                "url": node.url,
                "alive": node.alive,
                "isa": node.isa,
                "threads": node.threads,
                "pages_used": node.pages_used,
                "pages_total": node.pages_total,
                "sequences": node.sequences,
            }
            for node in stats.nodes
        ],
    }
    return (200 if status == "ok" else 503), body
