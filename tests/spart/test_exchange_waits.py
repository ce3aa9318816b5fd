"""Waits of the exchanges that test_exchanges.py does not leave out: without any one of them the tokens are wrong.

Left out here are the waits of Staged for the R-nodes, those of a new stream for the weights, and the wait for the end
of an abandoned step. The runner's waits order nothing: a step that is resumed too early waits by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from models.checkpoints import make_checkpoint
from nodes.forked import run_script

SCRIPT = Path(__file__).parents[1] / "helpers/gpu/lying_steps.py"


def run(exchange: str, left_out: tuple[str, ...]) -> list[bool]:
    """Whether the tokens are those of the CPU, for each of `left_out`; see lying_steps.py."""
    return run_script(SCRIPT, exchange, "1", ",".join(left_out), str(make_checkpoint("llama-gqa")))


def test_staged_steps_wait_for_the_r_nodes_and_for_both_copies():
    assert run("staged", ("none", "verdict", "reply", "record")) == [True, False, False, False]


@pytest.mark.parametrize("pair", [("first", "weights"), ("abandoned", "end")], ids=lambda pair: pair[1])
def test_streams_wait_for_the_weights_and_steps_for_the_end_of_abandoned_ones(pair):
    assert run("bypass", pair) == [True, False]
