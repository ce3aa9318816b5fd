"""KV pages of the S-Part's own device beside R-nodes, in an engine on a device that computes as late as it may.

tests/helpers/gpu/lying_resident.py runs the engine and transformers. The device belongs to the whole process, so each
test runs it in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import make_checkpoint

SCRIPT = Path(__file__).parents[1] / "helpers/gpu/lying_resident.py"


def run(case: str, exchange: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), case, exchange, str(make_checkpoint("llama-gqa"))]
    process = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert process.returncode == 0, process.stderr
    report: dict[str, Any] = json.loads(process.stdout)
    assert report.pop("equal"), "the tokens are not those of transformers"
    assert report.pop("left") == 0 and report.pop("captured") == (exchange == "bypass")
    return report


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", ["all", "kernels"])
def test_tokens_are_those_of_transformers_with_all_sequences_on_the_device(case):
    """Forked prompts, choices, and a sequence that goes on in the middle of another one's page; in fp32 by a reference,
    and in fp16 by the kernels of a GPU, compiled for the host."""
    report = run(case, "staged")
    assert report["crossed"] == 0 and report["copied"]


@pytest.mark.timeout(180)
def test_tokens_are_those_of_transformers_with_a_device_that_is_too_small():
    report = run("too small", "staged")
    assert report["resident"] and report["crossed"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("exchange", ["staged", "bypass"])
def test_tokens_are_those_of_transformers_when_all_pages_are_taken(exchange):
    """On a busy machine sequences may follow each other so that none must be paused."""
    report = run("short of pages", exchange)
    assert report["resident"] and report["crossed"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("exchange", ["staged", "bypass"])
def test_streams_go_on_when_an_r_node_is_killed_beside_the_device(exchange):
    report = run("killed", exchange)
    assert report["resident"] and report["crossed"] and report["alive"] == [True, True, False]
