"""The size of the weights that `--check --model` reports, against the weights when they are loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, make_model
from gguf_made import write_gguf

from fastdecode.daemon.check_model import rows
from fastdecode.daemon.config import WEIGHTS, NodeConfig
from fastdecode.spart import load_model
from fastdecode.spart.loader import parameter_count

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, make_model("llama-gqa"), "Q4_1")
    return path


@pytest.mark.parametrize("kind", ["directory", "gguf"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_size_in_memory_is_about_right(kind, weights, gguf_file):
    path = gguf_file if kind == "gguf" else make_checkpoint("llama-gqa")
    said = dict(rows(NodeConfig(model=path, weights=weights, dtype="fp32"), path))["weights"]
    number, unit = re.match(r"([\d.]+) (KiB|B)", said).groups()
    model = load_model(path, dtype="fp32", weights=weights)
    assert model.parameters == parameter_count(model.config)
    # The embedding of a dense model is in memory twice if its head is tied.
    held = (
        model.parameters * 4 if weights == "dense" or (weights, kind) == ("auto", "directory") else model.weight_bytes
    )
    assert float(number) * {"B": 1, "KiB": 1024}[unit] == pytest.approx(held, rel=0.3)
    assert ("GGUF Q4_1" in said) == (kind == "gguf")
