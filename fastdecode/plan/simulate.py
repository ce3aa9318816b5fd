"""Serves a load in virtual time: the server's own engine and scheduler, over steps that take predicted times.

The load and the figures are the ones of fastdecode-bench serve, but simulated. The time that Python takes between steps
comes from the profile, if it has one. The schedules learn the lengths of outputs as they come, or from --history.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from fastdecode.bench.options import print_result
from fastdecode.bench.serving import report, workload
from fastdecode.bench.serving.options import add_load_arguments, load_requests
from fastdecode.daemon.option_values import format_bytes, size_option
from fastdecode.engine.scheduling.admission import SCHEDULES
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.plan.options import PlannedSystem, add_step_arguments, add_system_arguments
from fastdecode.plan.simulation import Simulated, simulate

COMMAND = ("simulate", "serve a load in virtual time: the server's scheduler over predicted times (simulated)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-plan simulate`."""
    add = parser.add_argument
    add_system_arguments(parser)
    add_step_arguments(parser)
    add("--gpu-kv", type=size_option, default=0, metavar="SIZE", help="memory of the S-node's GPU for KV pages; with "
        "--r-nodes 0 there are no others")  # fmt: skip
    add("--mini-batches", type=int, metavar="N", help="default: 2, or 1 if both parts take turns on the same cores")
    add("--max-batch-size", type=int, default=256, metavar="N")
    add("--schedule", action="append", choices=SCHEDULES, help="schedule to simulate (repeatable); default: both")
    add("--output-bound", type=int, metavar="N", help="max_tokens of every request; default: none is set")
    add("--history", type=int, default=0, metavar="N", help="the first N requests of the trace are not sent: the "
        "scheduler has seen the lengths of their outputs")  # fmt: skip
    add_load_arguments(parser)
    add("--plot", type=Path, metavar="FILE", help="PNG of the last run over time")


def run(args: argparse.Namespace) -> None:
    """Simulate and print. Raises ProfileError, CheckpointError, ValueError, OSError, RuntimeError."""
    if args.plot:
        from fastdecode.bench import plot  # fails here rather than after the work
    if not (args.r_nodes or args.gpu_kv):
        raise ValueError("--r-nodes 0: then --gpu-kv says where the KV-cache lies")
    planned = PlannedSystem.from_args(args)
    profile, system, model = planned.profile, planned.system, planned.system.model
    mini_batches = args.mini_batches or (1 if profile.in_turns else 2)
    apart = args.gpu_kv > 0  # a GPU computes prompts in steps of their own
    limits = SchedulerLimits(mini_batches, args.max_batch_tokens, args.max_batch_size, prompts_apart=apart)
    history, requests = _load(args)
    rows = []
    for schedule in args.schedule or SCHEDULES:
        begun = time.perf_counter()
        done = simulate(
            requests,
            system,
            limits,
            planned.memory,
            gpu_kv=args.gpu_kv,
            bounds=[args.output_bound] * len(requests),
            history=history,
            schedule=schedule,
            target_tbt=args.target_tbt_ms / 1e3 or None,
        )
        rows.append({"schedule": schedule, "wall_seconds": time.perf_counter() - begun} | figures(done, args))
        if args.plot:
            plot.timeline(rows[-1], args.plot)
    on_gpu = f"{format_bytes(args.gpu_kv)} on the GPU, " if args.gpu_kv else ""
    shape = (
        f"{on_gpu}{args.r_nodes} R-node(s), KV {args.kv_dtype}, {mini_batches} mini-batch(es) of {args.max_batch_size}"
    )
    result = {"model": model.name, "profile": profile.name, "source": profile.source, "system": shape, "rows": rows}
    print_result(args, result, _print_table)


def _load(args: argparse.Namespace) -> tuple[list[int], list[workload.LoadRequest]]:
    """The lengths of the outputs before the load, and the load."""
    if args.history and not args.trace:
        raise ValueError("--history needs a --trace")
    n, args.requests = args.history, args.history + args.requests
    requests = load_requests(args)
    history, requests = [request.output_tokens for request in requests[:n]], requests[n:]
    if not requests:
        raise ValueError(f"the trace has no requests behind the first {n}")
    if args.rate and len(args.rate) > 1:
        raise ValueError("simulate takes one --rate")
    rate = args.rate[0] if args.rate else None
    if rate is None:
        return history, workload.from_zero(requests)
    return history, workload.at_rate(requests, rate, args.burstiness, args.seed)


def figures(done: Simulated, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a run: what `fastdecode-bench serve` prints, and figures of the steps and the KV-cache."""
    usage = [sample["kv_cache_usage_perc"] for sample in done.run.samples]
    seconds = done.run.seconds
    result = report.summary(done.run, args.slo_ttft, args.slo_tbt)
    result |= {"steps": len(done.steps), "longest_step_ms": 1e3 * done.longest_step, "preemptions": done.preemptions}
    result |= {"kv_mean": sum(usage) / len(usage), "kv_peak": max(usage), "samples": done.run.samples}
    return result | {"timeline": report.timeline(done.run, max(1.0, seconds / 1000))}


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['model']} on {result['profile']} ({result['source']}): {result['system']}")
    for row in result["rows"]:
        print(f"--schedule {row['schedule']}, simulated in {row['wall_seconds']:.1f} s; virtual times:")
        print(report.table(row))
        print(
            f"{row['steps']} steps, the longest {row['longest_step_ms']:.1f} ms; {row['preemptions']} preemptions; "
            f"KV-cache in use {row['kv_mean']:.0%} on average, {row['kv_peak']:.0%} at most"
        )
    first = result["rows"][0]
    for row in result["rows"][1:]:
        rate = row["output_tokens_per_s"] / first["output_tokens_per_s"]
        peak = row["longest_step_ms"] / first["longest_step_ms"]
        print(f"{row['schedule']} beside {first['schedule']}: {rate:.3f}x the tokens/s, {peak:.3f}x the longest step")
