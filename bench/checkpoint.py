"""Write a checkpoint of a given shape with random weights. Decode speed does not depend on the weights' values."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastdecode.demo import model_dir

COMMAND = ("checkpoint", "write a Llama-architecture checkpoint with random weights")

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--max-positions", type=int, default=8192)
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    parameters = write(args)
    print(f"{args.out}: {parameters / 1e6:.1f} M parameters, {args.dtype}")


def write(args: argparse.Namespace) -> int:
    """Write the checkpoint. Returns its number of parameters."""
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = dict(_tensors(args))
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "config.json").write_text(json.dumps(_config(args), indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # a real tokenizer, whose ids are a part of the vocabulary
        shutil.copyfile(model_dir() / name, args.out / name)
    return sum(t.numel() for t in tensors.values())


def _config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_size,
        "vocab_size": args.vocab,
        "max_position_embeddings": args.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": str(_DTYPES[args.dtype]).removeprefix("torch."),
    }


def _tensors(args: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors. Weights are normal with standard deviation 1/sqrt(fan-in), so that activations stay near
    one."""
    dtype = _DTYPES[args.dtype]
    generator = torch.Generator().manual_seed(args.seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * float(columns**-0.5)).to(dtype)

    q, kv = args.heads * args.head_size, args.kv_heads * args.head_size
    yield "model.embed_tokens.weight", weight(args.vocab, args.hidden)
    for i in range(args.layers):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", torch.ones(args.hidden, dtype=dtype)
        yield layer + "self_attn.q_proj.weight", weight(q, args.hidden)
        yield layer + "self_attn.k_proj.weight", weight(kv, args.hidden)
        yield layer + "self_attn.v_proj.weight", weight(kv, args.hidden)
        yield layer + "self_attn.o_proj.weight", weight(args.hidden, q)
        yield layer + "post_attention_layernorm.weight", torch.ones(args.hidden, dtype=dtype)
        yield layer + "mlp.gate_proj.weight", weight(args.intermediate, args.hidden)
        yield layer + "mlp.up_proj.weight", weight(args.intermediate, args.hidden)
        yield layer + "mlp.down_proj.weight", weight(args.hidden, args.intermediate)
    yield "model.norm.weight", torch.ones(args.hidden, dtype=dtype)
    yield "lm_head.weight", weight(args.vocab, args.hidden)
