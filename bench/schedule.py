"""The scheduler's processor time for each step, while a crowd of requests that share a prompt starts, decodes and ends.

The R-nodes only count. `fastdecode-plan simulate` runs the schedules against each other in virtual time.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from fastdecode.bench.options import print_result
from fastdecode.engine.cluster import Cluster
from fastdecode.engine.prefixes import page_hashes
from fastdecode.engine.request import SamplingParams
from fastdecode.engine.scheduler import Scheduler
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.engine.sequence import Sequence
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.step.batch import Sampled
from fastdecode.transports.base import Lease

COMMAND = ("schedule", "processor time of the scheduler while many requests share a prompt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-bench schedule`."""
    add = parser.add_argument
    add("--crowd", type=int, default=600, metavar="N", help="number of requests")
    add("--prompt-tokens", type=int, default=8192, metavar="N", help="tokens of the shared prompt")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Time the scheduler and print a table."""
    sharing, apart = (crowd(args.crowd, args.prompt_tokens, share=share) for share in (True, False))
    print_result(args, {"sharing": sharing, "apart": apart}, partial(_print_table, args))


def _print_table(args: argparse.Namespace, result: dict[str, Any]) -> None:
    print(f"{args.crowd} requests with one prompt of {args.prompt_tokens} tokens; processor milliseconds a step:")
    print(f"{'':<24} {'steps':>6} {'mean':>8} {'median':>8} {'p99':>8} {'longest':>8} {'pages':>7}")
    for name, row in (("with it", result["sharing"]), ("without, 32 tokens each", result["apart"])):
        times = " ".join(f"{row[key]:8.3f}" for key in ("mean", "median", "p99", "longest"))
        print(f"{name:<24} {row['steps']:6d} {times} {row['pages']:7d}")
    print(f"a lookup: {result['sharing']['lookup']:.3f} ms")


def crowd(n: int, prompt_tokens: int, *, share: bool) -> dict[str, Any]:
    """Time the scheduler, in milliseconds a step, while `n` requests with one prompt of `prompt_tokens` tokens and 32
    tokens of their own run to their end, 64 to 95 outputs each. `share` False: without that prompt, for comparison."""
    lease = Lease(100_000, 100_000, 4 * n, PAGE_TOKENS, "", 1, "sim")
    cluster = Cluster(cast(Any, [SimpleNamespace(url="sim://0", lease=lease)]), prefix_cache=share)
    limits = SchedulerLimits(2, max(1024, n), n)
    scheduler = Scheduler(cluster, limits)
    for order in range(n):
        tokens = [i % 1000 for i in range(prompt_tokens if share else 0)] + [1000 + order] * 32
        scheduler.add(
            Sequence(
                request_id=str(order),
                order=order,
                tokens=tokens,
                n_prompt=len(tokens),
                max_new=64 + order % 32,
                params=SamplingParams(),
                seed=0,
                end_tokens=frozenset(),
                hashes=page_hashes(tokens) if share else [],
            )
        )
    seconds: list[float] = []
    lookups: list[float] = []
    pages = 0
    while scheduler.has_work:
        for mini_batch in range(limits.mini_batches):
            begun = time.thread_time()
            plan = scheduler.schedule(mini_batch)
            if plan is not None:
                scheduler.complete(plan, [Sampled(0) if chunk.sample else None for chunk in plan.chunks])
            seconds.append(time.thread_time() - begun)
            for seq in scheduler.take_forks():
                scheduler.fork_done(seq, True)
            for node in cluster.nodes:
                node.acknowledge_free(node.take_released())
        pages = max(pages, cluster.nodes[0].pages_used)
        if probe := next(iter(scheduler.waiting or scheduler.running), None):
            begun = time.thread_time()
            cluster.nodes[0].prefixes.match(probe.tokens, probe.hashes)
            lookups.append(time.thread_time() - begun)
    ms = sorted(1e3 * s for s in seconds)
    row = {"steps": len(ms), "mean": sum(ms) / len(ms), "median": ms[len(ms) // 2], "p99": ms[int(0.99 * len(ms))]}
    return row | {"longest": ms[-1], "pages": pages, "lookup": 1e3 * sum(lookups) / len(lookups)}
