"""When steps are captured: before there is work, the largest first and within the memory that was counted; what is
missing later, beside the steps, which are staged until then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import make_checkpoint
from nodes.forked import run_script

SCRIPT = Path(__file__).parents[1] / "helpers/gpu/lying_captures.py"
LAYERS = 3  # of the model
KINDS = 4  # of sampling, with that of tokens drawn behind the graph


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_script(SCRIPT, str(make_checkpoint("llama-gqa")))


def test_every_class_is_captured_at_start_and_the_first_step_runs_it(found):
    start = found["at_start"]
    assert start["classes"] == [[4] * KINDS + [2] * KINDS + [1] * KINDS] * 2
    assert start["waited"] == LAYERS


def test_captures_at_start_end_with_the_memory_that_was_counted(found):
    """The seventh capture passes the bound; a step of a class that was left out is staged."""
    little = found["with_little_memory"]
    assert little == {"classes": [[4, 4, 4], [4, 4]], "waited": 0, "fault": ""}


def test_a_step_whose_graph_is_missing_waits_for_no_capture(found):
    """The first two steps end while the capture is held up; the third step runs the graph, and all have the CPU's
    tokens."""
    beside = found["beside_steps"]
    assert beside["tokens"] == found["cpu"]
    assert beside["waited"] == [0, 0, 2 * LAYERS]
