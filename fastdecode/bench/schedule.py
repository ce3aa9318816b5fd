"""The scheduler in virtual time: greedy against stable admission. The code is the server's; the times are computed.

With --crowd N, no simulation but a measurement: the processor time of the scheduler for each step while N requests that
share a prompt start, decode and end, over R-nodes that only count.

Without --crowd, three loads, each simulated with both schedules: outputs of one known length that arrive all at once;
outputs of a trace's lengths that arrive all at once at R-nodes whose KV-cache is full; and the trace at its own
arrivals. A step takes the longer of its S-Part and its R-Part. These figures are simulated, not measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fastdecode.bench.options import print_result
from fastdecode.bench.serving.workload import Request as Traced
from fastdecode.bench.serving.workload import read_trace
from fastdecode.bench.simulation import Request, Run, StepCost, acknowledge, sequence, simulate
from fastdecode.engine.cluster import Cluster
from fastdecode.engine.prefixes import page_hashes
from fastdecode.engine.scheduler import Scheduler
from fastdecode.engine.scheduling.admission import Greedy, Stable
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.batch import Sampled

COMMAND = ("schedule", "greedy against stable admission in virtual time (simulated)")

#: S-Part of a step in every load, and of a row of a prompt where prompts count: an S-node on a CPU, whose 32 rows take
#: about as long as reading the weights.
_S_SECONDS = 0.010
_S_ROW_SECONDS = 0.010 / 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-bench schedule`."""
    add = parser.add_argument
    add("--requests", type=int, default=512, metavar="N", help="requests of each load")
    add("--batch", type=int, default=32, metavar="N", help="sequences at once, for outputs of known length")
    add("--output-tokens", type=int, default=256, metavar="N", help="the known length")
    add("--trace", type=Path, metavar="FILE", help="trace for the other two loads, as of fastdecode-bench serve")
    add("--pages", type=int, default=128, metavar="N", help="KV pages of the R-node that the trace's outputs fill")
    add("--crowd", type=int, metavar="N", help="time the scheduler with N requests that share a prompt")
    add("--prompt-tokens", type=int, default=8192, metavar="N", help="tokens of the shared prompt")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Simulate the loads and print a table. Raises ValueError, OSError."""
    if args.crowd:
        sharing, apart = (crowd(args.crowd, args.prompt_tokens, share=share) for share in (True, False))
        print_result(args, {"sharing": sharing, "apart": apart}, partial(_print_crowd, args))
        return
    loads = {"known length": known_length(args.requests, args.batch, args.output_tokens)}
    if args.trace:
        trace = read_trace(args.trace)
        loads["trace, at once"] = unknown_lengths(trace, args.requests, args.pages)
        loads["trace, arrivals"] = arrivals(trace, args.requests)
    print_result(args, loads, _print_loads)


def _print_crowd(args: argparse.Namespace, result: dict[str, Any]) -> None:
    print(f"{args.crowd} requests with one prompt of {args.prompt_tokens} tokens; processor milliseconds a step:")
    print(f"{'':<24} {'steps':>6} {'mean':>8} {'median':>8} {'p99':>8} {'longest':>8} {'pages':>7}")
    for name, row in (("with it", result["sharing"]), ("without, 32 tokens each", result["apart"])):
        times = " ".join(f"{row[key]:8.3f}" for key in ("mean", "median", "p99", "longest"))
        print(f"{name:<24} {row['steps']:6d} {times} {row['pages']:7d}")
    print(f"a lookup: {result['sharing']['lookup']:.3f} ms")


def _print_loads(loads: dict[str, Any]) -> None:
    heads = ("load", "schedule", "tokens/s", "of greedy", "longest step", "of greedy")
    print("{:<16} {:<12} {:>9} {:>9} {:>13} {:>9} preempted".format(*heads))
    for load, rows in loads.items():
        for row in rows:
            print(
                f"{load:<16} {row['schedule']:<12} {row['rate']:9.0f} {row['gain']:9.3f} "
                f"{1e3 * row['longest_step']:10.1f} ms {row['peak']:9.3f} {row['preemptions']:9d}"
            )
    print("simulated: the server's scheduler over computed step times")


def known_length(n: int, batch: int, length: int) -> list[dict[str, Any]]:
    """`n` requests for `length` tokens at once, `batch` at a time; the R-Part takes as long as the S-Part when the
    batch has mixed ages."""
    requests = [Request(0.0, 1, length, length)] * n
    cost = StepCost(_S_SECONDS, 0.0, 0.0, _S_SECONDS / (batch * length / 2))
    limits = SchedulerLimits(1, max(batch, 512), batch)
    return _compare(requests, limits, cost, {"greedy": Greedy(), "stable": Stable()})


def unknown_lengths(trace: Sequence[Traced], n: int, pages: int) -> list[dict[str, Any]]:
    """`n` requests with the trace's output lengths at once, over `pages` KV pages; the R-Part of a half full cache
    takes as long as the S-Part. `stable` has seen the outputs before them in the trace; `stable, new` none."""
    history, drawn = trace[:-n], trace[-n:]
    if not history:
        raise ValueError(f"the trace has {len(trace)} requests, no more than the {n} to simulate")
    taught = Stable()
    for request in history:
        taught.lengths.observe("", request.output_tokens, ended=True)
    requests = [Request(0.0, 16, request.output_tokens, 1024) for request in drawn]
    cost = StepCost(_S_SECONDS, _S_ROW_SECONDS, 0.0, _S_SECONDS / (pages * PAGE_TOKENS / 2))
    schedules = {"greedy": Greedy(), "stable": taught, "stable, new": Stable()}
    return _compare(requests, SchedulerLimits(1, 512, 256), cost, schedules, pages)


def arrivals(trace: Sequence[Traced], n: int) -> list[dict[str, Any]]:
    """The trace's first `n` requests at its own arrivals, prompts included, on a faster S-node that keeps up."""
    requests = [Request(r.arrival, r.prompt_tokens, r.output_tokens) for r in trace[:n]]
    cost = StepCost(_S_SECONDS, 1e-4, 0.0, _S_SECONDS / 60_000)
    return _compare(requests, SchedulerLimits(1, 512, 64), cost, {"greedy": Greedy(), "stable": Stable()})


def crowd(n: int, prompt_tokens: int, *, share: bool) -> dict[str, Any]:
    """Time the scheduler, in milliseconds a step, while `n` requests with one prompt of `prompt_tokens` tokens and 32
    tokens of their own run to their end, 64 to 95 outputs each. `share` False: without that prompt, for comparison."""
    lease = SimpleNamespace(n_pages=100_000, max_seqs=4 * n, page_bytes=PAGE_TOKENS)
    cluster = Cluster(cast(Any, [SimpleNamespace(url="sim://0", lease=lease)]), prefix_cache=share)
    limits = SchedulerLimits(2, max(1024, n), n)
    scheduler = Scheduler(cluster, limits)
    for order in range(n):
        tokens = [i % 1000 for i in range(prompt_tokens if share else 0)] + [1000 + order] * 32
        scheduler.add(sequence(order, tokens, 64 + order % 32, page_hashes(tokens) if share else []))
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
            acknowledge(cluster)
        pages = max(pages, cluster.nodes[0].pages_used)
        if probe := next(iter(scheduler.waiting or scheduler.running), None):
            begun = time.thread_time()
            cluster.nodes[0].prefixes.match(probe.tokens, probe.hashes)
            lookups.append(time.thread_time() - begun)
    ms = sorted(1e3 * s for s in seconds)
    row = {"steps": len(ms), "mean": sum(ms) / len(ms), "median": ms[len(ms) // 2], "p99": ms[int(0.99 * len(ms))]}
    return row | {"longest": ms[-1], "pages": pages, "lookup": 1e3 * sum(lookups) / len(lookups)}


def _compare(
    requests: Sequence[Request],
    limits: SchedulerLimits,
    cost: StepCost,
    schedules: dict[str, Greedy],
    pages: int = 1_000_000,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, admission in schedules.items():
        done: Run = simulate(requests, limits, cost, (pages,), admission=admission)
        row: dict[str, Any] = {"schedule": name, "rate": done.rate, "longest_step": max(done.step_seconds)}
        first = rows[0] if rows else row
        row |= {"gain": done.rate / first["rate"], "peak": row["longest_step"] / first["longest_step"]}
        rows.append(row | {"preemptions": done.preemptions})
    return rows
