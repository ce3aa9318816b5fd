"""How often a step of the S-Part makes the host wait for the device: counted on a device without values.

tests/helpers/gpu/fake_device.py says what such a run shows. It shows nothing of values, of order, or of CUDA itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.checkpoints import VARIANTS, make_checkpoint
from nodes.forked import run_script

SCRIPT = Path(__file__).parents[1] / "helpers/gpu/fake_device.py"
#: Of the native families, with and without windows, biases, QK norm, projections, states, latent attention.
MODELS = (
    *("llama-gqa", "mistral", "qwen2-window", "qwen3", "qwen3.5", "phi3", "granite", "olmo2", "deepseek-v3-dense"),
    "opt",
)
CASES = [(model, "float16") for model in MODELS] + [("opt-projected", "float32")]


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, str], Any]:
    assert {model for model, _ in CASES} <= set(VARIANTS)
    found = run_script(SCRIPT, *(f"{dtype}:{make_checkpoint(model)}" for model, dtype in CASES))
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_step_synchronises_once(case: tuple[str, str], reports: Any) -> None:
    """A step that draws tokens waits for them; a step that draws none waits for nothing. Masks, which are computed
    while the model runs, go up by themselves."""
    report = reports[case]
    assert len(report) == (17 if case == CASES[0] else 7)
    for name, syncs, uploads, sampled in report:
        assert uploads == (2 if name in ("decode, mask", "decode, all") else 1), name
        assert syncs == (["copy from fdgpu to cpu"] if sampled else []), name


def test_the_counter_sees_what_synchronises() -> None:
    found = run_script(SCRIPT, "--detect")
    quiet = ["pinned upload", "arithmetic", "a tensor made on the device"]
    assert [name for name, seen in found.items() if not seen] == quiet
    assert "FakeTensorDeviceMismatchError" in found["mixed devices"]
    assert len(found) == 13
