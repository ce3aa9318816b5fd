"""KV on the GPU and on R-nodes by the scheduler's choice, beside the GPU alone, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdecode.plan.resident import ResidentLoad, cell_rate

#: Room for five sequences on the GPU.
ROOM, PROMPT, OUTPUT = 2e9, 3072, 128


def rate(machine: str, need: float, way: str) -> float:
    cell = ResidentLoad(machine, Path("llama-3-8b"), need, way, PROMPT, OUTPUT, ROOM, requests=6)
    tokens_per_second: float = cell_rate(cell)["tokens_per_s"]
    return tokens_per_second


@pytest.mark.parametrize(
    ("machine", "least_gain"),
    [
        ("rtx-3060+ddr5-2ch", 1.0),
        ("t4+ddr5-8ch", 1.05),
        ("a10+ddr5-2ch", 1.05),
        ("rtx-4090+ddr5-8ch", 1.05),
        ("h200", 1.05),
    ],
)
def test_r_nodes_never_cost_the_gpu_more_than_two_percent(machine, least_gain):
    """While all sequences fit, and with three times as many as fit. Then R-nodes bring more than they cost, though
    little where prompts leave little time."""
    for need, least in ((0.5, 0.98), (3.0, least_gain)):
        assert rate(machine, need, "auto") >= least * rate(machine, need, "GPU-only")
