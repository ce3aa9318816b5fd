"""The options of a load: requests of a trace or of fixed lengths, their arrivals, and the objectives."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fastdecode.bench.serving import workload
from fastdecode.daemon.option_values import count


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `load_requests` reads, and --rate, --burstiness, --seed, --slo-ttft and --slo-tbt."""
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="Azure, BurstGPT (CSV) or Mooncake (JSON lines) trace, may be .gz")
    add("--requests", type=count, default=100, metavar="N", help="number of requests; of a trace, the first N")
    add("--input-tokens", type=count, metavar="N", help="prompt tokens of a request; default: the trace's, or 256")
    add("--output-tokens", type=count, metavar="N", help="output tokens of a request; default: the trace's, or 64")
    add("--scale-lengths", type=float, default=1.0, metavar="F", help="multiply the trace's lengths by F")
    add("--max-tokens", type=count, metavar="N", help="cut requests to at most N tokens, prompt and output together")
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument("--rate", type=_rates, metavar="R[,R...]", help="requests a second; several make a sweep")
    arrivals.add_argument("--speed-up", type=float, metavar="F", help="the trace's own arrivals, F times as fast")
    add("--burstiness", type=float, default=1.0,
        help="shape of the gamma-distributed gaps: 1 is Poisson, less burstier")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--slo-ttft", type=float, metavar="S", help="objective: first token within S seconds")
    add("--slo-tbt", type=float, metavar="S",
        help="objective: 99 %% of a request's gaps between chunks within S seconds")  # fmt: skip


def load_requests(args: argparse.Namespace) -> list[workload.LoadRequest]:
    """The requests at the trace's own arrivals, or all at once. Raises ValueError, OSError."""
    if args.trace is None:
        if args.speed_up is not None:
            raise ValueError("--speed-up needs a --trace")
        return workload.fixed(args.requests, args.input_tokens or 256, args.output_tokens or 64)
    requests = workload.read_trace(args.trace)[: args.requests]
    requests = workload.scaled(requests, args.scale_lengths, args.max_tokens)
    if args.input_tokens:
        requests = [replace(request, prompt_tokens=args.input_tokens, blocks=()) for request in requests]
    if args.output_tokens:
        requests = [replace(request, output_tokens=args.output_tokens) for request in requests]
    return workload.sped_up(requests, args.speed_up) if args.speed_up else requests


def _rates(text: str) -> list[float]:
    rates = [float(part) for part in text.split(",")]
    if min(rates) <= 0:
        raise ValueError("a rate is more than 0")
    return rates
