"""The page of results: one HTML file that needs no other."""

from __future__ import annotations

import io
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } td, th { padding: .15rem .7rem; text-align: left }
tr:nth-child(even) { background: #f4f4f4 }
.passed { color: #17692a } .failed { color: #b00020 } .skipped { color: #666 }
"""


def html(proof: dict[str, Any]) -> str:
    note = "A simulated driver: no time and no rate below means anything." if proof["simulated"] else ""
    parts = "".join(_part(part, proof["simulated"]) for part in proof["parts"])
    head = f'<meta charset="utf-8"><title>fastdecode on a GPU</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}<h1>fastdecode on a GPU</h1><p>{note}</p>{parts}</html>\n'


def _part(part: dict[str, Any], simulated: bool) -> str:
    status, results = part["status"], part["results"]
    head = f'<h2>{escape(part["name"])}: <span class="{status}">{status}</span></h2><p>{escape(part["reason"])}</p>'
    cells = results.get("cells", [])
    facts = _table(["", ""], [[key, value] for key, value in results.items() if key != "cells"])
    names = list(dict.fromkeys(name for cell in cells for name in cell))
    rows = _table(names, [[cell.get(name, "") for name in names] for cell in cells])
    return head + facts + ("" if simulated else plot(part["name"], cells)) + rows


def _table(head: list[str], rows: list[list[Any]]) -> str:
    if not rows:
        return ""
    lines = "".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + f"</tr>{lines}</table>"


def plot(part: str, cells: list[dict[str, Any]]) -> str:
    """The cells as lines, in SVG: microseconds by rows, or tokens a second by batch. Empty without matplotlib."""
    trip = part == "round-trip"
    x, by, ending = ("rows", ["transport"], "_us") if trip else ("batch", ["model", "kv_dtype"], "_per_s")
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        for name, value in cell.items():
            if name.endswith(ending):
                label = " ".join([*(str(cell[key]) for key in by), name.removesuffix(ending)])
                lines.setdefault(label, []).append((cell[x], value))
    try:
        from fastdecode.bench.plot import plt
    except RuntimeError:
        return ""
    if not lines:
        return ""
    figure, axis = plt.subplots(figsize=(9, 5))
    for label, points in lines.items():
        axis.plot(*zip(*points, strict=True), marker="o", label=label)
    axis.set(xscale="log", xlabel=x, ylim=(0, None), ylabel="microseconds a layer" if trip else "tokens a second")
    axis.legend(fontsize=7)
    axis.grid(alpha=0.3)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]
