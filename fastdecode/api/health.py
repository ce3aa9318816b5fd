"""/health: whether the node can take requests, and whether its running requests make progress."""

from __future__ import annotations

from typing import Any

from fastdecode.service.client import EngineStatus


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
        "nodes": [
            {
                "url": node.url,
                "alive": node.alive,
                "draining": node.draining,
                "part": node.member,
                "isa": node.isa,
                "threads": node.threads,
                "pages_used": node.pages_used,
                "pages_total": node.pages_total,
                "pages_max": node.pages_max,
                "page_bytes": node.page_bytes,
                "region_bytes": node.region_bytes,
                "sequences": node.sequences,
            }
            for node in stats.nodes
        ],
    }
    return (200 if status == "ok" else 503), body
