"""Mini-batches that rotate over several S-nodes with common R-nodes (Lamina), beside those that stay (simulated).

For each number m of S-nodes, as many sequences decode in m mini-batches, one an S-node; in m + 1 that rotate layer by
layer; and in 2 m, two an S-node. Mini-batches, wires and R-nodes are simulated event by event with the times of the
profile, every node on a machine of its own, and stand beside the closed form. No figure is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from fastdecode.bench.options import numbers, print_result
from fastdecode.plan.equations import System
from fastdecode.plan.options import PlannedSystem, add_system_arguments
from fastdecode.plan.rotation import HandOver, most_gain, pipeline
from fastdecode.plan.rotation_simulation import simulate

COMMAND = ("rotate", "mini-batches that rotate over S-nodes with common R-nodes, beside those that stay (simulated)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-plan rotate`."""
    add = parser.add_argument
    add_system_arguments(parser)
    add("--s-nodes", type=numbers, default=[1, 2, 3, 4], metavar="N,...", help="numbers of S-nodes; default: 1,2,3,4. "
        "Each S-node adds --r-nodes R-nodes that all share")  # fmt: skip
    add("--context", type=int, default=1024, metavar="N", help="cached tokens of a sequence, the mean over its steps")
    add("--batch", type=int, metavar="N", help="sequences for each S-node, over all mini-batches; default: as many as "
        "the R-nodes' memory holds")  # fmt: skip
    add("--hand-over-gbps", type=float, metavar="G", help="GB/s of hidden states between S-nodes; default: the link's")
    add("--hand-over-us", type=float, metavar="US", help="latency of that; default: half an empty layer of the link")
    add("--spread", type=float, default=0.0, metavar="X", help="standard deviation of the times of S-Part and R-Part "
        "in a layer, as a part of the mean; default: 0")  # fmt: skip
    add("--steps", type=int, default=8, metavar="N", help="simulated steps of each mini-batch")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", type=Path, metavar="FILE", help="PNG of tokens/s and idle shares over the number of S-nodes")


def run(args: argparse.Namespace) -> None:
    """Simulate and print. Raises ProfileError, CheckpointError, ValueError, OSError, RuntimeError."""
    if args.plot:
        from fastdecode.plan import plots  # fails here rather than after the work
    if min(args.s_nodes) < 1 or args.context < 1 or args.steps < 1 or args.spread < 0:
        raise ValueError("--s-nodes, --context and --steps must be at least 1, and --spread not negative")
    planned = PlannedSystem.of(args)
    system = dataclasses.replace(planned.system, in_turns=False, together=())  # a machine for each node
    model, link = system.model, system.link
    capacity = int(args.r_nodes * planned.memory // (args.context * model.token_bytes(args.kv_dtype)))
    batch = args.batch or capacity
    if batch > capacity:
        raise ValueError(f"the KV-cache of an S-node's R-nodes holds {capacity} sequences of {args.context} tokens")
    if batch < 2:
        raise ValueError(f"{batch} sequence for an S-node does not make two mini-batches")
    hand_over = HandOver(
        link.layer_seconds / 2 if args.hand_over_us is None else 1e-6 * args.hand_over_us,
        args.hand_over_gbps or link.gbps,
    )
    rows = []
    for m in args.s_nodes:
        shared = dataclasses.replace(system, r_nodes=m * args.r_nodes)
        for n in sorted({m, m + 1, 2 * m}):
            rows.append(_row(shared, m * batch, m, n, hand_over, args))
    result = {
        "model": model.name,
        "profile": planned.profile.name,
        "source": planned.profile.source,
        "r_nodes_per_s_node": args.r_nodes,
        "batch_per_s_node": batch,
        "context": args.context,
        "kv_dtype": args.kv_dtype,
        "spread": args.spread,
        "rows": rows,
    }
    print_result(args, result, _print_table)
    if args.plot:
        plots.rotation(result, args.plot)


def _row(system: System, batch: int, m: int, n: int, hand_over: HandOver, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of `batch` sequences in `n` mini-batches over `m` S-nodes."""
    layers = system.model.n_layers
    planned = pipeline(system, batch, args.context, m, n, hand_over)
    course = simulate(planned, layers, args.steps, args.spread, args.seed)
    return {
        "s_nodes": m,
        "r_nodes": system.r_nodes,
        "mini_batches": n,
        "rotates": planned.rotates,
        "rows": batch / n,
        "s_part_us": 1e6 * planned.s_part,
        "r_part_us": 1e6 * planned.r_part,
        "tokens_per_second": batch / (layers * course.period),
        "predicted_tokens_per_second": batch / (layers * planned.period),
        "binding": planned.binding,
        "s_idle": course.s_idle,
        "r_idle": course.r_idle,
        "tbt": course.step,
        "longest_tbt": course.longest_step,
        "hand_over_bytes": batch / n * system.model.hidden_bytes if planned.rotates else 0.0,
        "hand_over_us": 1e6 * (hand_over.latency + planned.hand_over_wire) if planned.rotates else 0.0,
        "hand_over_wait_us": 1e6 * course.hand_over_wait,
    }


def gains(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Tokens/s of rotating mini-batches beside the better of those that stay, by the number of S-nodes."""
    rates: dict[int, dict[bool, float]] = {}
    for row in rows:
        of = rates.setdefault(row["s_nodes"], {})
        of[row["rotates"]] = max(row["tokens_per_second"], of.get(row["rotates"], 0.0))
    return {m: of[True] / of[False] for m, of in rates.items() if True in of}


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['model']} on {result['profile']} ({result['source']}), KV {result['kv_dtype']}; for each S-node")
    print(
        f"{result['r_nodes_per_s_node']} R-node(s) and {result['batch_per_s_node']} sequences of {result['context']} "
        "tokens; simulated, not measured"
    )
    print("*: mini-batches rotate; hand-over: KiB, us, and us that a mini-batch waits for it")
    print(
        f"{'S':>3} {'R':>3} {'mini-b.':>8} {'rows':>7} {'t_S us':>8} {'t_R us':>8} {'tokens/s':>9} {'predicted':>9} "
        f"{'binds':>14} {'S idle':>7} {'R idle':>7} {'TBT ms':>8} {'longest':>8} {'hand-over':>16}"
    )
    for r in result["rows"]:
        mini_batches = f"{r['mini_batches']}{'*' if r['rotates'] else ' '}"
        hand_over = f"{r['hand_over_bytes'] / 1024:.0f} {r['hand_over_us']:.0f} {r['hand_over_wait_us']:.0f}"
        print(
            f"{r['s_nodes']:3d} {r['r_nodes']:3d} {mini_batches:>8} {r['rows']:7.1f} "
            f"{r['s_part_us']:8.1f} {r['r_part_us']:8.1f} "
            f"{r['tokens_per_second']:9.0f} {r['predicted_tokens_per_second']:9.0f} {r['binding']:>14} "
            f"{r['s_idle']:7.1%} {r['r_idle']:7.1%} {1e3 * r['tbt']:8.2f} {1e3 * r['longest_tbt']:8.2f} "
            f"{hand_over if r['rotates'] else '-':>16}"
        )
    for m, gain in gains(result["rows"]).items():
        most = 1 + most_gain(m)
        print(
            f"{m} S-nodes: rotation has {gain:.3f}x the tokens/s of the better other; at most {most:.3f}x without links"
        )
