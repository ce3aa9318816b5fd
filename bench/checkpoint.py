"""Write a checkpoint of a given shape with random weights, or a model again with its channels in random order.

Decode speed does not depend on the values of random weights. A model of --permute, which must be of the Llama
architecture, computes the same in another order. But a file of 4-bit weights keeps a scale for each group of
neighbouring inputs; here the groups are mixed, so that the weights lie on no grid of 4 bits, and rounding them to 4
bits costs what it costs weights that never were. In 16 bits the model is as hubs have it, and serves to measure speed.
--permute needs the transformers package and, for a GGUF file, gguf.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastdecode.bench.shapes import SHAPES, ModelShape
from fastdecode.daemon.config_files import find_model
from fastdecode.daemon.option_values import count
from fastdecode.demo import model_dir
from fastdecode.gguf.file import find_gguf
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.loader import tensor_shapes
from fastdecode.spart.served import TORCH_DTYPES
from fastdecode.text.tokenizer import Tokenizer

COMMAND = ("checkpoint", "write a checkpoint: random weights of a family, or a model in another order")
HAS_RESULT = False

#: What the config.json of a family has besides the shape.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 10000.0},
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    # The experts of a token are as many and as large as in Qwen3-30B-A3B, which has four times as many to choose from.
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="directory to write")
    add("--permute", type=Path, metavar="PATH", help="write this model, as for fastdecode-node, in another order")
    add("--family", choices=FAMILIES, default="llama", help="of random weights (llama)")
    add("--model", choices=SHAPES, default="llama-125m", help="shape; default: %(default)s")
    for size in fields(ModelShape):
        add("--" + size.name.replace("_", "-"), type=count, metavar="N", help="default: the model's")
    add("--dtype", choices=TORCH_DTYPES, default="bf16")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    parameters = _write_permuted(args) if args.permute else write(args)
    print(f"{args.out}: {parameters / 1e6:.1f} M parameters, {args.dtype}")


def write(args: argparse.Namespace) -> int:
    """Write a checkpoint with random weights. Returns its number of parameters."""
    for name, size in asdict(SHAPES[args.model]).items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    tensors = dict(_tensors(args))
    _save(args.out, tensors, _config(args))
    for name in ("tokenizer.json", "tokenizer_config.json"):  # a real tokenizer, whose ids are a part of the vocabulary
        shutil.copyfile(model_dir() / name, args.out / name)
    return sum(t.numel() for t in tensors.values())


def _save(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file lets nobody else read it
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config(args: argparse.Namespace) -> dict[str, Any]:
    return FAMILIES[args.family] | {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_size,
        "vocab_size": args.vocab,
        "max_position_embeddings": args.max_positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": str(TORCH_DTYPES[args.dtype]).removeprefix("torch."),
    }


def _tensors(args: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors. Weights are normal with standard deviation 1/sqrt(fan-in), so that activations stay near
    one; all vectors are ones."""
    dtype = TORCH_DTYPES[args.dtype]
    generator = torch.Generator().manual_seed(args.seed)
    for name, shape in tensor_shapes(make_config(_config(args))).items():
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=dtype)
        else:
            yield name, (torch.randn(shape, generator=generator) * float(shape[-1] ** -0.5)).to(dtype)


def _write_permuted(args: argparse.Namespace) -> int:
    """Write the model of --permute in another order. Returns its number of parameters."""
    from transformers import AutoModelForCausalLM

    path = find_model(args.permute)
    file = find_gguf(path)
    source: dict[str, Any] = {"gguf_file": file.name} if file else {}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent if file else path, dtype=torch.float32, **source)
    torch.manual_seed(args.seed)
    with torch.no_grad():
        _permute(model)
    model.to(TORCH_DTYPES[args.dtype])
    parameters = dict(model.named_parameters())
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": str(TORCH_DTYPES[args.dtype]).removeprefix("torch.")}
    _save(args.out, {name: tensor for name, tensor in model.state_dict().items() if name in parameters}, config)
    (args.out / "tokenizer.json").write_text(Tokenizer.from_dir(path).to_json(), encoding="utf-8")
    (args.out / "tokenizer_config.json").write_text(json.dumps({}) + "\n")
    return sum(tensor.numel() for tensor in parameters.values())


def _permute(model: Any) -> None:
    """Change the order of the residual stream's channels, of each MLP's and of each V head's."""
    config, body = model.config, model.model
    stream = torch.randperm(config.hidden_size)
    embedded = [body.embed_tokens] if config.tie_word_embeddings else [body.embed_tokens, model.lm_head]
    for module in embedded:
        _reorder(module.weight, 1, stream)
    _reorder(body.norm.weight, 0, stream)
    size = body.layers[0].self_attn.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _reorder(norm.weight, 0, stream)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            _reorder(linear.weight, 1, stream)
        for linear in (attention.o_proj, mlp.down_proj):
            _reorder(linear.weight, 0, stream)
        inner = torch.randperm(config.intermediate_size)
        for linear, dim in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
            _reorder(linear.weight, dim, inner)
        heads = torch.stack([torch.randperm(size) for _ in range(config.num_key_value_heads)])
        _reorder(attention.v_proj.weight, 0, _flat(heads))
        _reorder(attention.o_proj.weight, 1, _flat(heads.repeat_interleave(group, 0)))


def _flat(heads: torch.Tensor) -> torch.Tensor:
    """The order of the elements of each head, [heads, size], as that of all elements."""
    return (heads + heads.shape[1] * torch.arange(len(heads))[:, None]).flatten()


def _reorder(weight: torch.Tensor, dim: int, order: torch.Tensor) -> None:
    weight.copy_(weight.index_select(dim, order))
