"""Configurations of a server, and other systems' servers, beside each other: the same load in turns.

For each model and configuration a server is started, and the servers of a model stay up together, idle but for the one
under load. The load is a trace or, with --lengths, a closed loop of requests of fixed lengths. For a trace the capacity
is measured first, with a fixed number of requests in progress. Then the trace arrives so fast that its mean rate is a
part of the first configuration's capacity, at each configuration in turn, several times. Every run has prompts of its
own, which no cache knows. Every run is kept in the file of --out as it ends, and the same command goes on with what is
missing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from fastdecode.bench.compare_servers import DEMO, PEERS, Load, servers
from fastdecode.bench.options import keep, print_result, read_kept
from fastdecode.bench.serving import client, report, workload
from fastdecode.daemon.option_values import count

COMMAND = ("compare", "configurations of a server and its peers beside each other, in turns")

_CAPACITY_PART = 0.75  # seconds of the capacity's measurement, as a multiple of a run's
_MOST_A_SECOND = 64  # requests that are prepared for a second of the capacity's measurement
_DRAIN = 2.0  # a run of a trace is given up after this multiple of its seconds
_WARM_UP = workload.LoadRequest(0.0, 16, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-bench compare`."""
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="trace, as for fastdecode-bench serve")
    add("--lengths", action="append", metavar="IN/OUT", type=_lengths, help="in place of a trace: a closed loop of "
        "requests of IN prompt and OUT output tokens (repeatable)")  # fmt: skip
    add("--requests", type=count, default=64, metavar="N", help="requests of a closed loop's run")
    add("--model", action="append", metavar="PATH", help=f"as for fastdecode-node (repeatable); {DEMO}: its demo model")
    add("--configuration", action="append", metavar="NAME=OPTIONS", type=_configuration,
        help="options of fastdecode-node (repeatable); default: both schedules, greedy=--schedule greedy and "
        "stable=--schedule stable; for a closed loop fastdecode=")  # fmt: skip
    add("--peer", action="append", choices=sorted(PEERS), default=[], help="also this system's server (repeatable)")
    add("--peer-options", default="", metavar="OPTIONS", help="options of the peers' servers")
    add("--options", default="", metavar="OPTIONS", help="further options of every node")
    add("--share", type=float, default=0.8, help="arrivals, as a part of the capacity")
    add("--concurrency", type=count, default=32, metavar="N",
        help="requests in progress in a closed loop, and while capacity is measured")  # fmt: skip
    add("--runs", type=count, default=5, metavar="N", help="runs of each configuration")
    add("--run-seconds", type=float, default=40.0, metavar="S",
        help="seconds in which a run's requests arrive, or after which a closed loop's run is cut off")  # fmt: skip
    add("--scale-lengths", type=float, default=1.0, metavar="F", help="multiply the trace's lengths by F")
    add("--max-tokens", type=count, default=1000, metavar="N",
        help="cut requests to N tokens, prompt and output together")  # fmt: skip
    add("--slo-ttft", type=float, default=5.0, metavar="S", help="objective: first token within S seconds")
    add("--slo-tbt", type=float, default=0.25, metavar="S",
        help="objective: 99 %% of a request's gaps within S seconds")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--stop-after", type=float, metavar="S", help="begin no run after S seconds; needs --out")
    add("--out", type=Path, metavar="FILE", help="keep every run in FILE, and measure only what it lacks")
    add("--plot", type=Path, metavar="FILE", help="PNG: the figures of all runs")


def _configuration(text: str) -> tuple[str, str]:
    name, found, options = text.partition("=")
    if not (name and found):
        raise ValueError(f"{text} is not NAME=OPTIONS")
    return name, options


def _lengths(text: str) -> str:
    prompt, _, output = text.partition("/")
    if min(int(prompt), int(output)) < 1:
        raise ValueError(f"{text} is not IN/OUT")
    return text


def run(args: argparse.Namespace) -> None:
    """Run and print. Raises RuntimeError, ValueError, OSError."""
    if (args.trace is None) == (args.lengths is None):
        raise ValueError("either --trace FILE or --lengths IN/OUT is needed")
    if args.plot and args.lengths:
        raise ValueError("--plot is for traces")
    if args.stop_after is not None and args.out is None:
        raise ValueError("--stop-after needs an --out, from which a later run goes on")
    result = uvloop.run(_run(args))
    print_result(args, result, print_closed_table if args.lengths else print_table)
    if args.plot and any(model["runs"] for model in result["models"].values()):
        from fastdecode.bench import plot

        plot.configurations(result, args.plot)


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    both = [("greedy", "--schedule greedy"), ("stable", "--schedule stable")]
    configurations = dict(args.configuration or ([("fastdecode", "")] if args.lengths else both))
    configurations |= dict.fromkeys(args.peer, args.peer_options)
    names = ("options", "share", "concurrency", "run_seconds", "scale_lengths", "max_tokens", "slo_ttft", "slo_tbt")
    settings = {name: getattr(args, name) for name in (*names, "seed")} | {"configurations": configurations}
    settings |= {"lengths": args.lengths, "requests": args.requests} if args.lengths else {"trace": args.trace.name}
    result = read_kept(args.out, settings) or {"settings": settings, "models": {}}
    requests: list[workload.LoadRequest] = []
    if args.trace:
        requests = workload.scaled(workload.read_trace(args.trace), args.scale_lengths, args.max_tokens)
    sizes = [sum(map(int, lengths.split("/"))) for lengths in args.lengths or []]
    load = Load(args.concurrency, max(sizes, default=args.max_tokens))
    begun = time.monotonic()
    for model in args.model or [DEMO]:
        kept = result["models"].setdefault(Path(model).name, {"capacity_per_s": {}, "runs": []})
        everything = itertools.product(range(args.runs), args.lengths or [None], configurations)
        missing = [one for one in everything if not _has(kept, *one)]
        if not missing or _late(args, begun):
            continue
        async with servers(model, args.options, configurations, load) as started:
            for name, server in started.items():
                if args.lengths:  # both to warm up, and to see that the server answers
                    await _load(args, server, [_WARM_UP] * args.concurrency, -1, concurrency=None, deadline=None)
                elif name not in kept["capacity_per_s"]:
                    kept["capacity_per_s"][name] = await _capacity(args, server, requests)
                    keep(args.out, result)
            for n, lengths, name in missing:
                if _late(args, begun):
                    break
                size = f", {lengths} tokens" if lengths else ""
                print(f"{Path(model).name}, run {n + 1} of {args.runs}{size}, {name}", file=sys.stderr)
                if lengths:
                    row = {"lengths": lengths} | await _closed_loop(args, started[name], lengths, n)
                else:
                    rate = args.share * next(iter(kept["capacity_per_s"].values()))
                    row = await _one_run(args, started[name], requests, rate, n)
                kept["runs"].append({"run": n, "configuration": name} | row)
                keep(args.out, result)
    return result


def _has(kept: dict[str, Any], n: int, lengths: str | None, name: str) -> bool:
    return any((row["run"], row.get("lengths"), row["configuration"]) == (n, lengths, name) for row in kept["runs"])


def _late(args: argparse.Namespace, begun: float) -> bool:
    return args.stop_after is not None and time.monotonic() - begun > args.stop_after


async def _load(
    args: argparse.Namespace, server: client.Target, requests: list[workload.LoadRequest], number: int, **limits: Any
) -> client.LoadRun:
    """Send requests whose prompts depend on `number`, so that no cache knows them from a run of another number."""
    prompts = workload.Prompts(3, 1000, args.seed + number, args.scale_lengths)
    return await client.run(server, requests, prompts, timeout=600.0, progress=sys.stderr.isatty(), **limits)


async def _capacity(args: argparse.Namespace, server: client.Target, requests: list[workload.LoadRequest]) -> float:
    """Requests a second with `concurrency` of the trace in progress all the time.

    The rate is that of the work done, by the tokens of answers, from the time when the first answer has ended: until
    then only prompts are computed.
    """
    seconds = _CAPACITY_PART * args.run_seconds
    undelayed = [workload.LoadRequest(0.0, r.prompt_tokens, r.output_tokens) for r in requests]
    some = undelayed[: _MOST_A_SECOND * int(seconds + 1)]
    done = await _load(args, server, some, args.runs, concurrency=args.concurrency, deadline=seconds)
    ended = sorted(answer.chunks[-1] for answer in done.answers if answer.ok and answer.finished)
    if not ended:
        raise RuntimeError(f"no request was answered in {seconds:.0f} s; try smaller requests")
    tokens = sum(chunk > ended[0] for answer in done.answers for chunk in answer.chunks)
    mean = statistics.fmean(answer.request.output_tokens for answer in done.answers)
    return tokens / mean / max(done.seconds - ended[0], 1e-3)


async def _one_run(
    args: argparse.Namespace, server: client.Target, requests: list[workload.LoadRequest], rate: float, number: int
) -> dict[str, Any]:
    """The figures of one run: as many requests of the trace as arrive in the seconds of a run."""
    some = requests[: max(2, round(rate * args.run_seconds))]
    speed_up = some[-1].arrival / args.run_seconds
    some = workload.sped_up(some, max(speed_up, 1e-9))
    done = await _load(args, server, some, number, concurrency=None, deadline=_DRAIN * args.run_seconds)
    row = report.summary(done, args.slo_ttft, args.slo_tbt)
    return {"speed_up": speed_up, "rate_per_s": len(some) / args.run_seconds} | row


async def _closed_loop(args: argparse.Namespace, server: client.Target, lengths: str, number: int) -> dict[str, Any]:
    """The figures of one run with `concurrency` requests in progress all the time; a run that is cut off keeps the
    tokens that have come."""
    some = workload.fixed(args.requests, *map(int, lengths.split("/")))
    number = number * len(args.lengths) + args.lengths.index(lengths)  # prompts of other lengths begin otherwise
    done = await _load(args, server, some, number, concurrency=args.concurrency, deadline=args.run_seconds)
    tokens = sum(answer.output_tokens or len(answer.chunks) for answer in done.answers)
    late = len(done.answers) < len(some) or any(answer.finished is None for answer in done.answers)
    row = report.summary(done, None, None) | {"output_tokens_per_s": tokens / done.seconds}
    return row | {"cut_off": late or done.seconds >= args.run_seconds}


def print_table(result: dict[str, Any]) -> None:
    """Print the medians of each model's runs, and each configuration beside the first one."""
    names = list(result["settings"]["configurations"])
    for model, kept in result["models"].items():
        capacity = kept["capacity_per_s"]
        if not kept["runs"]:
            print(f"{model}: no run yet")
            continue
        one = kept["runs"][0]
        rates = ", ".join(f"{rate:.2f} ({name})" for name, rate in capacity.items())
        print(
            f"{model}: capacity {rates} requests/s, runs of {one['requests']} requests at "
            f"{one['rate_per_s']:.2f}/s (the trace {one['speed_up']:.2f} times as fast); medians, ms"
        )
        print(f"{'':<14}{'runs':>5}{'failed':>7}" + "".join(f"{heading:>11}" for heading, _, _ in report.FIGURES))
        for name in names:
            rows = [row for row in kept["runs"] if row["configuration"] == name]
            values = report.medians(kept, name)
            cells = "".join(f"{values.get(heading, float('nan')):>11.2f}" for heading, _, _ in report.FIGURES)
            print(f"{name:<14}{len(rows):>5}{sum(row['failed'] for row in rows):>7}{cells}")
        first = report.medians(kept, names[0])
        for name in names[1:]:
            values = report.medians(kept, name)
            ratios = [
                f"{values[h] / first[h]:>10.2f}x" if h in values and first.get(h) else f"{'':>11}"
                for h, _, _ in report.FIGURES
            ]
            print(f"{name} beside {names[0]:<14}"[:26].ljust(26) + "".join(ratios))


def print_closed_table(result: dict[str, Any]) -> None:
    """Print the medians of each model's closed loops, and the first configuration beside each other one."""
    settings, figures = result["settings"], report.CLOSED_FIGURES
    names = list(settings["configurations"])
    headings = "".join(f"{heading:>12}" for heading, _, _ in figures)
    for model, kept in result["models"].items():
        print(f"{model}: {settings['concurrency']} requests in progress, {settings['requests']} in a run; medians, ms")
        print(f"{'in/out':<12}{'':<24}{'runs':>5}{'failed':>7}{'cut off':>8}{headings}")
        for lengths in settings["lengths"]:
            found = {name: report.medians(kept, name, lengths, figures) for name in names}
            for name, values in found.items():
                rows = [row for row in kept["runs"] if (row["configuration"], row["lengths"]) == (name, lengths)]
                failed, cut_off = (sum(row[key] for row in rows) for key in ("failed", "cut_off"))
                cells = "".join(f"{values.get(heading, float('nan')):>12.1f}" for heading, _, _ in figures)
                print(f"{lengths:<12}{name:<24}{len(rows):>5}{failed:>7}{cut_off:>8}{cells}")
            first = found[names[0]]
            for name in names[1:]:
                values = found[name]
                ratios = [f"{first[h] / values[h]:.2f}x" if h in first and values.get(h) else "" for h, _, _ in figures]
                print(f"{lengths:<12}{f'{names[0]} / {name}':<44}" + "".join(f"{ratio:>12}" for ratio in ratios))
