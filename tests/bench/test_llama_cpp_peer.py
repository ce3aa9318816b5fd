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


def test_the_gguf_file_has_the_weights_of_the_checkpoint(tmp_path):
    directory = make_checkpoint("llama-gqa")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(gguf_of(load_of(directory), tmp_path)).tensors}
    model = reference(directory)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        wanted, part = parameter.detach().float(), gguf_name(name).split(".")[-2]
        if part in heads:
            wanted = interleave(wanted, heads[part])
        assert np.array_equal(stored.pop(gguf_name(name)), wanted.numpy()), name
    assert not stored


def test_a_checkpoint_of_another_family_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Llama checkpoints and GGUF files, not 'opt'"):
        gguf_of(load_of(make_checkpoint("opt")), tmp_path)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
@pytest.mark.parametrize("weights", ["dense", "int8", "int4"])
def test_llama_cpp_decodes_beside_the_split_system(weights):
    command = ["-m", "fastdecode.bench.cli", "decode", "--json", "--model", str(model_dir())]
    command += ["--batch", "2", "--context", "40", "--steps", "4", "--rounds", "2", "--weights", weights]
    done = run(*command, "--peer", "llama.cpp")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peers"]["llama.cpp"]["tokens_per_s"] > 0
