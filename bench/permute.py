"""Write a Llama-architecture model again with its channels in random order, in fp32 or in 16 bits.

The model computes the same. But a file of 4-bit weights keeps a scale for each group of neighbouring inputs; here the
groups are mixed, so that the weights lie on no grid of 4 bits, and rounding them to 4 bits costs what it costs weights
that never were. In 16 bits the model is what hubs have of it, and serves to measure speed. It needs the
transformers package and, for a GGUF file, gguf.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fastdecode.daemon.config import NodeConfig
from fastdecode.demo import model_dir
from fastdecode.gguf.file import find_gguf
from fastdecode.spart.served import TORCH_DTYPES
from fastdecode.text.tokenizer import Tokenizer

COMMAND = ("permute", "write a model with its channels in random order, to measure what 4 bits cost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, metavar="PATH", help="as for fastdecode-node; default: the demo model")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to write")
    parser.add_argument("--dtype", choices=TORCH_DTYPES, default="fp32")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    path = NodeConfig(model=args.model).model_path() or model_dir()
    file = find_gguf(path)
    source: dict[str, Any] = {"gguf_file": file.name} if file else {}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent if file else path, dtype=torch.float32, **source)
    torch.manual_seed(args.seed)
    with torch.no_grad():
        _permute(model)
    args.out.mkdir(parents=True, exist_ok=True)
    model.to(TORCH_DTYPES[args.dtype])
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name in dict(model.named_parameters())}
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": str(TORCH_DTYPES[args.dtype]).removeprefix("torch.")}
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    Tokenizer.from_dir(path).save(args.out / "tokenizer.json")
    (args.out / "tokenizer_config.json").write_text(json.dumps({}) + "\n")
    print(f"{args.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {args.dtype}")


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
