"""What a disturbance does to streams in progress, in virtual time: long prompts, one costly request, overload.

The engine and the scheduler are the server's own, as in `fastdecode-plan simulate`. Of every answer that was not
refused the time between tokens (TBT) counts; each figure is set beside the same load without the disturbance. What a
request costs the S-Part in sampling (penalties) is not simulated; `fastdecode-plan trial --disturb` serves streams and
their disturbances on real nodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fastdecode.bench.options import print_result
from fastdecode.bench.serving import report
from fastdecode.bench.serving.workload import MOONCAKE_BLOCK, LoadRequest, at_rate, fixed
from fastdecode.engine.scheduling.admission import SCHEDULES
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.plan.options import PlannedSystem, add_step_arguments, add_system_arguments
from fastdecode.plan.simulation import Served, simulate

STREAM_PROMPT = 32  # tokens

COMMAND = ("stress", "streams beside long prompts, a costly request, and overload, in virtual time (simulated)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-plan stress`."""
    add = parser.add_argument
    add_system_arguments(parser)
    add_step_arguments(parser)
    add("--schedule", choices=SCHEDULES, default="greedy")
    add("--max-batch-size", type=int, default=64, metavar="N")
    add("--streams", type=int, default=16, metavar="N", help="streams in progress beside prompts and costly requests")
    add("--long-prompt", type=int, default=8192, metavar="N", help="tokens of long prompts, cut to the model's context")
    add("--choices", type=int, default=64, metavar="N", help="choices of the costly request")
    add("--overload", type=float, default=10.0, metavar="X", help="arrivals, as a multiple of the capacity")
    add("--minutes", type=float, default=5.0, metavar="M", help="how long the overload lasts")
    add("--max-queued", type=int, default=8, metavar="N", help="requests that may wait while the server is overloaded")


def run(args: argparse.Namespace) -> None:
    """Simulate and print. Raises ProfileError, CheckpointError, ValueError, OSError, RuntimeError."""
    planned = PlannedSystem.from_args(args)
    profile, system, model = planned.profile, planned.system, planned.system.model
    limits = SchedulerLimits(1 if profile.in_turns else 2, args.max_batch_tokens, args.max_batch_size)
    options: dict[str, Any] = {"schedule": args.schedule, "target_tbt": args.target_tbt_ms / 1e3 or None}
    stress = Stress(partial(simulate, system=system, limits=limits, memory=planned.memory, **options), limits)
    prompt = min(args.long_prompt, model.max_positions - 128)
    rows = [
        *stress.beside(args.streams, prompt, args.choices),
        *stress.overload(args.overload, 60 * args.minutes, args.max_queued),
    ]
    print_result(args, {"model": model.name, "profile": profile.name, "source": profile.source, "rows": rows}, _print)


def disturbances(alone_seconds: float, prompt: int, choices: int) -> dict[str, list[LoadRequest]]:
    """By name: a prompt of `prompt` tokens every 2 s for `alone_seconds`, and one request of such a prompt and
    `choices` choices, whose sequences share the prompt."""
    every = [LoadRequest(2.0 * i, prompt, 8) for i in range(1, 1 + max(1, int(alone_seconds / 2)))]
    costly = [LoadRequest(2.0, prompt, 64, tuple(range(-(-prompt // MOONCAKE_BLOCK))), choices)]
    return {
        f"a prompt of {prompt} tokens every 2 s": every,
        f"one request of {prompt} tokens with {choices} choices": costly,
    }


@dataclass(frozen=True, slots=True)
class Stress:
    """A system under a load and its disturbances."""

    simulate: Callable[..., Served]  # requests of given bounds; further options go to the Engine
    limits: SchedulerLimits

    def _serve(self, requests: list[LoadRequest], max_tokens: int, **options: Any) -> Served:
        return self.simulate(requests, bounds=[max_tokens] * len(requests), **options)

    def beside(self, n_streams: int, prompt: int, choices: int, outputs: int = 1000) -> list[dict[str, Any]]:
        """`n_streams` streams of `outputs` tokens: alone, and beside each of the `disturbances`."""
        streams = fixed(n_streams, STREAM_PROMPT, outputs)
        alone = self._serve(streams, outputs)
        rows = [figures("streams alone", alone, n_streams) | {"disturbing": 0}]
        for name, disturbance in disturbances(alone.run.seconds, prompt, choices).items():
            done = self._serve([*streams, *disturbance], outputs)
            rows.append(figures(name, done, n_streams) | {"disturbing": len(disturbance)})
        return rows

    def overload(self, times: float, seconds: float, max_queued: int) -> list[dict[str, Any]]:
        """Requests of 128 prompt tokens and 128 outputs at the system's capacity, and at `times` as many."""
        burst = self._serve(fixed(4 * self.limits.mini_batches * self.limits.max_batch_size, 128, 128), 128)
        capacity = len(burst.run.answers) / burst.run.seconds
        rows = []
        for name, rate in (("at capacity", capacity), (f"{times:g} times the capacity", times * capacity)):
            n = max(1, round(rate * seconds))
            done = self._serve(at_rate(fixed(n, 128, 128), rate, 1.0, 0), 128, max_queued=max_queued)
            rows.append(figures(name, done, n) | {"rate": rate})
        return rows


def figures(name: str, done: Served, n: int) -> dict[str, Any]:
    """Figures of the first `n` answers of a run; times in milliseconds. `others_ttft_p50_ms` is of the answers behind
    them, None if there are none."""
    answers = done.run.answers[:n]
    others = [report.ttft(answer) for answer in done.run.answers[n:] if answer.ok]
    taken = [answer for answer in answers if answer.ok]
    refused = sum((answer.error or "").startswith("Overloaded") for answer in answers)
    gaps = [gap for answer in taken for gap in report.gaps(answer)]
    generated = sum(answer.output_tokens for answer in done.run.answers)
    return {
        "load": name,
        "tbt_p50_ms": 1e3 * float(np.percentile(gaps, 50)),
        "tbt_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
        "tbt_max_ms": 1e3 * max(gaps),
        "ttft_p99_ms": 1e3 * float(np.percentile([report.ttft(answer) for answer in taken], 99)),
        "others_ttft_p50_ms": 1e3 * float(np.median(others)) if others else None,
        "taken": len(taken),
        "refused": refused,
        "failed": len(answers) - len(taken) - refused,
        "recomputed_share": done.recomputed_tokens / generated,
    }


def _print(result: dict[str, Any]) -> None:
    print(f"{result['model']} on {result['profile']} ({result['source']}); virtual times, ms:")
    print(table(result["rows"]))


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a table; each p99 stands beside that of the last row without a disturbance."""
    times = f"{'TBT p50':>8} {'p99':>8} {'longest':>8} {'TTFT p99':>9} {'of others':>10}"
    header = f"{times} {'taken':>6} {'refused':>7} {'failed':>6}"
    lines = [f"{'load':<46} {header} recomputed"]
    base = rows[0]
    for row in rows:
        if row["load"] in ("streams alone", "at capacity"):
            base = row
        others = "" if row["others_ttft_p50_ms"] is None else f"{row['others_ttft_p50_ms']:.0f}"
        lines.append(
            f"{row['load']:<46} {row['tbt_p50_ms']:8.1f} {row['tbt_p99_ms']:8.1f} {row['tbt_max_ms']:8.1f} "
            f"{row['ttft_p99_ms']:9.1f} {others:>10} {row['taken']:6d} {row['refused']:7d} "
            f"{row['failed']:6d} {row['recomputed_share']:10.1%}  p99 {row['tbt_p99_ms'] / base['tbt_p99_ms']:.2f}x"
        )
    return "\n".join(lines)
