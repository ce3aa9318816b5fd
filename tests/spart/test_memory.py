"""The bound on a step's memory, against the live tensors of steps on a device without values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models.checkpoints import make_checkpoint
from models.spart_steps import staged_bytes
from nodes.forked import run_script

from fastdecode.kernels import _native
from fastdecode.spart import load_model
from fastdecode.spart.prefill.prompt import PromptCache, staged_token_bytes
from fastdecode.spart.step.batch import Chunk

SCRIPT = Path(__file__).parents[1] / "helpers/gpu/fake_memory.py"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,  # a step's memory does not depend on them
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 50272,
    "hidden_size": 2048,
    "ffn_dim": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
MODELS = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "vocab_size": 151936},
    "mistral": {**LLAMA, "architectures": ["MistralForCausalLM"], "vocab_size": 32768, "sliding_window": 1024},
    "opt": OPT,
    "gemma3": {
        **LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262144,
    },
    "gemma4": {
        **LLAMA,
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 2048,  # as many as 32 layers of Gemma 4 E2B
        "vocab_size": 32768,
    },
    "qwen3.5": {
        **LLAMA,
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek": {
        **LLAMA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "q_lora_rank": 768,
        "first_k_dense_replace": 2,
    },
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("rows", "decoding"), [(512, 256), (2048, 32)])
def test_no_step_takes_more_memory_than_its_bound(name, rows, decoding, tmp_path):
    """Decoding with every sampler, prompts, both, and the draws within a captured step. The bound is no more than six
    times what they take."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    dtype = MODELS[name]["torch_dtype"]
    steps = run_script(SCRIPT, str(tmp_path), dtype, str(rows), str(decoding))
    assert len(steps) == 4
    for step, (peak, bound) in steps.items():
        assert bound / 6 < peak <= bound, step


@pytest.mark.parametrize("isa, counted", [("scalar", 790), (_native.isa_best(), 704 + 128)])  # in blocks of 64
def test_staged_prompts_take_what_is_counted(isa, counted, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    model, cpu = load_model(make_checkpoint("llama-gqa"), dtype="fp32"), torch.device("cpu")
    cache = PromptCache(model.config, cpu, torch.float32)
    for key, length in enumerate((700, 90)):
        cache.begin(key, Chunk(0, key, 1, 0, [5] * 40, True, None, prompt_length=length), slice(0, 40))
    token_bytes = staged_token_bytes(model.config, cpu, torch.float32)
    assert staged_bytes(cache) == counted * token_bytes
    cache._prompts[0].length = 40
    cache.begin(0, Chunk(0, 0, 1, 40, [5] * 600, True, None, prompt_length=700), slice(0, 600))
    assert staged_bytes(cache) == counted * token_bytes
