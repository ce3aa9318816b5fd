"""llama.cpp as a peer of `fastdecode-bench decode`."""

from __future__ import annotations

import json
from importlib.util import find_spec

import gguf
import numpy as np
import pytest
import torch
from models.checkpoints import make_checkpoint, reference
from models.gguf_made import gguf_name, interleave
from nodes.forked import run

from fastdecode.bench.llama_cpp_file import gguf_of
from fastdecode.bench.load import PeerLoad
from fastdecode.demo import model_dir


def load_of(model, weights="auto", dtype=torch.float32):
    return PeerLoad(model, weights, dtype, torch.device("cpu"), 2, 2, 40, 4)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-moe"])
def test_the_gguf_file_has_the_weights_of_the_checkpoint(name, tmp_path):
    directory = make_checkpoint(name)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(gguf_of(load_of(directory), tmp_path)).tensors}
    model = reference(directory)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    wanted = {gguf_name(name): parameter.detach().float() for name, parameter in model.named_parameters()}
    for name, tensor in list(wanted.items()):
        part = name.split(".")[-2]
        if part in heads and model.config.model_type == "llama":
            wanted[name] = interleave(tensor, heads[part])
        if part == "ffn_gate_up_exps":
            del wanted[name]
            for kind, each in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                wanted[name.replace("gate_up", kind)] = each
    assert stored.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(stored[name], tensor.numpy()), name


def test_a_checkpoint_of_another_family_is_refused(tmp_path):
    with pytest.raises(ValueError, match="llama and qwen3_moe checkpoints and GGUF files, not 'opt'"):
        gguf_of(load_of(make_checkpoint("opt")), tmp_path)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
@pytest.mark.parametrize(("weights", "variant"), [("dense", ""), ("int8", ""), ("int4", ""), ("dense", "qwen3-moe")])
def test_llama_cpp_decodes_beside_the_split_system(weights, variant):
    model = make_checkpoint(variant) if variant else model_dir()
    command = ["-m", "fastdecode.bench.cli", "decode", "--json", "--model", str(model)]
    command += ["--batch", "2", "--context", "40", "--steps", "4", "--rounds", "2", "--weights", weights]
    done = run(*command, "--peer", "llama.cpp")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peers"]["llama.cpp"]["tokens_per_s"] > 0
