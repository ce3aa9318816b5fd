"""A load on the engine over real nodes on this machine: the S-Part in this process and R-nodes in processes of their
own. No HTTP is involved, as in a simulation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import uvloop

from fastdecode.bench.serving.client import LoadRun
from fastdecode.bench.serving.workload import LoadRequest, Prompts
from fastdecode.engine.engine import Engine
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.plan.children import r_node
from fastdecode.plan.simulation import RequestSender, Served
from fastdecode.spart import Model, SPart
from fastdecode.transports.registry import connect

_FIRST_ID, _LAST_ID = 3, 999  # that prompts are drawn from
_SPARE_MEMORY = 64 << 20


@dataclass(frozen=True, slots=True)
class RealSystem:
    """A loaded model, and the R-nodes to start for it over shared memory."""

    model: Model
    kv_dtype: str
    r_nodes: int
    r_threads: int  # of each R-node
    memory: float  # bytes of each R-node's KV-cache

    def serve(
        self, requests: Sequence[LoadRequest], limits: SchedulerLimits, *, bounds: Sequence[int | None], **options: Any
    ) -> Served:
        """Serve `requests` over R-nodes that are started for it. `bounds` and `options`: see `simulate`.

        Raises RuntimeError, TransportError, OSError, and ValueError for what the engine refuses.
        """
        return uvloop.run(self._serve(requests, limits, bounds, options))

    async def _serve(
        self, requests: Sequence[LoadRequest], limits: SchedulerLimits, bounds: Sequence[int | None], options: Any
    ) -> Served:
        n = limits.mini_batches
        n_answers = sum(request.choices for request in requests)
        options = {"max_queued": n_answers, "prefix_cache": any(request.blocks for request in requests)} | options
        with ExitStack() as stack:
            memory = int(self.memory)
            children = [r_node("shm", self.r_threads, memory + _SPARE_MEMORY) for _ in range(self.r_nodes)]
            urls = [stack.enter_context(child) for child in children]
            hello = self.model.hello(n, limits.max_batch_tokens, self.kv_dtype, memory, 2 * n * limits.max_seqs)
            links = [await connect(url, dataclasses.replace(hello), None) for url in urls]
            engine = Engine(
                SPart(self.model, links, state_slots=n * limits.max_seqs),
                links,
                mini_batches=n,
                max_batch_size=limits.max_seqs,
                max_batch_tokens=limits.max_batch_tokens,
                end_token_ids=(),
                **options,
            )
            await engine.start()
            try:
                # The event loop's own clock counts milliseconds.
                sender, begun = RequestSender(engine, n_answers, time.monotonic), time.monotonic()
                await sender.send_all(requests, Prompts(_FIRST_ID, _LAST_ID, seed=0), bounds)
                seconds = time.monotonic() - begun
            finally:
                await engine.stop()
                for link in links:
                    await link.close()
        scheduler = engine.scheduler
        return Served(LoadRun(sender.answers, seconds, []), scheduler.preemptions, scheduler.recomputed_tokens)
