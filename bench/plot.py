"""Plots of benchmark results. This module needs the optional extra `plot`, so it is imported only for a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    raise RuntimeError("a plot needs matplotlib: pip install 'fastdecode[plot]'") from None

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist

from fastdecode.bench.serving import report

#: The planner and the proof on a GPU take `plt` from here, with the backend set.
__all__ = ["attention", "configurations", "decode", "plt", "rates", "timeline", "transport"]

#: Marker and colour of each peer in the attention plot, the same in every panel.
_MARKERS = {"torch": ("v", "black"), "ggml": ("s", "tab:green"), "openvino": ("^", "tab:purple")}
_MARKERS |= {"vllm": ("o", "tab:orange")}


def attention(result: dict[str, Any], path: Path) -> None:
    """Plot GB/s of KV and the roofline of every cell of the sweep, with one panel for each format and head size.

    Bars are the R-engine's, with their share of the roofline below. Black lines are rooflines, markers are peers (GB/s
    of KV in their own formats), diamonds are the R-engine with its KV in the L2 of one thread. The scale is
    logarithmic.
    """
    sweep = [row for row in result["rows"] if row["part"] == "sweep"]
    rows = sweep or result["rows"]
    in_l2 = {_shape(row): row["gbps"] for row in result["rows"] if row["part"] == "in-cache" and sweep}
    # {(format, head size): {(group, context): {peer, or None for the R-engine: row}}}
    panels: dict[tuple[str, int], dict[tuple[int, int], dict[str | None, dict[str, Any]]]] = {}
    for row in rows:
        cells = panels.setdefault((row["kv_dtype"], row["head_size"]), {})
        cells.setdefault((row["group"], row["context"]), {})[row["peer"]] = row
    formats, sizes = (list(dict.fromkeys(panel[i] for panel in panels)) for i in (0, 1))
    widest = max(len(cells) for cells in panels.values())
    size = (max(6.5, (0.55 * widest + 0.9) * len(sizes)), 2.4 * len(formats) + 0.9)
    figure, axes = plt.subplots(len(formats), len(sizes), figsize=size, squeeze=False, sharey=True)
    for (kv_dtype, head_size), cells in panels.items():
        axis = axes[formats.index(kv_dtype), sizes.index(head_size)]
        for x, (cell, by_peer) in enumerate(sorted(cells.items())):
            own = by_peer[None]
            axis.bar(x, own["gbps"], 0.62, color="tab:blue", label="fastdecode")
            roof = own["roofline_gbps"]
            axis.plot([x - 0.45, x + 0.45], [roof, roof], color="black", lw=1.5, label="read roofline")
            for name, row in by_peer.items():
                if name is not None:
                    marker, color = _MARKERS[name]
                    style = {"marker": marker, "color": color, "ls": "", "ms": 5, "mec": "white", "mew": 0.6}
                    axis.plot(x, row["gbps"], **style, label=name)
            if gbps := in_l2.get((kv_dtype, head_size, cell[0])):
                style = {"marker": "D", "color": "tab:red", "ls": "", "ms": 4, "mfc": "none"}
                axis.plot(x, gbps, **style, label="fastdecode in L2, 1 thread")
        labels = [f"{c}\nG={g}\n{by_peer[None]['roofline_pct']:.0f}%" for (g, c), by_peer in sorted(cells.items())]
        axis.set_xticks(range(len(cells)), labels, fontsize=7)
        axis.set_yscale("log")
        axis.grid(axis="y", which="both", alpha=0.25)
        axis.set_axisbelow(True)
        axis.set_title(f"{kv_dtype}, head size {head_size}", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("GB/s of KV", fontsize=8)
    named: dict[str, Artist] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    title = f"Decode attention, {result['threads']} thread(s): context, group, % of the read roofline"
    figure.suptitle(title, fontsize=10)
    figure.legend(list(named.values()), list(named), fontsize=8, ncols=3, loc="lower center")
    _save(figure, path, rect=(0, 0.65 / size[1], 1, 1))


def decode(result: dict[str, Any], path: Path) -> None:
    """Plot heat maps of a decode sweep: tokens/s beside the best peer's, over batch and context.

    Each KV format has a panel. A cell without a peer is grey. The scale is logarithmic, from half to twice.
    """
    rows = [row for row in result["rows"] if "tokens_per_s" in row]
    formats, batches, contexts = (sorted({row[name] for row in rows}) for name in ("kv_dtype", "batch", "context"))
    size = (max(5.0, (0.9 * len(contexts) + 1.0) * len(formats)), 0.7 * len(batches) + 1.8)
    figure, axes = plt.subplots(1, len(formats), figsize=size, squeeze=False, sharey=True)
    for axis, kv_dtype in zip(axes[0], formats, strict=True):
        values = np.full((len(batches), len(contexts)), np.nan)
        for row in rows:
            if row["kv_dtype"] == kv_dtype and row["best_ratio"] is not None:
                y, x = batches.index(row["batch"]), contexts.index(row["context"])
                values[y, x] = row["best_ratio"]
                axis.text(x, y, f"{row['best_ratio']:.2f}x", ha="center", va="center", fontsize=8)
        axis.set_facecolor("lightgrey")
        axis.imshow(np.log2(values), cmap="RdYlGn", vmin=-1, vmax=1, aspect="auto", alpha=0.6)
        axis.set_xticks(range(len(contexts)), [str(context) for context in contexts], fontsize=8)
        axis.set_yticks(range(len(batches)), [str(batch) for batch in batches], fontsize=8)
        axis.set_title(kv_dtype, fontsize=9)
        axis.set_xlabel("context", fontsize=8)
    axes[0, 0].set_ylabel("batch", fontsize=8)
    figure.suptitle(f"{result['model']}: tokens/s beside the best peer's", fontsize=10)
    _save(figure, path)


def _shape(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["kv_dtype"], row["head_size"], row["group"]


def transport(result: dict[str, Any], path: Path) -> None:
    """Plot latency (median, and 99th percentile dotted) and throughput over the payload, of the links and the peers."""
    figure, (latency, throughput) = plt.subplots(1, 2, figsize=(11, 4.5))
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        name = row["peer"] or f"fastdecode {row['transport']}"
        if row["bytes_out"] == row["bytes_back"]:  # only the sweep over payloads; a layer call has another shape
            lines.setdefault(name, []).append(row)
    for name, rows in lines.items():
        rows.sort(key=lambda row: row["bytes_out"])
        sizes = [max(row["bytes_out"], 64) for row in rows]  # an empty call stands at the left edge
        (line,) = latency.plot(sizes, [row["p50_us"] for row in rows], marker="o", markersize=3, label=name)
        latency.plot(sizes, [row["p99_us"] for row in rows], linestyle=":", color=line.get_color())
        full = [row for row in rows if row["bytes_out"]]
        throughput.plot([r["bytes_out"] for r in full], [r["gbps"] for r in full], marker="o", markersize=3, label=name)
    for axis, label in ((latency, "round trip, us (99th percentile dotted)"), (throughput, "GB/s, both ways")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("bytes each way")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    latency.legend(fontsize=8)
    _save(figure, path)


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
    _label(axes, "requests/s")
    _save(figure, path)


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
    _label(axes, "s")
    _save(figure, path)


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
    _save(panels, path)


def _label(axes: Any, label: str) -> None:
    for axis in axes:
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)


def _save(figure: Any, path: Path, **layout: Any) -> None:
    figure.tight_layout(**layout)
    figure.savefig(path, dpi=150)
    plt.close(figure)
