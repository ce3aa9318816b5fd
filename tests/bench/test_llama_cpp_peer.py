"""llama.cpp as a peer of `fastdecode-bench decode`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models.checkpoints import VARIANTS, make_checkpoint, make_model
from models.llama_cpp_checks import logits_of_llama_cpp, needs_llama_cpp
from models.spart_steps import text
from nodes.forked import run

from fastdecode.bench.llama_cpp_file import gguf_of
from fastdecode.bench.load import PeerLoad
from fastdecode.demo import model_dir

#: llama.cpp has one head size for the K and the V of a delta rule.
ONE_SIZE = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}


def load_of(model: Path) -> PeerLoad:
    return PeerLoad(model, "auto", torch.float32, torch.device("cpu"), 2, 2, 40, 4)


@needs_llama_cpp
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-moe", "qwen3.5", "qwen3.5-last", "qwen3.5-moe"])
def test_llama_cpp_computes_the_logits_of_the_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config, storage = VARIANTS[name]
    config = config | ONE_SIZE if name.startswith("qwen3.5") else config
    monkeypatch.setitem(VARIANTS, name, (family, config, storage))
    model, tokens = make_model(name), text(40, 2)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0]
    logits = logits_of_llama_cpp(gguf_of(load_of(tmp_path / "model"), tmp_path), tokens)
    assert (logits - wanted[-len(logits) :]).abs().max() < 1e-5 * wanted.abs().max()


def test_a_checkpoint_of_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"takes GGUF files and LlamaForCausalLM, .*, not OPTForCausalLM"):
        gguf_of(load_of(make_checkpoint("opt")), tmp_path)


@needs_llama_cpp
@pytest.mark.parametrize(("weights", "family"), [("dense", ""), ("int8", ""), ("int4", ""), ("dense", "qwen3.5")])
def test_llama_cpp_decodes_beside_the_split_system(weights: str, family: str, tmp_path: Path) -> None:
    """The prompt that llama.cpp computes is shorter than the context."""
    bench = ["-m", "fastdecode.bench.cli"]
    model = tmp_path / "model" if family else model_dir()
    if family:
        sizes = ["--layers", "4", "--hidden", "64", "--intermediate", "96", "--heads", "4", "--kv-heads", "2"]
        made = run(*bench, "checkpoint", "--family", family, "--head-size", "32", *sizes, "--out", str(model))
        assert made.returncode == 0, made.stderr
    command = [*bench, "decode", "--json", "--model", str(model), "--weights", weights, "--peer", "llama.cpp"]
    done = run(*command, "--batch", "2", "--context", "600", "--steps", "4", "--rounds", "2")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peers"]["llama.cpp"]["tokens_per_s"] > 0
