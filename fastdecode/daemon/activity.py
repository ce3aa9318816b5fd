"""log_activity: a line of the log, now and then, about the work of an S-node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fastdecode.engine.stats import EngineStats

log = logging.getLogger(__name__)

_SECONDS = 10.0  # between two lines


async def log_activity(count: Callable[[], EngineStats], interval: float = _SECONDS) -> None:
    """Log a line every `interval` seconds in which tokens were computed or requests wait, so that an operator sees what
    happens without a dashboard. `count` returns the engine's statistics. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    since, before = loop.time(), _tokens(count())
    while True:
        await asyncio.sleep(interval)
        now, stats = loop.time(), count()
        tokens = _tokens(stats)
        if tokens != before or stats.running or stats.waiting:
            prompt, generated, looked_up, found = (b - a for a, b in zip(before, tokens, strict=True))
            log.info("%s", _line(stats, prompt / (now - since), generated / (now - since), looked_up, found))
        since, before = now, tokens


def _tokens(stats: EngineStats) -> tuple[int, int, int, int]:
    t = stats.totals
    return t.prompt_tokens, t.generated_tokens, t.prefix_queries, t.prefix_hits


def _line(stats: EngineStats, prompt_rate: float, generated_rate: float, looked_up: int, found: int) -> str:
    kv = ", ".join(
        f"{node.url} {100 * node.pages_used / max(1, node.pages_max):.0f} %" if node.alive else f"{node.url} lost"
        for node in stats.nodes
    )
    prefix = f", prefix cache {100 * found / looked_up:.0f} % of prompt tokens" if looked_up else ""
    return (
        f"{stats.running} running, {stats.waiting} waiting; {prompt_rate:.0f} prompt and {generated_rate:.0f} output "
        f"tokens/s{prefix}; KV in use: {kv}"
    )
