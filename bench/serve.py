"""An open-loop load on a running OpenAI-compatible server, such as fastdecode, vLLM or llama.cpp.

Requests come from a trace (Azure's, BurstGPT's or Mooncake's form) or have fixed lengths. They arrive as in the trace,
at a rate or at a sweep of rates (Poisson or gamma), or all at once with a limit on how many are under way.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import orjson
import uvloop

from fastdecode.bench.options import keep
from fastdecode.bench.serving import client, report, workload
from fastdecode.bench.serving.options import add_load_arguments, load_requests
from fastdecode.daemon.option_values import count

COMMAND = ("serve", "latency and throughput of a running OpenAI-compatible server under load")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-bench serve`."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="the server, up to and with /v1")
    add("--model", metavar="NAME", help="model to ask for; default: the first that the server lists")
    add("--api-key-file", type=Path, metavar="FILE", help="file with the key to present")
    add_load_arguments(parser)
    add("--concurrency", type=count, metavar="N",
        help="at most N requests under way (closed loop); default: no limit")  # fmt: skip
    add("--token-ids", type=_range, default=(3, 1000), metavar="A-B", help="ids that prompts are drawn from (3-1000)")
    add("--timeout", type=float, default=600.0, metavar="S", help="give a request up after S seconds")
    add("--deadline", type=float, metavar="S", help="end a run after S seconds and keep what came")
    add("--extra", type=_object, default={}, metavar="JSON", help="further fields of every request's body")
    add("--out", type=Path, metavar="FILE", help="write the JSON object after every run, so that partial results stay")
    add("--plot", type=Path, metavar="FILE", help="PNG: latency against rate for a sweep, else the run over time")


def run(args: argparse.Namespace) -> None:
    """Run the load and print its figures. Raises RuntimeError, ValueError, OSError."""
    result = uvloop.run(_run(args))
    if args.json:
        print(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode())
    if args.plot:
        from fastdecode.bench import plot

        if len(result["rows"]) > 1:
            plot.rates(result, args.plot)
        else:
            plot.timeline(result["rows"][0], args.plot)


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    base = load_requests(args)
    key = args.api_key_file.read_text().strip() if args.api_key_file else None
    url = args.url.rstrip("/")
    server = client.Target(url, args.model or await client.first_model(url, key), key, args.extra)
    first_id, last_id = args.token_ids
    prompts = workload.Prompts(first_id, last_id, args.seed, args.scale_lengths)
    rows: list[dict[str, Any]] = []
    result = {"url": url, "model": server.model, "trace": args.trace and args.trace.name, "rows": rows}
    for rate in args.rate or [None]:
        requests = base if rate is None else workload.at_rate(base, rate, args.burstiness, args.seed)
        done = await client.run(
            server,
            requests,
            prompts,
            concurrency=args.concurrency,
            timeout=args.timeout,
            deadline=args.deadline,
            progress=sys.stderr.isatty(),
        )
        row = {"rate": rate} | report.summary(done, args.slo_ttft, args.slo_tbt)
        row |= {"timeline": report.timeline(done), "samples": done.samples}
        rows.append(row)
        if not args.json:
            print(("" if rate is None else f"rate {rate:g}: ") + report.table(row), flush=True)
        keep(args.out, result)
        await asyncio.sleep(0)
    return result


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not 0 <= int(first) <= int(last):
        raise ValueError(f"{text} is not a range such as 3-1000")
    return int(first), int(last)


def _object(text: str) -> dict[str, Any]:
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise ValueError("--extra is a JSON object")
    return value
