"""Plots of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
