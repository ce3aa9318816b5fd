"""--gpu-kv: which models and options have it, and a node with it, on a device that computes as late as it may."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from models.checkpoints import make_checkpoint
from nodes.node_process import PROGRAMS, fetch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.device_plan import with_gpu_kv
from fastdecode.daemon.option_values import ConfigError
from fastdecode.spart import load_model

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def model_on(device: torch.device, name: str = "llama-gqa") -> SimpleNamespace:
    model = load_model(make_checkpoint(name), dtype="fp32")
    return SimpleNamespace(device=device, hello=model.hello, config=model.config)


def test_auto_and_sizes_are_kept_where_the_kernels_serve_the_model():
    for size in (None, 1 << 30):
        assert with_gpu_kv(NodeConfig(gpu_kv=size), model_on(GPU)).gpu_kv == size


@pytest.mark.parametrize(
    ("options", "device", "reason"),
    [
        ({}, CPU, "the S-Part runs on the CPU"),
        ({"kv_dtype": "int4"}, GPU, "no int4 KV-cache"),
        ({"partition": "heads", "r_node": ("tcp://a:1", "tcp://b:1")}, GPU, "--partition heads"),
        ({"prefill_listen": "tcp://0.0.0.0:1", "r_node": ("tcp://a:1",)}, GPU, "--prefill-listen"),
    ],
)
def test_there_are_no_pages_on_the_gpu_where_there_can_be_none(options, device, reason):
    """A size that was asked for is an error that names the reason."""
    config = NodeConfig(**options, gpu_kv=None)
    assert with_gpu_kv(config, model_on(device)).gpu_kv == 0
    with pytest.raises(ConfigError, match=f"--gpu-kv 1.0 GiB: .*{reason}"):
        with_gpu_kv(replace(config, gpu_kv=1 << 30), model_on(device))


def test_a_node_serves_sequences_on_the_device_and_beyond_it(start, monkeypatch):
    """Ten pages on the device, and twelve prompts at once that take two each."""
    directory = make_checkpoint("llama-gqa")
    monkeypatch.setitem(PROGRAMS, "lying", "gpu.lying_node")
    monkeypatch.setenv("PYTHONPATH", "tests/helpers")
    options = "--port 0 --api-processes 0 --dtype fp32 --kv-dtype fp32 --gpu-kv 1MiB --kv-memory 64MiB"
    node = start("--model", str(directory), "--max-model-len", "512", *options.split(), program="lying")
    api = node.api()
    node.wait_for(r"KV 960\.0 KiB on the GPU \+ 6\d\.\d MiB in RAM = \d+ sequences of 512 tokens, 2 of them on the GPU")
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 384, (12, 125), generator=generator)
    name, ignore = api.models.list().data[0].id, {"ignore_eos": True}
    answers = api.completions.create(
        model=name, prompt=prompts.tolist(), max_tokens=8, temperature=0, extra_body=ignore
    )
    metrics = fetch(f"{str(api.base_url).removesuffix('/v1/')}/metrics")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    made = model.generate(prompts, do_sample=False, max_new_tokens=8, min_new_tokens=8, eos_token_id=None)[:, 125:]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for prompt, tokens, choice in zip(prompts.tolist(), made.tolist(), answers.choices, strict=True):
        whole = tokenizer.decode(prompt + tokens).replace("\ufffd", "")  # of bytes that are no character
        assert whole == (tokenizer.decode(prompt) + choice.text).replace("\ufffd", "")
    assert 'r_node="lying:0"' in metrics
