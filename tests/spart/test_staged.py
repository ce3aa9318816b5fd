"""Rows staged in pinned memory, on a device that computes as late as it may (tests/helpers/lying_device.py).

The tokens of steps over real links are those of the same steps on the CPU, and each wait is needed: without it they
are not. The device belongs to the whole process, so the tests run in a process of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

SCRIPT = Path(__file__).parents[1] / "helpers" / "lying_steps.py"


#: Of the seven families: grouped queries, a sliding window, a QK norm, learned positions.
MODELS = ("llama-gqa", "mistral", "qwen3", "opt")


def run(*arguments: str) -> list[bool]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("n_links", [1, 2])
def test_tokens_are_those_of_the_cpu(n_links):
    """Two mini-batches; prompts in chunks beside decoding rows; greedy and drawn tokens."""
    assert run(str(n_links), "none", *(str(make_checkpoint(model)) for model in MODELS)) == [True] * len(MODELS)


@pytest.mark.parametrize("wait", ["event", "download"])
def test_without_a_wait_they_are_not(wait):
    assert run("1", wait, str(make_checkpoint("llama-gqa"))) == [False]
