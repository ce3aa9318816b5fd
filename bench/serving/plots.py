"""Plots of serving runs: latency against request rate, and a run over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastdecode.bench.plot import plt
from fastdecode.bench.serving import report


def rates(result: dict[str, Any], path: Path) -> None:
    """TTFT and TBT (median and 99th percentile) and output tokens/s over the request rate."""
    rows = result["rows"]
    x = [row["rate"] for row in rows]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    for axis, name, label in ((axes[0], "ttft_ms", "TTFT, ms"), (axes[1], "tbt_ms", "TBT, ms")):
        for p in ("p50", "p99"):
            axis.plot(x, [row[name].get(p, float("nan")) for row in rows], marker="o", markersize=3, label=p)
        axis.set_yscale("log")
        axis.set_ylabel(label)
        axis.legend(fontsize=8)
    axes[2].plot(x, [row["output_tokens_per_s"] for row in rows], marker="o", markersize=3)
    axes[2].set_ylabel("output tokens/s")
    _finish(figure, axes, "requests/s", path)


def timeline(row: dict[str, Any], path: Path) -> None:
    """Tokens/s and requests in progress over one run, and the share of the KV-cache in use if the server reports it."""
    samples = [s for s in row["samples"] if "kv_cache_usage_perc" in s]
    figure, axes = plt.subplots(1, 3 if samples else 2, figsize=(13, 4))
    t = [point["t"] for point in row["timeline"]]
    axes[0].plot(t, [point["tokens_per_s"] for point in row["timeline"]])
    axes[0].set_ylabel("tokens/s")
    axes[1].plot(t, [point["under_way"] for point in row["timeline"]], label="under way at the client")
    if running := [s for s in row["samples"] if "num_requests_running" in s]:
        axes[1].plot([s["t"] for s in running], [s["num_requests_running"] for s in running], label="running (server)")
        axes[1].legend(fontsize=8)
    axes[1].set_ylabel("requests")
    if samples:
        axes[2].plot([s["t"] for s in samples], [100 * s["kv_cache_usage_perc"] for s in samples])
        axes[2].set_ylabel("KV-cache in use, %")
    _finish(figure, axes, "s", path)


def configurations(result: dict[str, Any], path: Path) -> None:
    """Each figure of the table of `fastdecode-bench compare`: a dot for each run, a line for the median."""
    names, models = list(result["settings"]["configurations"]), result["models"]
    shown = [column for column in report.FIGURES if column[0] != "TBT p50"]
    panels, axes = plt.subplots(len(models), len(shown), figsize=(2.4 * len(shown), 3 * len(models)), squeeze=False)
    for line, (model, kept) in zip(axes, models.items(), strict=True):
        for axis, (heading, key, part) in zip(line, shown, strict=True):
            most = 0.0
            for x, name in enumerate(names):
                rows = [row for row in kept["runs"] if row["configuration"] == name]
                values = [value for row in rows if (value := report.figure(row, key, part)) is not None]
                axis.plot([x] * len(values), values, "o", markersize=3, alpha=0.6)
                if values:
                    most = max(most, *values)
                    axis.hlines(report.medians(kept, name)[heading], x - 0.25, x + 0.25)
            axis.set_xticks(range(len(names)), names)
            axis.set_xlim(-0.5, len(names) - 0.5)
            axis.set_ylim(0, 1.05 * most or None)
            axis.set_title(f"{model}: {heading}" + (", ms" if part else ""), fontsize=8)
            axis.grid(alpha=0.3)
    panels.tight_layout()
    panels.savefig(path, dpi=150)
    plt.close(panels)


def _finish(figure: Any, axes: Any, label: str, path: Path) -> None:
    for axis in axes:
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
