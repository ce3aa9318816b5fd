"""FastDecode's published figures beside what this model predicts from the paper's own micro-benchmarks.

The profile holds the paper's Table 2 (one block of Llama-7b; arXiv 2403.11421) and nothing of its figures 9 to 13.
"""

from __future__ import annotations

import argparse
from typing import Any

from fastdecode.bench.options import print_result
from fastdecode.plan.equations import (
    System,
    Work,
    r_nodes_in_balance,
    round_seconds,
    s_part_throughput,
    stage_times,
    steady,
)
from fastdecode.plan.model import PlannedModel
from fastdecode.plan.profile import Profile, read_profile

COMMAND = ("published", "FastDecode's published figures beside what is predicted for its machines")

_LENGTH = 1024  # tokens of every sequence in the paper, from a short prompt
_SOCKETS = 8
LLAMA_7B, LLAMA_13B = PlannedModel.of_shape("llama-7b"), PlannedModel.of_shape("llama-13b")

#: Figure 9: output tokens a second with 8 sockets, by model and batch.
FIGURE_9 = {
    (LLAMA_7B, 128): 1052, (LLAMA_7B, 256): 1542, (LLAMA_7B, 512): 2202, (LLAMA_7B, 1024): 2279,
    (LLAMA_13B, 128): 660, (LLAMA_13B, 256): 1026, (LLAMA_13B, 512): 1363, (LLAMA_13B, 1024): 1441,
}  # fmt: skip
#: Figure 11: gain in tokens a second of the load-stabilising schedule, and its longest step beside that without.
FIGURE_11 = {LLAMA_7B: (1.08, 0.66), LLAMA_13B: (1.11, 0.70)}
#: Figure 12: the same gain with sequences of 768 tokens.
FIGURE_12 = {LLAMA_7B: 1.13}
#: Figure 13, read off the plot: tokens a second of 1024 sequences, by model, their tokens, and sockets.
FIGURE_13 = {
    (LLAMA_7B, 1024, 1): 275, (LLAMA_7B, 1024, 2): 540, (LLAMA_7B, 1024, 4): 1060, (LLAMA_7B, 1024, 8): 1600,
    (LLAMA_13B, 1024, 1): 175, (LLAMA_13B, 1024, 2): 345, (LLAMA_13B, 1024, 4): 660, (LLAMA_13B, 1024, 8): 1180,
    (LLAMA_13B, 128, 1): 590, (LLAMA_13B, 128, 2): 1080, (LLAMA_13B, 128, 4): 1790, (LLAMA_13B, 128, 8): 1770,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`fastdecode-plan published` has no options of its own."""


def run(args: argparse.Namespace) -> None:
    """Print the table."""
    print_result(args, {"rows": rows()}, _print_table)


def rows() -> list[dict[str, Any]]:
    """A row for each published figure: what it is, the paper's value, and the predicted one."""
    profile = read_profile("a10-epyc7452")
    table = [("eq. 11, llama-7b: sockets in balance", float(_SOCKETS), sockets_in_balance(profile))]
    for (model, batch), paper in FIGURE_9.items():
        table.append((f"fig. 9, {model.name}, batch {batch}: tokens/s", paper, even_growth(profile, model, batch)[0]))
    for model, (gain, peak) in FIGURE_11.items():
        predicted = schedule(profile, model, _LENGTH)
        table.append((f"fig. 11, {model.name}: gain of the schedule", gain, predicted[0]))
        table.append((f"fig. 11, {model.name}: longest step", peak, predicted[1]))
    for model, gain in FIGURE_12.items():
        table.append((f"fig. 12, {model.name}: gain of the schedule", gain, schedule(profile, model, 768)[0]))
    for (model, length, sockets), paper in FIGURE_13.items():
        seconds = step_seconds(system(profile, model, sockets), 1024, length)
        what = f"fig. 13, {model.name}, {length} tokens, {sockets} socket(s): tokens/s"
        table.append((what, paper, 1024 / seconds))
    return [{"what": what, "paper": paper, "predicted": predicted} for what, paper, predicted in table]


def system(profile: Profile, model: PlannedModel, sockets: int) -> System:
    """The paper's machines: an A10 and `sockets` sockets, fp16."""
    return System.from_profile(profile, "rdma", model, "fp16", sockets)


def step_seconds(machines: System, batch: int, length: float) -> float:
    """A step of `batch` sequences that all have `length` tokens, in two mini-batches."""
    stages = stage_times(machines, Work(batch / 2, batch / 2 * machines.model.read_tokens(length)))
    return round_seconds([stages] * 2, machines.in_turns)[0]


def even_growth(profile: Profile, model: PlannedModel, batch: int, length: int = _LENGTH) -> tuple[float, float]:
    """Tokens a second, and the longest step, of sequences that all start together and grow to `length` tokens."""
    machines, points = system(profile, model, _SOCKETS), 64
    seconds = [step_seconds(machines, batch, length * (i + 0.5) / points) for i in range(points)]
    return batch * points / sum(seconds), max(seconds)


def schedule(profile: Profile, model: PlannedModel, length: int) -> tuple[float, float]:
    """The schedule that starts 1024 sequences of `length` tokens one by one, beside all of them together: the ratios of
    tokens a second and of the longest step."""
    rate, longest = even_growth(profile, model, 1024, length)
    mixed = steady(system(profile, model, _SOCKETS), 1024, 2, 1, length)
    return mixed.tokens_per_second / rate, mixed.seconds / longest


def sockets_in_balance(profile: Profile) -> float:
    """Equation (11) with the paper's T(1024), of one block, and R, of one socket; the paper used 8 sockets."""
    machines = system(profile, LLAMA_7B, 1)
    t = machines.s_part.seconds(1024) / LLAMA_7B.n_layers
    r = LLAMA_7B.token_bytes("fp16") / LLAMA_7B.n_layers / machines.kv_bytes_per_second
    return r_nodes_in_balance(_LENGTH, r, s_part_throughput(1024, t))


def _print_table(result: dict[str, Any]) -> None:
    print("FastDecode on an A10 with Epyc 7452 sockets: the paper's figures, and what is predicted from its Table 2")
    print(f"{'':<52} {'paper':>8} {'predicted':>10} {'ratio':>6}")
    for row in result["rows"]:
        digits = 0 if row["paper"] > 20 else 2
        ratio = row["predicted"] / row["paper"]
        print(f"{row['what']:<52} {row['paper']:8.{digits}f} {row['predicted']:10.{digits}f} {ratio:6.2f}")
