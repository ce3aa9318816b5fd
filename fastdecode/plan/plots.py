"""Plots of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.bench.plot import plt

if TYPE_CHECKING:
    from fastdecode.plan.choices import Choice, Goal


def choices(found: Sequence[Choice], goal: Goal, path: Path) -> None:
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


def rotation(result: dict[str, Any], path: Path) -> None:
    """Tokens/s for each S-node, and the idle shares of S-nodes and R-nodes, over the number of S-nodes."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2))
    # label: mini-batches for each S-node, and how many more
    lines = {"one mini-batch an S-node": (1, 0), "rotating": (1, 1), "two mini-batches an S-node": (2, 0)}
    for label, (each, more) in lines.items():
        line = [row for row in result["rows"] if row["mini_batches"] == each * row["s_nodes"] + more]
        rates = [row["tokens_per_second"] / row["s_nodes"] for row in line]
        for axis, y in zip(axes, (rates, *([row[name] for row in line] for name in ("s_idle", "r_idle"))), strict=True):
            axis.plot([row["s_nodes"] for row in line], y, marker="o", markersize=3, label=label)
    titles = ("output tokens/s for each S-node, simulated", "idle share of the S-nodes", "idle share of the R-nodes")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_xlabel("S-nodes")
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
