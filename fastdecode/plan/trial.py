"""Serves one load on real nodes on this machine and in virtual time, and prints both.

In each pass the profile is measured, and then the engine serves requests of one length that all arrive at once, with
the S-Part in this process and R-nodes in processes of their own. The simulator serves the same requests by the medians
of all profiles, beside the medians of the real runs: within a minute the speed of a machine may wander by more than the
two differ. So that S-Part and R-Part do not take turns on the same cores, --s-threads and --r-threads divide the cores.
No HTTP is involved: the real run and the simulated one have the same RequestSender.

With --disturb the load is streams, first alone, then beside long prompts, then beside one request of many choices with
a penalty (see fastdecode/plan/stress.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.bench.serving import report, workload
from fastdecode.bench.serving.client import LoadRun
from fastdecode.bench.serving.workload import LoadRequest, Prompts
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.machine import usable_cpus
from fastdecode.engine.engine import Engine
from fastdecode.engine.scheduling.admission import SCHEDULES
from fastdecode.engine.scheduling.options import EngineOptions
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.plan.children import r_node
from fastdecode.plan.colocation_measure import ColocatedLoad
from fastdecode.plan.equations import System
from fastdecode.plan.measure import ProfileSettings, load, measure, print_profile
from fastdecode.plan.model import PlannedModel, read_model
from fastdecode.plan.profile import Profile, median, merged, read_profile
from fastdecode.plan.simulation import RequestSender, Served, simulate
from fastdecode.plan.stress import STREAM_PROMPT, disturbances, figures, table
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS, blocks_for
from fastdecode.spart import Model, SPart
from fastdecode.transports.registry import connect

COMMAND = ("trial", "tokens/s of a load on real R-nodes and S-node here, beside the simulated ones")

_TARGET = 1.0  # default of --target-tbt-ms with --disturb, as a multiple of the streams' own p99
_COSTLY_OUTPUTS = 64  # tokens of each choice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-plan trial`."""
    add = parser.add_argument
    add("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    add("--profile", metavar="FILE", help="profile of this machine with these threads; default: it is measured")
    add("--requests", type=int, default=64, metavar="N", help="requests that arrive at once; with --disturb: streams")
    add("--input-tokens", type=int, default=256, metavar="N", help=f"with --disturb: {STREAM_PROMPT}")
    add("--output-tokens", type=int, default=128, metavar="N")
    add("--schedule", action="append", choices=SCHEDULES, help="schedule (repeatable); default: both")
    add("--disturb", action="store_true", help="serve streams beside long prompts and a costly request instead")
    add("--long-prompt", type=int, default=8192, metavar="N", help="with --disturb: tokens of prompts that disturb")
    add("--choices", type=int, default=64, metavar="N", help="with --disturb: choices of the costly request")
    add("--target-tbt-ms", type=float, metavar="MS", help="as for fastdecode-node; default: none, or with --disturb "
        f"{_TARGET} times the p99 of the streams alone")  # fmt: skip
    add("--mini-batches", type=int, default=2, metavar="N")
    add("--max-batch-size", type=int, default=16, metavar="N", help="sequences of a mini-batch")
    add("--max-batch-tokens", type=int, default=512, metavar="N")
    add("--kv-dtype", choices=KV_DTYPES, default="fp16")
    add("--r-nodes", type=int, default=1, metavar="N")
    add("--s-threads", type=int, default=1, metavar="N", help="threads of the S-Part")
    add("--r-threads", type=int, default=1, metavar="N", help="threads of each R-node")
    add("--passes", type=int, default=3, metavar="N",
        help="measure the profile and serve N times; with --disturb: once")  # fmt: skip
    add("--seconds", type=float, default=20.0, help="about how long to measure the profile, in all passes")
    add("--out", type=Path, metavar="FILE", help="save the profile")


def run(args: argparse.Namespace) -> None:
    """Measure, serve, simulate and print. Raises ProfileError, ValueError, OSError, RuntimeError, TransportError."""
    directory = NodeConfig(model=args.model).model_path()
    planned = read_model(directory)
    disturbed = args.disturb
    if disturbed:
        args.input_tokens, args.passes = STREAM_PROMPT, 1
    length = args.input_tokens + args.output_tokens
    longest = max(length, args.long_prompt + _COSTLY_OUTPUTS) if disturbed else length
    if longest > planned.max_positions:
        raise ValueError(f"{longest} tokens are more than the {planned.max_positions} positions of {planned.name}")
    if args.s_threads + args.r_nodes * args.r_threads > len(usable_cpus()):
        raise ValueError(f"the threads of S-Part and R-nodes are more than the {len(usable_cpus())} CPUs here")
    if args.passes < 1:
        raise ValueError(f"--passes {args.passes}: it must be at least 1")
    given = merged([read_profile(args.profile)]) if args.profile else None
    system = partial(System.from_profile, transport="shm", model=planned, kv_dtype=args.kv_dtype, r_nodes=args.r_nodes)
    if given and "shm" not in given.links:
        raise ValueError(f"profile {args.profile} has no link over shm, which joins S-Part and R-nodes here")
    if given:
        system(given)  # a profile without the KV format is refused before anything runs
    limits = SchedulerLimits(args.mini_batches, args.max_batch_tokens, args.max_batch_size)
    # Every slot has pages for a whole sequence and half a page to spare, and each R-node for its share and one sequence
    # more; four long prompts have room besides.
    blocks = blocks_for(length)
    slots = -(-limits.mini_batches * limits.max_batch_size // args.r_nodes) + 1
    pages = blocks * slots + slots // 2 + 1
    if disturbed:
        pages += 4 * blocks_for(longest) + 2 * args.choices
    memory = pages * PAGE_TOKENS * planned.token_bytes(args.kv_dtype)
    real = RealSystem(load(directory, args.s_threads), args.kv_dtype, args.r_nodes, args.r_threads, memory)
    serve = partial(real.serve, limits=limits)
    profiles: list[Profile] = []
    served: list[dict[str, Any]] = []
    for _ in tqdm(range(args.passes), desc="passes", unit="pass"):
        profiles.append(given or uvloop.run(_profile(directory, planned, args)))
        if not disturbed:
            served.append(_burst(serve, args))
    profile = median(profiles)
    if args.out:
        profile.write(args.out)
    predict = partial(simulate, system=system(profile), limits=limits, memory=memory)
    if disturbed:
        rows = _disturbed({"real": serve, "simulated": predict}, args)
    else:
        rows = _rows(served, _burst(predict, args))
    result = {"model": planned.name, "profile": dataclasses.asdict(profile), "rows": rows}
    print_result(args, result, lambda shown: (_print_disturbed if disturbed else _print_table)(shown, profile))


def _burst(serve: Callable[..., Served], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens/s and times of requests that all arrive at once, by each schedule."""
    requests = workload.fixed(args.requests, args.input_tokens, args.output_tokens)
    options: dict[str, Any] = {"bounds": [args.output_tokens] * args.requests, "target_tbt": _seconds(args)}
    return {name: _figures(serve(requests, schedule=name, **options)) for name in args.schedule or SCHEDULES}


def _rows(served: list[dict[str, Any]], simulated: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """For each schedule, the medians of all real passes beside the simulated figures."""
    rows = []
    for schedule, predicted in simulated.items():
        passes = [one[schedule] for one in served]
        real = {name: statistics.median(one[name] for one in passes) for name in predicted}
        error = predicted["tokens_per_s"] / real["tokens_per_s"] - 1
        rows.append({"schedule": schedule, "real": real, "passes": passes, "simulated": predicted, "error": error})
    return rows


def _disturbed(serve: dict[str, Callable[..., Served]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Streams alone and beside each disturbance, on both systems; the target is the same."""
    n, schedule = args.requests, next(iter(args.schedule or SCHEDULES))
    streams = workload.fixed(n, args.input_tokens, args.output_tokens)
    rows: list[dict[str, Any]] = []
    target = _seconds(args)
    for system, run in serve.items():
        alone = run(streams, bounds=[args.output_tokens] * n, schedule=schedule, target_tbt=target)
        rows.append({"system": system} | figures("streams alone", alone, n))
        target = target or _TARGET * 1e-3 * rows[-1]["tbt_p99_ms"]
        for name, others in disturbances(alone.run.seconds, args.long_prompt, args.choices).items():
            requests = [*streams, *others]
            bounds = [request.output_tokens for request in requests]
            done = run(requests, bounds=bounds, schedule=schedule, target_tbt=target)
            rows.append({"system": system, "target_tbt_ms": 1e3 * target} | figures(name, done, n))
    return rows


def _seconds(args: argparse.Namespace) -> float | None:
    return args.target_tbt_ms / 1e3 if args.target_tbt_ms else None


async def _profile(directory: Path, planned: PlannedModel, args: argparse.Namespace) -> Profile:
    most = args.max_batch_size
    length = args.input_tokens + args.output_tokens // 2
    settings = ProfileSettings(
        # Beside the batch, more rows: chunks of prompts are taken from where the curve rises.
        rows=sorted({1, -(-most // 2), most, max(most, 64)}),
        kv_dtypes=[args.kv_dtype],
        # As much as a mini-batch reads of a layer: the last-level cache holds some of it.
        kv_bytes=int(most * length * planned.token_bytes(args.kv_dtype)),
        seconds=args.seconds / args.passes,
        s_threads=args.s_threads,
        r_threads=args.r_nodes * args.r_threads,
        # Half a mini-batch and a whole one, each sequence in the middle of its output.
        colocated_loads=[
            ColocatedLoad(rows, length, args.kv_dtype, n)
            for rows in sorted({-(-most // 2), most})
            for n in {1, args.r_nodes}
        ],
    )
    return await measure(directory, settings)


def _figures(served: Served) -> dict[str, float]:
    """Tokens/s and times between tokens, in milliseconds. Raises RuntimeError if an answer failed."""
    answers, seconds = served.run.answers, served.run.seconds
    if failed := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"{len(failed)} answers failed: {failed[0]}")
    gaps = sorted(gap for answer in answers for gap in report.gaps(answer))
    return {
        "tokens_per_s": sum(answer.output_tokens for answer in answers) / seconds,
        "seconds": seconds,
        "tbt_p50_ms": 1e3 * gaps[len(gaps) // 2],
        "tbt_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
    }


def _print_table(result: dict[str, Any], profile: Profile) -> None:
    print_profile(profile)
    print(f"{'schedule':<10} {'':<10} {'tokens/s':>9} {'seconds':>8} {'TBT p50':>8} {'p99':>8}  ms")
    for row in result["rows"]:
        for name in ("real", "simulated"):
            course = row[name]
            times = f"{course['seconds']:8.1f} {course['tbt_p50_ms']:8.1f} {course['tbt_p99_ms']:8.1f}"
            print(f"{row['schedule']:<10} {name:<10} {course['tokens_per_s']:9.1f} {times}")
        speeds = ", ".join(f"{one['tokens_per_s']:.1f}" for one in row["passes"])
        print(f"{row['schedule']:<10} real passes: {speeds} tokens/s")
        print(f"{row['schedule']:<10} simulated beside real: {100 * row['error']:+.1f} %")
    if len(result["rows"]) > 1:
        first, last = result["rows"][0], result["rows"][-1]
        ratios = {name: last[name]["tokens_per_s"] / first[name]["tokens_per_s"] for name in ("real", "simulated")}
        print(
            f"{last['schedule']} beside {first['schedule']}: " + ", ".join(f"{n} {r:.3f}x" for n, r in ratios.items())
        )


def _print_disturbed(result: dict[str, Any], profile: Profile) -> None:
    print_profile(profile)
    print(f"target of the time between tokens: {result['rows'][1]['target_tbt_ms']:.1f} ms")
    for system in ("real", "simulated"):
        print(f"{system}, ms:")
        print(table([row for row in result["rows"] if row["system"] == system]))


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
            hello = self.model.hello(n, limits.max_batch_tokens, self.kv_dtype, memory, 2 * n * limits.max_batch_size)
            links = [await connect(url, hello, None) for url in urls]
            engine = Engine(
                SPart(self.model, links, state_slots=n * limits.max_batch_size),
                links,
                EngineOptions(limits, end_token_ids=(), **options),
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
        return Served(LoadRun(sender.answers, seconds, []), engine.totals.preemptions, scheduler.recomputed_tokens)
