"""The line that an S-node logs while it has work."""

from __future__ import annotations

import asyncio
import logging

from fastdecode.daemon.activity import log_activity
from fastdecode.engine.stats import EngineStats, NodeStats


class Engine:
    """Counts, as an engine does, without one."""

    def __init__(self) -> None:
        node = NodeStats("shm:///r", "r", "avx2", 1, True, 200, 200, 50, 3, 0, 1, 1, 0.0, 0, 0, 0, 0, 0.0)
        self.stats = EngineStats(running=0, waiting=0, kv_usage=0.25, nodes=[node])


async def test_a_line_while_there_is_work_and_none_without(caplog) -> None:
    engine = Engine()
    caplog.set_level(logging.INFO, "fastdecode.daemon.activity")
    task = asyncio.create_task(log_activity(lambda: engine.stats, interval=0.05))
    await asyncio.sleep(0.2)
    assert not caplog.records
    engine.stats.running, engine.stats.waiting = 3, 2
    engine.stats.totals.prompt_tokens += 80
    engine.stats.totals.generated_tokens += 5
    engine.stats.totals.prefix_queries += 80
    engine.stats.totals.prefix_hits += 60
    while not caplog.records:
        await asyncio.sleep(0.01)
    task.cancel()
    line = caplog.messages[0]
    assert line.startswith("3 running, 2 waiting;") and "75 % of prompt tokens" in line
    assert line.endswith("KV in use: shm:///r 25 %")
