"""Plots of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.bench.plot import plt

if TYPE_CHECKING:
    from fastdecode.plan.configurations import Configuration, Goal


def configurations(found: Sequence[Configuration], goal: Goal, path: Path) -> None:
    """Output tokens/s and milliseconds between tokens over the number of R-nodes, a line for each KV format and number
    of mini-batches."""
    figure, (rate, tpot) = plt.subplots(1, 2, figsize=(11, 4.2))
    for kv_dtype, mini_batches in sorted({(c.kv_dtype, c.mini_batches) for c in found}):
        line = [c for c in found if (c.kv_dtype, c.mini_batches) == (kv_dtype, mini_batches)]
        line.sort(key=lambda c: c.r_nodes)
        x, label = [c.r_nodes for c in line], f"{kv_dtype}, {mini_batches} mini-batch(es)"
        rate.plot(x, [c.tokens_per_second for c in line], marker="o", markersize=3, label=label)
        tpot.plot(x, [1e3 * c.tpot for c in line], marker="o", markersize=3, label=label)
    if goal.rate:
        rate.axhline(goal.rate * goal.n_output, color="black", linestyle=":", label="wanted")
    if goal.tpot:
        tpot.axhline(1e3 * goal.tpot, color="black", linestyle=":", label="allowed")
    for axis, label in ((rate, "output tokens/s, predicted"), (tpot, "ms between tokens, predicted")):
        axis.set_xlabel("R-nodes")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    rate.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def resident(result: dict[str, Any], path: Path) -> None:
    """Tokens/s of each way to divide the KV-cache, beside the GPU alone, over the cache that users need; a panel for
    each machine."""
    rows = result["rows"]
    machines, ways = (list(dict.fromkeys(row[key] for row in rows)) for key in ("machine", "way"))
    columns = (len(machines) + 1) // 2
    figure, axes = plt.subplots(2, columns, figsize=(2.9 * columns, 5.6), squeeze=False, sharex=True, sharey=True)
    for axis, machine in zip(axes.T.flat, machines, strict=False):
        here = [row for row in rows if row["machine"] == machine]
        alone = {row["need"]: row["tokens_per_s"] for row in here if row["way"] == ways[0]}
        for way in ways:
            line = sorted((row["need"], row["tokens_per_s"] / alone[row["need"]]) for row in here if row["way"] == way)
            label = way if way == ways[0] else f"--gpu-kv {way}"
            axis.plot(*zip(*line, strict=True), marker="o", markersize=3, label=label)
        axis.set_xscale("log")
        axis.set_title(machine, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("cache needed / room on the GPU")
    for axis in axes[:, 0]:
        axis.set_ylabel("tokens/s beside GPU-only")
        axis.set_ylim(bottom=0)
    axes[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
