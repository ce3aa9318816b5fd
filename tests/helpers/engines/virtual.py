"""Systems of round numbers for simulations: a toy model whose S-Part and R-Part take chosen times."""

from __future__ import annotations

from fastdecode.bench.serving.workload import LoadRequest
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.plan.equations import System
from fastdecode.plan.model import PlannedModel
from fastdecode.plan.profile import LinkTimes, SPartTimes
from fastdecode.plan.simulation import Simulated, simulate

#: One layer; a cached token has 64 bytes; attention of prompts costs next to nothing.
MODEL = PlannedModel("toy", 1, 4, 2, 8, 1e9)
PAGE_BYTES = 128 * 64


def toy_system(s_part, r_token_seconds, *, r_nodes=1, model=MODEL) -> System:
    """`s_part`: (rows, seconds); `r_token_seconds`: of an R-node, for each cached token that a row attends to."""
    times = SPartTimes(model="toy", parameters=model.parameters, rows=tuple(s_part))
    return System(model, times, LinkTimes(layer_seconds=1e-9, gbps=1e9), "fp16", 64 / r_token_seconds, r_nodes)


def serve(requests, system, *, pages=1_000_000, batch=256, mini_batches=1, rows=512, **options) -> Simulated:
    """`requests`: of workload, or (arrival, prompt, output) tuples; `pages` of each R-node."""
    load = [request if isinstance(request, LoadRequest) else LoadRequest(*request) for request in requests]
    limits = SchedulerLimits(mini_batches, rows, batch)
    return simulate(load, system, limits, pages * PAGE_BYTES, **options)


def gaps(done: Simulated) -> list[float]:
    """Seconds between two tokens of a request."""
    return [b - a for answer in done.run.answers for a, b in zip(answer.chunks, answer.chunks[1:], strict=False)]
