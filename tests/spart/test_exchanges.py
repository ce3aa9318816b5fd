"""The exchanges of a device, on one that computes as late as it may (lying_device.py, lying_driver.py).

Staged: rows copied in pinned memory. Bypass: whole steps captured and replayed, in which the stream itself rings the
R-nodes and waits for them. The tokens of steps over real links are those of the same steps on the CPU, and each wait is
needed: without it they are not. The device belongs to the whole process, so the tests run in a process of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import make_checkpoint
from models.hf_models import save_model
from nodes.forked import run_script

SCRIPTS = Path(__file__).parents[1] / "helpers/gpu"


#: Of the seven families: grouped queries, a sliding window, a QK norm, learned positions.
MODELS = ("llama-gqa", "mistral", "qwen3", "opt")


def run(*arguments: str, script: str = "lying_steps.py") -> list[Any]:
    return run_script(SCRIPTS / script, *arguments)


@pytest.mark.parametrize(("n_links", "models"), [(1, MODELS[:1]), (2, MODELS)], ids=["one link", "two links"])
def test_tokens_are_those_of_the_cpu(n_links, models):
    """Two mini-batches; prompts in chunks beside decoding rows; tokens drawn in every way. The device also checks that
    no stream uses the words of another, or waits for a layer before it asks for it, and that the host waits for nothing
    in a bypassed step but its completion word."""
    paths = (str(make_checkpoint(model)) for model in models)
    assert run("staged,bypass", str(n_links), "none", *paths) == [True] * 2 * len(models)


@pytest.mark.parametrize(
    ("exchange", "waits"),
    [
        ("staged", ("event", "download")),
        (
            "bypass",
            (
                "gate",  # of the stream for an R-node
                "completion",  # of the host for the end of a step
                "verdict",  # of the host for an R-node that is to plan the step
                "order",  # a layer is asked for before it is waited for
                "words",  # each mini-batch has layer words of its own
            ),
        ),
    ],
    ids=["staged", "bypass"],
)
def test_without_a_wait_they_are_not(exchange, waits):
    assert run(exchange, "1", ",".join(waits), str(make_checkpoint("llama-gqa"))) == [False] * len(waits)


@pytest.mark.parametrize(
    ("name", "how", "reason"),
    [
        ("deepseek_v3", "plain", ""),  # a mixture of experts, whose heads of V are smaller than those of K
        ("gpt2", "reads", "a step could not be captured: the host may not wait for a stream that is captured"),
    ],
)
def test_models_of_transformers_are_captured_unless_their_code_makes_the_host_wait(name, how, reason, tmp_path):
    """A model whose code reads a token on the host is staged. In both cases the tokens are those of the CPU."""
    assert run(f"{how}:{save_model(name, tmp_path)}", script="lying_hf.py") == [[True, reason]]
