"""Plots of benchmark results. Needs the optional extra `plot`; imported only where a plot is asked for."""

from __future__ import annotations

from pathlib import Path

try:
    import matplotlib
except ImportError:
    raise RuntimeError("a plot needs matplotlib: pip install 'fastdecode[plot]'") from None

matplotlib.use("agg")
import matplotlib.pyplot as plt


def attention(result: dict, path: Path) -> None:
    """GB/s of every cell, ours and the peers', under the roofline it was measured with."""
    cells: dict[tuple, dict[str, dict]] = {}
    for row in result["rows"]:
        cell = (row["kv_dtype"], row["head_size"], row["context"], row["group"])
        cells.setdefault(cell, {})[row["peer"] or "fastdecode"] = row
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell))
    formats = list(dict.fromkeys(cell[0] for cell in cells))
    figure, axes = plt.subplots(
        len(formats), 1, figsize=(max(6, 0.7 * len(cells) / len(formats) + 2), 2.6 * len(formats)), squeeze=False
    )
    for axis, kv_dtype in zip(axes[:, 0], formats, strict=True):
        own = [(cell, rows) for cell, rows in cells.items() if cell[0] == kv_dtype]
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            at = [(x, rows[name]) for x, (_, rows) in enumerate(own) if name in rows]
            left = [x - 0.4 + (i + 0.5) * width for x, _ in at]
            axis.bar(left, [row["gbps"] for _, row in at], width, label=name)
        for x, (_, rows) in enumerate(own):
            roof = rows["fastdecode"]["roofline_gbps"]
            axis.plot([x - 0.45, x + 0.45], [roof, roof], color="black", label="read roofline" if x == 0 else None)
        axis.set_xticks(range(len(own)), [f"G={c[3]}\n{c[2]}\nd={c[1]}" for c, _ in own], fontsize=7)
        axis.set_ylabel(f"{kv_dtype}, GB/s of KV")
    axes[0, 0].legend(fontsize=7, ncols=len(names) + 1, loc="lower left", bbox_to_anchor=(0, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def transport(result: dict, path: Path) -> None:
    """Latency (median, and 99th percentile dotted) and throughput over the payload, ours and the peers'."""
    figure, (latency, throughput) = plt.subplots(1, 2, figsize=(11, 4.5))
    lines: dict[str, list[dict]] = {}
    for row in result["rows"]:
        name = row["peer"] or f"fastdecode {row['transport']}"
        if row["bytes_out"] == row["bytes_back"]:  # the sweep; a layer call has another shape
            lines.setdefault(name, []).append(row)
    for name, rows in lines.items():
        rows.sort(key=lambda row: row["bytes_out"])
        sizes = [max(row["bytes_out"], 64) for row in rows]  # an empty call at the left edge
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
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
