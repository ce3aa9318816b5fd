"""Sets resident KV beside KV on R-nodes in virtual time: tokens a second over the cache that users need.

A number of users send their next request when the last one is answered. The cache that they need on average, as a
multiple of the GPU's room, is the x axis. Each load is served with KV on the GPU alone, where sequences wait and are
preempted when it is full, in both places as by `--gpu-kv auto`, and on R-nodes alone as by `--gpu-kv 0`.
"""

from __future__ import annotations

import argparse
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from fastdecode.bench.options import print_result
from fastdecode.bench.serving.workload import LoadRequest
from fastdecode.daemon.option_values import size_option
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.plan.cards import kv_room
from fastdecode.plan.equations import System
from fastdecode.plan.model import find_planned_model
from fastdecode.plan.options import add_model_argument
from fastdecode.plan.profile import ProfileError, merged, read_profile
from fastdecode.plan.simulation import Simulated, simulate

COMMAND = ("resident", "tokens/s with KV on the GPU, in both places and on R-nodes, over the cache needed (simulated)")

WAYS = ("GPU-only", "auto", "0")
MACHINES = (
    *(f"{card}+ddr5-{channels}ch" for card in ("rtx-3060", "t4", "a10", "rtx-4090") for channels in (2, 8)),
    "h200",
)
_SEED = 1


class ResidentLoad(NamedTuple):
    """One load on one machine. `machine`: names of profiles, joined by "+"."""

    machine: str
    model: Path | None
    need: float
    way: str
    prompt: int
    output: int
    gpu_kv: float | None
    requests: int  # of each user


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastdecode-plan resident`."""
    add = parser.add_argument
    add_model_argument(parser)
    add("--machine", action="append", metavar="PROFILES", help="profiles, joined by + (repeatable); default: a "
        "measured H200 machine, and the RTX 3060, T4, A10 and RTX 4090 with two and eight channels of RAM, by their "
        "data sheets")  # fmt: skip
    add("--need", type=float, action="append", metavar="X", help="cache that users need, as a multiple of the GPU's "
        "room (repeatable); default: 0.5, 1, 1.5, 2, 3, 5 and 10")  # fmt: skip
    add("--gpu-kv", type=size_option, metavar="SIZE", help="the GPU's room; default: what weights and steps leave")
    add("--input-tokens", type=int, default=3072, metavar="N", help="prompt of each request (3072)")
    add("--output-tokens", type=int, default=512, metavar="N", help="mean output; half to three halves of it (512)")
    add("--requests", type=int, default=12, metavar="N", help="of each user (12)")
    add("--processes", type=int, default=1, metavar="N", help="simulations at a time (1)")
    add("--plot", type=Path, metavar="FILE", help="plot tokens/s beside GPU-only, a panel for each machine")


def run(args: argparse.Namespace) -> None:
    """Simulate and print. Raises ProfileError, CheckpointError, ValueError, OSError, RuntimeError."""
    if args.plot:
        from fastdecode.plan import plots  # fails here rather than after the work
    lengths = args.input_tokens, args.output_tokens
    cells = [
        ResidentLoad(machine, args.model, need, way, *lengths, args.gpu_kv, args.requests)
        for machine in args.machine or MACHINES
        for need in args.need or (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
        for way in WAYS
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        rows = list(tqdm(pool.map(cell_rate, cells), total=len(cells), leave=False))
    result = {"model": str(args.model), "input_tokens": lengths[0], "output_tokens": lengths[1], "rows": rows}
    if args.plot:
        plots.resident(result, args.plot)
    print_result(args, result, _print_table)


def cell_rate(cell: ResidentLoad) -> dict[str, Any]:
    """The figures of a cell."""
    profile = merged([read_profile(name) for name in cell.machine.split("+")])
    assert profile.s_node is not None and profile.r_node is not None
    if profile.s_node.gpu is None:
        raise ProfileError(f"{cell.machine} has no section s_node.gpu")
    model = find_planned_model(cell.model)
    system = System.from_profile(profile, "shm", model, "fp16", 0 if cell.way == "GPU-only" else 1)
    room = kv_room(profile, model, profile.s_node.gpu.memory) if cell.gpu_kv is None else cell.gpu_kv
    users = max(1, round(cell.need * room / model.token_bytes("fp16") / (cell.prompt + cell.output / 2)))
    generator = random.Random(_SEED)
    lengths = cell.output // 2, 3 * cell.output // 2
    outputs = [generator.randint(*lengths) for _ in range(users * cell.requests)]
    # Users who begin at once would go on to end at once, and a part of such a wave would be measured.
    outputs[:users] = [generator.randint(1, output) for output in outputs[:users]]
    # A GPU without R-nodes has one batch.
    most_seqs, most_rows = 1024, 4096
    limits = SchedulerLimits(1 if cell.way == "GPU-only" else 2, most_rows, most_seqs, prompts_apart=True)
    done = simulate(
        [LoadRequest(0.0, cell.prompt, output) for output in outputs],
        system,
        limits,
        profile.r_node.memory,
        gpu_kv=0.0 if cell.way == "0" else room,
        users=users,
        target_tbt=None,
        schedule="greedy",
    )
    return {
        "machine": cell.machine,
        "source": profile.source,
        "need": cell.need,
        "users": users,
        "way": cell.way,
        "tokens_per_s": steady_rate(done, users),
        "preemptions": done.preemptions,
        "recomputed_tokens": done.recomputed_tokens,
    }


def steady_rate(done: Simulated, users: int) -> float:
    """Output tokens a second while all users are at work: from the end of as many requests as there are users to the
    beginning of the last request. Raises ValueError if there is no such time."""
    begun = sorted(answer.finished or 0.0 for answer in done.run.answers)[users - 1]
    ended = max(answer.sent for answer in done.run.answers)
    if ended <= begun:
        raise ValueError("users send too few requests (--requests) for a time in which all of them are at work")
    tokens = sum(begun < at <= ended for answer in done.run.answers for at in answer.chunks)
    return tokens / (ended - begun)


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['input_tokens']} + {result['output_tokens']} tokens; simulated, tokens/s:")
    print(f"{'machine':>24} {'need':>5} {'users':>5}" + "".join(f" {way:>9}" for way in WAYS) + " auto beside GPU-only")
    rows = result["rows"]
    for row in rows[:: len(WAYS)]:
        here = (row["machine"], row["need"])
        rates = {other["way"]: other["tokens_per_s"] for other in rows if (other["machine"], other["need"]) == here}
        figures = "".join(f" {rates[way]:9.1f}" for way in WAYS)
        print(f"{here[0]:>24} {here[1]:5.2f} {row['users']:5d}{figures} {rates['auto'] / rates['GPU-only']:8.3f}x")
