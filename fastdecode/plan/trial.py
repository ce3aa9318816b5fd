"""Serves one load on real parts on this machine and in virtual time, and prints both.

The profile is measured first, in the same run. Then the engine serves requests of one length that all arrive at once,
with the S-Part in this process and R-nodes in processes of their own, and the simulator serves the same requests by the
profile. So that the parts do not take turns on the same cores, --s-threads and --r-threads divide the cores. No HTTP is
involved: the real run and the simulated one have the same client.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop

from fastdecode.bench.options import print_result
from fastdecode.bench.serving import report, workload
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.machine import usable_cpus
from fastdecode.demo import model_dir
from fastdecode.engine.engine import Engine
from fastdecode.engine.scheduling.admission import SCHEDULES
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.plan.children import r_node
from fastdecode.plan.equations import System
from fastdecode.plan.measure import load, measure, print_profile
from fastdecode.plan.model import PlannedModel, read_model
from fastdecode.plan.profile import Profile, read_profile
from fastdecode.plan.simulation import Client, Simulated, simulate
from fastdecode.plan.together_measure import Load
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS
from fastdecode.spart import Model, SPart
from fastdecode.transports.registry import connect

COMMAND = ("trial", "tokens/s of a load on real R-nodes and S-node here, beside the simulated ones")

_VOCABULARY = 1000  # ids that prompts are drawn from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-plan trial`."""
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    add("--profile", metavar="FILE", help="profile of this machine with these threads; default: it is measured")
    add("--requests", type=int, default=64, metavar="N", help="requests that arrive at once")
    add("--input-tokens", type=int, default=256, metavar="N")
    add("--output-tokens", type=int, default=128, metavar="N")
    add("--schedule", action="append", choices=SCHEDULES, help="schedule (repeatable); default: both")
    add("--mini-batches", type=int, default=2, metavar="N")
    add("--max-batch-size", type=int, default=16, metavar="N", help="sequences of a mini-batch")
    add("--max-batch-tokens", type=int, default=512, metavar="N")
    add("--kv-dtype", choices=KV_DTYPES, default="fp16")
    add("--r-nodes", type=int, default=1, metavar="N")
    add("--s-threads", type=int, default=1, metavar="N", help="threads of the S-Part")
    add("--r-threads", type=int, default=1, metavar="N", help="threads of each R-node")
    add("--seconds", type=float, default=20.0, help="about how long to measure the profile")
    add("--out", type=Path, metavar="FILE", help="save the profile")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Measure, serve, simulate and print. Raises ProfileError, ValueError, OSError, RuntimeError, TransportError."""
    directory = NodeConfig(model=args.model).model_path() or model_dir()
    planned = read_model(directory)
    length = args.input_tokens + args.output_tokens
    if length > planned.max_positions:
        raise ValueError(f"{length} tokens are more than the {planned.max_positions} positions of {planned.name}")
    if args.s_threads + args.r_nodes * args.r_threads > len(usable_cpus()):
        raise ValueError(f"the threads of all parts together are more than the {len(usable_cpus())} CPUs here")
    profile = uvloop.run(_profile(directory, planned, args)) if args.profile is None else read_profile(args.profile)
    if args.out:
        profile.write(args.out)
    system = System.of(profile, "shm", planned, args.kv_dtype, args.r_nodes)
    limits = SchedulerLimits(args.mini_batches, args.max_batch_tokens, args.max_batch_size)
    requests = workload.fixed(args.requests, args.input_tokens, args.output_tokens)
    # Every slot has pages for a whole sequence, and each R-node for its share and one sequence more.
    blocks = -(-length // PAGE_TOKENS)
    pages = blocks * (-(-limits.mini_batches * limits.max_seqs // args.r_nodes) + 1)
    memory = pages * PAGE_TOKENS * planned.token_bytes(args.kv_dtype)
    model, rows = load(directory, args.s_threads), []
    for schedule in args.schedule or SCHEDULES:
        real = uvloop.run(_serve(model, requests, limits, memory, schedule, args))
        options: dict[str, Any] = {"schedule": schedule, "target_tbt": None}
        virtual = simulate(requests, system, limits, memory, bounds=[args.output_tokens] * args.requests, **options)
        rows.append(_row(schedule, real, virtual))
    result = {"model": planned.name, "profile": dataclasses.asdict(profile), "rows": rows}
    print_result(args, result, lambda shown: _print_table(shown, profile))


async def _profile(directory: Path, planned: PlannedModel, args: argparse.Namespace) -> Profile:
    most = args.max_batch_size
    length = args.input_tokens + args.output_tokens // 2
    return await measure(
        directory,
        # Beside the batch, more rows: chunks of prompts are taken from where the curve rises.
        rows=sorted({1, most, max(most, 64)}),
        kv_dtypes=[args.kv_dtype],
        groups=[],
        # As much as a mini-batch reads of a layer: the last-level cache holds a part of it.
        kv_bytes=int(most * length * planned.token_bytes(args.kv_dtype)),
        transports=["shm"],
        r_nodes=[],
        seconds=args.seconds,
        s_threads=args.s_threads,
        r_threads=args.r_nodes * args.r_threads,
        # Half a mini-batch and a whole one, each sequence in the middle of its output.
        together=[
            Load(rows, length, args.kv_dtype, n) for rows in sorted({-(-most // 2), most}) for n in {1, args.r_nodes}
        ],
    )


async def _serve(
    model: Model,
    requests: list[workload.Request],
    limits: SchedulerLimits,
    memory: float,
    schedule: str,
    args: argparse.Namespace,
) -> Client:
    """Serve the requests on real parts."""
    n, loop = limits.mini_batches, asyncio.get_running_loop()
    rng = random.Random(0)
    prompts = [[rng.randrange(3, _VOCABULARY) for _ in range(request.prompt_tokens)] for request in requests]
    with ExitStack() as stack:
        urls = [
            stack.enter_context(r_node("shm", args.r_threads, int(memory) + (64 << 20))) for _ in range(args.r_nodes)
        ]
        hello = model.hello(n, limits.max_batch_tokens, args.kv_dtype, int(memory), 2 * n * limits.max_seqs)
        links = [await connect(url, dataclasses.replace(hello), None) for url in urls]
        engine = Engine(
            SPart(model, links),
            links,
            mini_batches=n,
            max_batch_size=limits.max_seqs,
            max_batch_tokens=limits.max_batch_tokens,
            max_queued=len(requests),
            schedule=schedule,
            end_token_ids=(),
        )
        await engine.start()
        try:
            client = Client(engine, len(requests))
            begun = loop.time()
            for request, prompt in zip(requests, prompts, strict=True):
                client.send(request, prompt, request.output_tokens)
            await client.all_ended.wait()
            client.seconds = loop.time() - begun
        finally:
            await engine.stop()
            for link in links:
                await link.close()
    return client


def _row(schedule: str, real: Client, virtual: Simulated) -> dict[str, Any]:
    """Tokens/s and times between tokens, in milliseconds, of both runs."""
    failed = [answer.error for answer in (*real.answers, *virtual.run.answers) if answer.error]
    if failed:
        raise RuntimeError(f"{len(failed)} answers failed: {failed[0]}")
    row: dict[str, Any] = {"schedule": schedule}
    for name, answers, seconds in (
        ("real", real.answers, real.seconds),
        ("simulated", virtual.run.answers, virtual.run.seconds),
    ):
        gaps = sorted(gap for answer in answers for gap in report.gaps(answer))
        row[name] = {
            "tokens_per_s": sum(answer.output_tokens for answer in answers) / seconds,
            "seconds": seconds,
            "tbt_p50_ms": 1e3 * gaps[len(gaps) // 2],
            "tbt_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
        }
    return row | {"error": row["simulated"]["tokens_per_s"] / row["real"]["tokens_per_s"] - 1}


def _print_table(result: dict[str, Any], profile: Profile) -> None:
    print_profile(profile)
    print(f"{'schedule':<10} {'':<10} {'tokens/s':>9} {'seconds':>8} {'TBT p50':>8} {'p99':>8}  ms")
    for row in result["rows"]:
        for name in ("real", "simulated"):
            part = row[name]
            times = f"{part['seconds']:8.1f} {part['tbt_p50_ms']:8.1f} {part['tbt_p99_ms']:8.1f}"
            print(f"{row['schedule']:<10} {name:<10} {part['tokens_per_s']:9.1f} {times}")
        print(f"{row['schedule']:<10} simulated beside real: {100 * row['error']:+.1f} %")
    if len(result["rows"]) > 1:
        first, last = result["rows"][0], result["rows"][-1]
        ratios = {name: last[name]["tokens_per_s"] / first[name]["tokens_per_s"] for name in ("real", "simulated")}
        print(
            f"{last['schedule']} beside {first['schedule']}: " + ", ".join(f"{n} {r:.3f}x" for n, r in ratios.items())
        )
