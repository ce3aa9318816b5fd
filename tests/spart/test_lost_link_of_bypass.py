"""An R-node that dies or stalls in a captured step, or in a step of prompts, seen from the engine's streams.

tests/helpers/gpu/lying_engine.py runs the engine: its S-Part computes on a device that lies; R-nodes, links are real.
The lying device belongs to the whole process, so each test runs it in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from models.checkpoints import make_checkpoint
from nodes.forked import run_script

SCRIPT = Path(__file__).parents[1] / "helpers/gpu/lying_engine.py"


@pytest.mark.parametrize("how", ["kill", "stall", "append"])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_streams_go_on_with_the_same_tokens_when_a_step_loses_an_r_node(scheme, how):
    """In a captured step the device's stream is let go with poison. The R-node's sequences are computed again on the
    other one, and later steps are captured for the R-node that is left."""
    report = run_script(SCRIPT, scheme, how, str(make_checkpoint("llama-gqa")))
    reason = report.pop("reason")
    assert report == {"equal": True, "alive": [True, False], "after": True}
    assert ("has not come within" in reason) == (how == "stall"), reason
