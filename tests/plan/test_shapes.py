"""The shapes of well-known models by name, against transformers' own configurations and counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fastdecode.bench.cli import main as bench
from fastdecode.bench.shapes import SHAPES
from fastdecode.plan.model import find_planned_model, read_model

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-7b", 6.74),
        ("llama-13b", 13.02),
        ("llama-33b", 32.53),
        ("llama-65b", 65.29),
        ("llama-2-70b", 68.98),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
    ],
)
def test_a_shape_has_the_published_number_of_parameters(name, billions):
    """Meta's counts, by transformers' own model of the shape. Rows meet all but the embedding and the norms."""
    shape = SHAPES[name]
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        vocab_size=shape.vocab,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert round(count / 1e9, 2) == billions
    assert find_planned_model(Path(name)).parameters == count - norms - shape.vocab * shape.hidden


def test_a_checkpoint_of_a_shape_is_that_model(tmp_path):
    bench(["checkpoint", "--model", "llama-125m", "--layers", "1", "--vocab", "384", "--out", str(tmp_path / "m")])
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (1, 768, 384)
    planned, shape = read_model(tmp_path / "m"), SHAPES["llama-125m"]
    assert (planned.n_q_heads, planned.n_kv_heads, planned.head_size) == (shape.heads, shape.kv_heads, shape.head_size)


def test_a_directory_goes_before_a_shape(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench(["checkpoint", "--layers", "1", "--vocab", "384", "--out", "llama-7b"])
    assert find_planned_model(Path("llama-7b")).n_layers == 1
