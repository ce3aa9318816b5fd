"""Prompts on a device whose K and V stream out behind the layers: no layer waits for an append, and no row is lost.

tests/helpers/gpu/lying_prompts.py runs them on a device that computes as late as it may. Their R-nodes are processes,
which stand still or are killed while a prompt is computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import make_checkpoint
from nodes.forked import run_script

SCRIPT = Path(__file__).parents[1] / "helpers/gpu/lying_prompts.py"
LAYERS = 3  # of the model


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_script(SCRIPT, str(make_checkpoint("llama-gqa")))


def test_an_append_that_is_held_up_holds_up_no_layer(found):
    """All layers are computed while the R-node stands still; only the end of the step waits. Then the tokens after the
    prompt are those of the CPU."""
    assert found["all buffers"] == {"resumed": LAYERS + 1, "tokens": True}


def test_without_a_free_buffer_a_layer_waits_and_nothing_is_overwritten(found):
    """Two buffers for three layers: the third layer waits for the R-node."""
    assert found["few buffers"] == {"resumed": 2, "tokens": True}


@pytest.mark.parametrize("wait", ["written", "overwritten", "copied", "room", "end", "verdict"])
def test_without_a_wait_the_tokens_are_others(wait, found):
    """Each wait that lying_prompts.without describes is needed."""
    assert found[wait] is False


def test_an_r_node_that_is_killed_before_it_has_appended_ends_its_own_prompts_alone(found):
    """A step of one R-node fails; a step of two goes on for the other R-node, whose tokens are those of the CPU."""
    alone, beside = found["killed"]
    assert alone == {"lost": True}
    assert beside == {"lost": True, "tokens": True}
