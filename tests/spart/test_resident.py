"""KV pages of the S-Part's own device beside R-nodes, in an engine on a device that computes as late as it may.

tests/helpers/gpu/lying_resident.py runs the engine and transformers. The device belongs to the whole process, so each
test runs it in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import make_checkpoint
from nodes.forked import run_script

SCRIPTS = Path(__file__).parents[1] / "helpers/gpu"
ENGINE, CUTS = SCRIPTS / "lying_resident.py", SCRIPTS / "lying_cuts.py"


def run(case: str, exchange: str) -> dict[str, Any]:
    report: dict[str, Any] = run_script(ENGINE, case, exchange, str(make_checkpoint("llama-gqa")))
    assert report.pop("equal"), "the tokens are not those of transformers"
    assert report.pop("left") == 0 and report.pop("captured") == (exchange == "bypass")
    return report


@pytest.mark.parametrize("case", ["all", "kernels"])
def test_tokens_are_those_of_transformers_with_all_sequences_on_the_device(case):
    """Forked prompts, choices, and a sequence that goes on in the middle of another one's page; in fp32 by a reference,
    and in fp16 by the kernels of a GPU, compiled for the host."""
    report = run(case, "staged")
    assert report["crossed"] == 0 and report["copied"]


def test_tokens_are_those_of_transformers_with_a_device_that_is_too_small():
    report = run("too small", "staged")
    assert report["resident"] and report["crossed"]


@pytest.mark.parametrize("exchange", ["staged", "bypass"])
def test_tokens_are_those_of_transformers_when_all_pages_are_taken(exchange):
    """On a busy machine sequences may follow each other so that none must be paused."""
    report = run("short of pages", exchange)
    assert report["resident"] and report["crossed"]


@pytest.mark.parametrize("exchange", ["staged", "bypass"])
def test_streams_go_on_when_an_r_node_is_killed_beside_the_device(exchange):
    report = run("killed", exchange)
    assert report["resident"] and report["crossed"] and report["alive"] == [True, True, False]


def test_a_sequence_that_outgrows_the_device_has_its_first_pages_on_an_r_node():
    """The cut grows while the sequence decodes."""
    report = run("cut", "staged")
    assert report["spilled"] and any(report["ways"])


@pytest.mark.parametrize("then", ["paused", "recomputed"])
def test_a_cut_sequence_is_preempted(then):
    report = run(f"cut and {then}", "staged")
    assert report["spilled"] and report["preemptions"] and (report["recomputed"] > 0) == (then == "recomputed")


def test_choices_that_share_a_prompt_are_cut():
    """Beside sequences whose steps guess tokens."""
    report = run("cut forks", "staged")
    assert report["spilled"] and report["guessed"] and not report["crossed"]


def test_pages_come_back_when_the_device_has_room_again():
    """The pages of the sequence that was cut. The other sequence has ended, and may leave as an idle prefix."""
    report = run("refilled", "bypass")
    assert report["merged"] and 0 < report["refilled"] <= report["spilled"]


def test_an_idle_prefix_goes_to_an_r_node_and_comes_back_for_a_prompt():
    """The second sequence needs the pages of the first one, which has ended; a prompt that goes on where the first one
    ended then needs those of the second one."""
    report = run("idle prefix", "staged")
    assert report["resident"] == 3 and not report["crossed"] and report["reused"] == 263
    assert report["spilled"] == 2 * report["refilled"] > 0


@pytest.mark.parametrize(
    ("case", "exchange", "left"),
    [
        ("cut and killed", "bypass", 1),
        ("killed while spilling", "staged", 1),
        ("two killed while spilling", "bypass", 1),
        ("killed while refilling", "staged", 1),
        ("two killed while refilling", "bypass", 0),
        ("killed while a prefix spills", "bypass", 1),
        ("killed while a prefix returns", "staged", 1),
    ],
)
def test_streams_go_on_when_r_nodes_with_first_pages_are_killed(case, exchange, left):
    assert sum(run(case, exchange)["alive"][1:]) == left


@pytest.mark.parametrize(("exchange", "kv_dtype"), [("staged", "fp32"), ("bypass", "fp32"), ("staged", "fp16")])
def test_tokens_are_those_of_transformers_with_a_cut_at_every_page_border(exchange, kv_dtype):
    """Several queries of the sequence in a step, beside sequences wholly on the device and wholly on the R-node, which
    has a GPU with fp16."""
    report = run_script(CUTS, exchange, kv_dtype, str(make_checkpoint("llama-gqa")))
    assert report["equal"] and report["cuts"] == 2 and (report["waited"] > 0) == (exchange == "bypass")
