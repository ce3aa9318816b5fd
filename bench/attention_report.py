"""Summary of the attention benchmark's rows, and how it is printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

_PARTS = {
    "sweep": "KV in memory, {threads} thread(s)",
    "one-thread": "KV in memory, one thread alone",
    "in-cache": "KV in L2, one thread (roofline: the same bytes only read)",
}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each cell of the sweep: its share of the roofline, compared with peers, other contexts and fp16.

    `best_peer_ratio` is the R-engine's rate over that of the best peer, in sequences x layers a second, of the same
    rounds. `fp16_ratio` is its rate over that of fp16; because fp16 was measured in other rounds, each rate is divided
    by its own roofline. `points_from_4096` is the share of the roofline in percent, minus that at context 4096.
    `l2_gbps` is the figure of one thread with its KV in L2. `one_thread_pct` is one thread's share of the roofline that
    one thread can read. `dense_ratio` is the rate of attention to selected tokens over that to all tokens, in the same
    rounds. A value that was not measured is None.
    """
    own = {_cell(row): row for row in rows if row["part"] == "sweep" and row["peer"] is None}
    in_l2 = {_shape(row): row["gbps"] for row in rows if row["part"] == "in-cache"}
    alone = {(*_shape(row), row["context"]): row["roofline_pct"] for row in rows if row["part"] == "one-thread"}
    result = []
    for cell, row in own.items():
        kv_dtype, heads, _, group = cell
        peers = {r["peer"]: r["ours_to_peer"] for r in rows if r["peer"] and _cell(r) == cell}
        best = min(peers, key=peers.__getitem__, default=None)
        fp16, middle = own.get(("fp16", *cell[1:])), own.get((kv_dtype, heads, 4096, group))
        dense = own.get(_cell(row | {"index_heads": 0})) if row["index_heads"] else None
        result.append(
            {
                **{name: row[name] for name in ("kv_dtype", "head_size", "v_size", "v_in_k", "context", "group")},
                **{name: row[name] for name in ("index_heads", "index_topk")},
                **{name: row[name] for name in ("gbps", "roofline_gbps", "roofline_pct", "judged_rounds")},
                "points_from_4096": row["roofline_pct"] - middle["roofline_pct"] if middle else None,
                "fp16_ratio": _per_roofline(row) / _per_roofline(fp16) if fp16 else None,
                "best_peer": best,
                "best_peer_ratio": peers[best] if best else None,
                "l2_gbps": in_l2.get(_shape(row)),
                "dense_ratio": row["seq_layers_per_s"] / dense["seq_layers_per_s"] if dense else None,
                "one_thread_pct": alone.get((*_shape(row), row["context"])),
            }
        )
    return result


def _per_roofline(row: dict[str, Any]) -> float:
    return float(row["seq_layers_per_s"] / row["roofline_gbps"])


def _heads(row: dict[str, Any]) -> str:
    """The sizes of a K head and a V head, and the heads of an indexer."""
    if row["v_in_k"]:
        return f"{row['head_size']}({row['v_size']})" + (f" i{row['index_heads']}" if row["index_heads"] else "")
    return f"{row['head_size']}" if row["head_size"] == row["v_size"] else f"{row['head_size']}+{row['v_size']}"


def _shape(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["kv_dtype"], _heads(row), row["group"]


def _cell(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return row["kv_dtype"], _heads(row), row["context"], row["group"]


def print_report(result: dict[str, Any]) -> None:
    rounds, below = result["rounds"], result["judge_below"]
    print(f"decode attention; medians of the rounds (of {rounds}) with a roofline below {below:g} GB/s, if any")
    for part, title in _PARTS.items():
        if rows := [row for row in result["rows"] if row["part"] == part]:
            print("\n" + title.format(**result))
            for line in _table(rows):
                print(line)
            variants = dict.fromkeys(row["roofline_variant"] for row in rows)
            print(f"roofline read with {'; '.join(variants)}")
    if any(row["part"] == "sweep" for row in result["rows"]):
        _print_summary(result["summary"])
    if result["peers_absent"]:
        print(f"\nnot installed: {', '.join(result['peers_absent'])}")


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        f"{'KV':<11}{'G':>3}{'context':>9}{'d':>13}  {'run':<14}{'GB/s':>8}{'roofline':>10}{'%':>7}{'seq layers/s':>14}"
        f"{'rounds':>8}"
    )
    for row in rows:
        run = f"{row['peer']} {row['format']}" if row["peer"] else row["isa"]
        note = f"  ours {row['ours_to_peer']:.2f}x" if row["peer"] else ""
        yield (
            f"{row['kv_dtype']:<11}{row['group']:>3}{row['context']:>9}{_heads(row):>13}  {run:<14}"
            f"{row['gbps']:>8.1f}{row['roofline_gbps']:>10.1f}{row['roofline_pct']:>7.1f}"
            f"{row['seq_layers_per_s']:>14.1f}{row['judged_rounds']:>8}{note}"
        )


def _print_summary(rows: list[dict[str, Any]]) -> None:
    print(
        "\nR-engine: % of the roofline, points from context 4096, rate over fp16's, over that of attention to all "
        "tokens, over the best peer's; L2; 1 thread"
    )
    print(
        f"{'KV':<11}{'G':>3}{'context':>9}{'d':>13}{'%':>8}{'points':>8}{'/ fp16':>8}{'/ dense':>8}"
        f"{'/ peer':>8}  {'':<10}{'L2 GB/s':>8}{'1 thread %':>12}"
    )

    def number(x: float | None, form: str) -> str:
        return "" if x is None else format(x, form)

    for row in rows:
        print(
            f"{row['kv_dtype']:<11}{row['group']:>3}{row['context']:>9}{_heads(row):>13}{row['roofline_pct']:>8.1f}"
            f"{number(row['points_from_4096'], '+.1f'):>8}{number(row['fp16_ratio'], '.2f'):>8}"
            f"{number(row['dense_ratio'], '.2f'):>8}"
            f"{number(row['best_peer_ratio'], '.2f'):>8}  {row['best_peer'] or '':<10}"
            f"{number(row['l2_gbps'], '.1f'):>8}{number(row['one_thread_pct'], '.1f'):>12}"
        )
    for kv_dtype in dict.fromkeys(row["kv_dtype"] for row in rows):
        pct = [row["roofline_pct"] for row in rows if row["kv_dtype"] == kv_dtype]
        ratios = [row["best_peer_ratio"] for row in rows if row["kv_dtype"] == kv_dtype and row["best_peer"]]
        peers = f"; over the best peer {min(ratios):.2f}-{max(ratios):.2f}x" if ratios else ""
        print(
            f"{kv_dtype}: {min(pct):.0f}-{max(pct):.0f} % of the roofline, median {statistics.median(pct):.0f} %{peers}"
        )
