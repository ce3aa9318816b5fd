"""Rows and tables of the decode benchmark: ratios to the peers, the goals, and the parts of a step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fastdecode.bench.contenders import PeerRun, SplitSystem
from fastdecode.bench.decode_cell import Measured
from fastdecode.bench.load import Cell
from fastdecode.bench.peers import DENSE
from fastdecode.daemon.option_values import format_bytes

#: Goals: tokens/s beside the best peer's, and where a step reads more bytes of KV-cache than of weights. There int8 has
#: a further goal, beside the best peer whose cache has 16 bits or more.
GOAL, KV_GOAL, INT8_GOAL = 1.0, 1.5, 2.0


def row_of(
    cell: Cell,
    split: SplitSystem,
    measured: Measured,
    peers: Sequence[tuple[PeerRun, Measured]],
    others: Sequence[tuple[PeerRun, Measured]],
    *,
    in_turns: bool,
    weight_bytes: int,
    read_bytes: int | None = None,
    roofline: float | None = None,
) -> dict[str, Any]:
    """The figures of one KV format in a cell. `peers` have the nearest formats, `others` are all of the cell's.
    `in_turns`: the S-Part and the R-Part share their cores. `read_bytes`: of weights that a mini-batch's step reads,
    None: that depends on its tokens. `roofline`: GB/s at which the S-Part's threads read memory."""
    shape = split.shape(cell)
    row: dict[str, Any] = {"batch": cell.batch, "context": cell.context, "mini_batches": shape.mini_batches}
    row |= {"kv_dtype": split.kv_format, "rounds": len(measured.judged), "note": measured.note}
    speeds = {name: _speeds(cell, shape.steps, measured, name) for name in ("all", "s", "r")}
    row["peers"] = {run.name: _peer(cell, shape.steps, run, its, speeds["all"]) for run, its in peers}
    if not measured.rounds:
        return row
    bounds = {n: 1 / (1 / s + 1 / r) if in_turns else min(s, r) for n, s, r in _rounds(speeds["s"], speeds["r"])}
    shares = {n: x / bound for n, x, bound in _rounds(speeds["all"], bounds)}
    own, s, r = (statistics.median(values.values()) for values in speeds.values())
    row |= {"tokens_per_s": own, "s_tokens_per_s": s, "r_tokens_per_s": r}
    row |= {"bound": "S + R" if in_turns else "max(S, R)", "bound_ratio": statistics.median(shares.values())}
    theirs = {run.name: _speeds(cell, shape.steps, its, "all") for run, its in peers}
    spreads = {"split": speeds["all"], "s": speeds["s"], "r": speeds["r"], "bound_ratio": shares} | theirs
    row["spread"] = {name: [min(v.values()), max(v.values())] for name, v in spreads.items() if v}
    s_share, r_share = own / s, own / r
    bound_share = s_share + r_share if in_turns else max(s_share, r_share)
    row["step_shares"] = {"s": s_share, "r": r_share, "hand_over": 1 - bound_share}
    if read_bytes is not None and roofline is not None:
        row["s_gbps"], row["s_roofline_gbps"] = s / cell.batch * shape.mini_batches * read_bytes * 1e-9, roofline
    row["s_loops"] = _loops(split, shape.steps)
    row["kv_step_bytes"] = split.step_bytes(cell)
    row["best_peer"], row["best_ratio"] = _best({n: p["ratio"] for n, p in row["peers"].items() if "ratio" in p})
    dense = {
        run.name: _ratio(speeds["all"], its_speeds)[0]
        for run, its in others
        if run.kv_format in DENSE and (its_speeds := _speeds(cell, shape.steps, its, "all"))
    }
    row["dense_ratio"] = _best(dense)[1]
    row["goals"] = _goals(row, weight_bytes)
    return row


#: The loops that threads of the S-Part share, as the report has them.
_LOOPS = {"qkv": "Q, K and V", "o": "O", "up": "gate and up", "down": "down", "other": "head and others"}
_LOOPS |= {"rows": "norms, gates", "draws": "draws"}
#: The shares of the threads' time, and the widths of their columns.
_WAITS = (("late", 6), ("split_late", 17), ("done", 12))


def _loops(split: SplitSystem, steps: int) -> dict[str, dict[str, float]]:
    """For each kind of loops of the S-Part alone: how many there are in a step, their seconds, and the shares of its
    threads' time before their first part ("late"; "split_late" is that of the split system, where threads may have gone
    to sleep) and after their last one. "alone": the rest of the step, in one thread or in threads of torch. Of the
    round of median length."""
    if not split.loops:
        return {}
    seconds, times, in_split = sorted(split.loops, key=lambda loop: loop[0])[len(split.loops) // 2]
    found = {}
    for name in _LOOPS:
        loops, elapsed, late, done, busy = times[name]
        if loops:
            threads = late + done + busy
            found[name] = {"loops": loops / steps, "seconds": elapsed / steps}
            found[name] |= {"late": late / threads, "done": done / threads}
            if (threads := sum(in_split[name][2:])) > 0:
                found[name]["split_late"] = in_split[name][2] / threads
            seconds -= elapsed
    found["alone"] = {"seconds": seconds / steps}
    return found


def _print_loops(loops: dict[str, dict[str, float]]) -> None:
    """Print where the S-Part alone spends a step, and how long its threads wait for each other."""
    print("  the S-Part's threads          us a step   loops    late  late in the split  no part left")
    for name, loop in loops.items():
        counts = f"{loop['loops']:8.0f}" if "loops" in loop else ""
        waits = (f"{100 * loop[key]:{width}.1f} %" for key, width in _WAITS if key in loop)
        print(f"    {_LOOPS.get(name, 'no loop'):<26}{1e6 * loop['seconds']:9.0f}{counts}{''.join(waits)}")


def _speeds(cell: Cell, steps: int, measured: Measured, name: str) -> dict[int, float]:
    """Tokens/s of each round that counts."""
    return {n: cell.batch * steps / seconds[name] for n, seconds in measured.judged.items()}


def _rounds(a: dict[int, float], b: dict[int, float]) -> list[tuple[int, float, float]]:
    return [(n, a[n], b[n]) for n in a if n in b]


def _ratio(own: dict[int, float], peer: dict[int, float]) -> tuple[float, bool]:
    """How many times a peer's tokens/s, as the median over the rounds that both took in turns; True if there are
    such."""
    if ratios := [a / b for _, a, b in _rounds(own, peer)]:
        return statistics.median(ratios), True
    return statistics.median(own.values()) / statistics.median(peer.values()), False


def _peer(cell: Cell, steps: int, run: PeerRun, measured: Measured, own: dict[int, float]) -> dict[str, Any]:
    found: dict[str, Any] = {"kv_format": run.kv_format, "note": measured.note}
    if speeds := _speeds(cell, steps, measured, "all"):
        found |= {"tokens_per_s": statistics.median(speeds.values()), "rounds": len(speeds)}
        if own:
            found["ratio"], found["in_turns"] = _ratio(own, speeds)
    return found


def _best(ratios: dict[str, float]) -> tuple[str | None, float | None]:
    name = min(ratios, key=lambda name: ratios[name], default=None)
    return name, None if name is None else ratios[name]


def _goals(row: dict[str, Any], weight_bytes: int) -> list[dict[str, Any]]:
    much = row["kv_step_bytes"] > weight_bytes
    goals = [("best peer", KV_GOAL if much else GOAL, row["best_ratio"])]
    if much and row["kv_dtype"] == "int8":
        goals.append(("best peer with 16 bits", INT8_GOAL, row["dense_ratio"]))
    return [
        {"beside": beside, "wanted": wanted, "ratio": ratio, "met": ratio >= wanted}
        for beside, wanted, ratio in goals
        if ratio is not None
    ]


def print_one(result: dict[str, Any]) -> None:
    """Print the table of a single row and its run's header, merged."""
    shape = f"batch {result['batch']}, context {result['context']}, {result['mini_batches']} mini-batches"
    weights = f"weights {result['weights']} ({format_bytes(result['weight_bytes'])})"
    print(f"{result['model']}: {shape}, {weights}, {result['dtype']}, KV {result['kv_dtype']}, {result['exchange']}")
    rows = [
        ("split", "split", result["tokens_per_s"]),
        ("S alone", "s", result["s_tokens_per_s"]),
        ("R alone", "r", result["r_tokens_per_s"]),
    ]
    measured = {name: peer for name, peer in result["peers"].items() if "ratio" in peer}
    rows += [(name, name, peer["tokens_per_s"]) for name, peer in measured.items()]
    for title, name, tokens in rows:
        low, high = result["spread"][name]
        print(f"  {title:<14}{tokens:10.1f} tokens/s [{low:.1f}-{high:.1f}]")
    print(f"  {'of the bound':<14}{100 * result['bound_ratio']:10.1f} %, the time of {result['bound']}")
    print(f"  {'hand-over':<14}{100 * result['step_shares']['hand_over']:10.1f} % of a step")
    if (gbps := result.get("s_gbps")) is not None:
        roofline = result["s_roofline_gbps"]
        print(
            f"  {'S-Part reads':<14}{gbps:10.1f} GB/s of weights, {100 * gbps / roofline:.0f} % of {roofline:.1f} GB/s"
        )
    if loops := result.get("s_loops"):
        _print_loops(loops)
    for name, peer in measured.items():
        print(f"  split / {name}: {peer['ratio']:.2f}x")
    for name, row in [("split", result), *result["peers"].items()]:
        if row["note"]:
            print(f"  {name}: {row['note']}")


def print_sweep(result: dict[str, Any]) -> None:
    """Print a row for each cell and KV format, and below them the notes and what bounds the goals that are missed."""
    rows = sorted(result["rows"], key=lambda row: (row["batch"], row["context"]))
    weights = f"weights {result['weights']} ({format_bytes(result['weight_bytes'])})"
    print(f"{result['model']}: {weights}, {result['dtype']}; tokens/s [range], ratios are fastdecode's to the peers")
    names = list(result["settings"]["peer"])
    columns = "".join(f"{name:>28}" for name in names)
    ours = f"{'fastdecode':>25}{'bound':>7}{'hand-over':>11}{'S-Part GB/s':>16}"
    print(f"{'batch':>5}{'context':>8} {'KV':<10}{ours}{columns}{'best':>7}  goals")
    for row in rows:
        cells = "".join(f"{_peer_text(row['peers'].get(name)):>28}" for name in names)
        if "tokens_per_s" in row:
            low, high = row["spread"]["split"]
            own = f"{row['tokens_per_s']:.1f} [{low:.1f}-{high:.1f}]{'*' if row['note'] else ''}"
            bound = f"{100 * row['bound_ratio']:.0f} %"
            rest = f"{100 * row['step_shares']['hand_over']:.0f} %"
            best = f"{row['best_ratio']:.2f}x" if row["best_ratio"] is not None else ""
        else:
            own, bound, rest, best = _word(row["note"]), "", "", ""
        met = [f"{goal['wanted']:.1f}x {'met' if goal['met'] else 'missed'}" for goal in row.get("goals", [])]
        shape = f"{row['batch']:>5}{row['context']:>8} {row['kv_dtype']:<10}"
        ours = f"{own:>25}{bound:>7}{rest:>11}{_reads(row):>16}"
        print(f"{shape}{ours}{cells}{best:>7}  {', '.join(met)}")
    _print_notes(rows)


def _reads(row: dict[str, Any]) -> str:
    """The speed at which the S-Part alone reads weights, and its share of the read roofline."""
    if (gbps := row.get("s_gbps")) is None:
        return ""
    return f"{gbps:.1f} ({100 * gbps / row['s_roofline_gbps']:.0f} %)"


def _print_notes(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        where = f"batch {row['batch']}, context {row['context']}, {row['kv_dtype']}"
        for name, one in [("fastdecode", row), *row["peers"].items()]:
            if one["note"]:
                print(f"{where}: {name} {one['note']}" + (f", {one['rounds']} round(s)" if one.get("rounds") else ""))
        for goal in row.get("goals", []):
            if not goal["met"]:
                s, r, rest = (100 * row["step_shares"][name] for name in ("s", "r", "hand_over"))
                missed = f"{goal['ratio']:.2f}x of {goal['wanted']:.1f}x, {goal['beside']}"
                print(
                    f"{where}: missed ({missed}); of a step S-Part {s:.0f} %, R-Part {r:.0f} %, hand-over {rest:.0f} %"
                )
    if any(not peer.get("in_turns", True) for row in rows for peer in row["peers"].values()):
        print("~: the peer's cache did not fit beside fastdecode's, so the two did not take turns")


def _peer_text(peer: dict[str, Any] | None) -> str:
    if peer is None:
        return ""
    if "ratio" not in peer:
        return _word(peer["note"])
    about, mark = "" if peer["in_turns"] else "~", "*" if peer["note"] else ""
    return f"{peer['kv_format']} {peer['tokens_per_s']:.1f} ({about}{peer['ratio']:.2f}x){mark}"


def _word(note: str) -> str:
    """A note short enough for a table."""
    if note.startswith("needs"):
        return "no memory"
    return note if len(note) < 24 else note.partition(":")[0] if note.startswith(("not tried", "does")) else "refuses"
