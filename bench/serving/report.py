"""Figures of a run: latencies, throughput, goodput."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from fastdecode.bench.serving.client import LoadRun, TimedAnswer

PERCENTILES = (50, 90, 95, 99, 99.9)

#: Columns of a table: heading, and where a run's summary has the value.
Figures = tuple[tuple[str, str, str], ...]

#: Columns of the table of `fastdecode-bench compare` for a trace.
FIGURES: Figures = (
    ("TTFT p50", "ttft_ms", "p50"), ("TTFT p99", "ttft_ms", "p99"), ("TBT p50", "tbt_ms", "p50"),
    ("TBT p99", "tbt_ms", "p99"), ("TBT p99.9", "tbt_ms", "p99.9"), ("tokens/s", "output_tokens_per_s", ""),
    ("good/s", "goodput_per_s", ""),
)  # fmt: skip

#: The same for closed loops.
CLOSED_FIGURES: Figures = (
    ("tokens/s", "output_tokens_per_s", ""), ("TTFT p50", "ttft_ms", "p50"), ("TPOT p50", "tpot_ms", "p50"),
)  # fmt: skip


def summary(run: LoadRun, slo_ttft: float | None, slo_tbt: float | None) -> dict[str, Any]:
    """Figures of one run; latencies in milliseconds.

    ttft: from sending a request to its first token. tbt: between one chunk and the next (also called ITL). tpot: mean
    time a token after the first. e2e: from sending to the last token. A request is good if its ttft is within
    `slo_ttft` seconds and its 99th percentile of tbt within `slo_tbt`; goodput counts the good ones a second.
    """
    good = [answer for answer in run.answers if answer.ok]
    result: dict[str, Any] = {
        "requests": len(run.answers),
        "completed": len(good),
        "failed": len(run.answers) - len(good),
        "errors": _errors(run.answers),
        "seconds": run.seconds,
        "request_per_s": len(good) / run.seconds,
        "prompt_tokens_per_s": sum(answer.request.prompt_tokens for answer in good) / run.seconds,
        "output_tokens_per_s": sum(answer.output_tokens for answer in good) / run.seconds,
        "ttft_ms": _percentiles([ttft(answer) for answer in good]),
        "tbt_ms": _percentiles([gap for answer in good for gap in gaps(answer)]),
        "tpot_ms": _percentiles([value for answer in good if (value := tpot(answer)) is not None]),
        "e2e_ms": _percentiles([answer.chunks[-1] - answer.sent for answer in good]),
    }
    if slo_ttft is not None or slo_tbt is not None:
        within = [answer for answer in good if meets(answer, slo_ttft, slo_tbt)]
        result |= {"slo_ttft_s": slo_ttft, "slo_tbt_s": slo_tbt, "goodput_per_s": len(within) / run.seconds}
    return result


def ttft(answer: TimedAnswer) -> float:
    """Seconds to the first token."""
    return answer.chunks[0] - answer.sent


def gaps(answer: TimedAnswer) -> list[float]:
    """Seconds between chunks."""
    return np.diff(answer.chunks).tolist()


def tpot(answer: TimedAnswer) -> float | None:
    """Seconds for each token after the first; None for an answer of one token."""
    if answer.output_tokens < 2:
        return None
    return (answer.chunks[-1] - answer.chunks[0]) / (answer.output_tokens - 1)


def meets(answer: TimedAnswer, slo_ttft: float | None, slo_tbt: float | None) -> bool:
    """True if an answer met its latency objectives, in seconds."""
    if slo_ttft is not None and ttft(answer) > slo_ttft:
        return False
    between = gaps(answer)
    return slo_tbt is None or not between or float(np.percentile(between, 99)) <= slo_tbt


def timeline(run: LoadRun, width: float = 1.0) -> list[dict[str, float]]:
    """Chunks a second and requests in progress, in intervals of `width` seconds."""
    times = np.array([t for answer in run.answers for t in answer.chunks])
    rows = []
    for begin in np.arange(0.0, run.seconds, width):
        end = begin + width
        under_way = sum(a.sent < end and (a.finished or run.seconds) > begin for a in run.answers)
        tokens = int(((times >= begin) & (times < end)).sum())
        rows.append({"t": float(begin), "tokens_per_s": tokens / width, "under_way": int(under_way)})
    return rows


def table(result: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [
        f"{result['completed']} of {result['requests']} requests in {result['seconds']:.1f} s: "
        f"{result['request_per_s']:.2f} requests/s, {result['prompt_tokens_per_s']:.0f} prompt tokens/s, "
        f"{result['output_tokens_per_s']:.1f} output tokens/s"
    ]
    if "goodput_per_s" in result:
        lines.append(f"goodput {result['goodput_per_s']:.2f} requests/s within the objectives")
    lines.append(f"{'ms':<6}{'mean':>10}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES))
    for name in ("ttft", "tbt", "tpot", "e2e"):
        if values := result[f"{name}_ms"]:
            cells = "".join(f"{values[f'p{p}']:>10.1f}" for p in PERCENTILES)
            lines.append(f"{name:<6}{values['mean']:>10.1f}{cells}")
    lines += [f"  {n} failed: {error}" for error, n in result["errors"].items()]
    return "\n".join(lines)


def medians(
    kept: dict[str, Any], name: str, lengths: str | None = None, figures: Figures = FIGURES
) -> dict[str, float]:
    """The medians of a configuration's runs, of closed loops with given lengths, by the table's headings; none without
    runs."""
    rows = [row for row in kept["runs"] if (row["configuration"], row.get("lengths")) == (name, lengths)]
    found = {}
    for heading, key, part in figures:
        values = [value for row in rows if (value := figure(row, key, part)) is not None]
        if values:
            found[heading] = statistics.median(values)
    return found


def figure(row: dict[str, Any], key: str, part: str) -> float | None:
    """A value of a run; None if no request was answered."""
    value = row.get(key)
    return value.get(part) if part and value is not None else value


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.array(seconds) * 1e3
    return {"mean": float(values.mean())} | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def _errors(answers: list[TimedAnswer]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for answer in answers:
        if not answer.ok:
            key = (answer.error or "no token came")[:160]
            counts[key] = counts.get(key, 0) + 1
    return counts
