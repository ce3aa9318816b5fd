"""GGUF files of tiny random models, written with the package gguf, and the same weights as transformers' model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

from fastdecode.gguf.file import TYPES

#: Types whose numbers the package can make from floats.
QUANTISABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """ "model.layers.1.mlp.up_proj.weight" -> "blk.1.ffn_up.weight"."""
    stem, _, end = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, module = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{_NAMES[module]}.{end}"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem] + f".{end}"


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K in the order of llama.cpp: a rotated pair's two elements side by side."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    kinds: str | dict[str, str],
    fields: dict[str, Any] | None = None,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write transformers' `model`, and give it the weights that the file has.

    `kinds`: the type of all matrices, or of those whose GGUF names contain a key ("": of the others). `more` adds what
    else the file shall have.
    """
    config = model.config
    architecture = config.model_type if config.model_type != "mistral" else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    for key, value in (fields or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    more(writer)
    kinds = {"": kinds} if isinstance(kinds, str) else kinds
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if tied and name.startswith("lm_head"):
                continue
            stored = gguf_name(name)
            kind = "F32"
            if parameter.ndim == 2:
                kind = next((kinds[key] for key in kinds if key and key in stored), kinds[""])
            part = stored.split(".")[-2]
            turn = architecture in ("llama", "granite") and part in heads
            values = interleave(parameter.data, heads[part]) if turn else parameter.data
            data = gguf.quants.quantize(values.numpy().astype(np.float32), Kind[kind])
            back = torch.from_numpy(gguf.quants.dequantize(data, Kind[kind]).astype(np.float32).reshape(values.shape))
            if turn:
                back = back.view(heads[part], -1, 2, *back.shape[1:]).transpose(1, 2).reshape(back.shape)
            parameter.data.copy_(back)
            writer.add_tensor(stored, data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_fields(directory: Path, pre: str = "gpt-2") -> dict[str, Any]:
    """The metadata for a byte-level tokenizer.json."""
    raw = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    added = {token["content"]: token["special"] for token in raw["added_tokens"]}
    tokens += [token for token in added if token not in vocabulary]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [{True: 3, False: 4}.get(added.get(token), 1) for token in tokens],
        "tokenizer.ggml.merges": merges,
    }


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """uint8 [rows, blocks, bytes]: any numbers, with fp16 factors of a usual size."""
    form = next(form for form in TYPES.values() if form.name == name)
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (rows, blocks, form.bytes), dtype=np.uint8)
    factors = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}.get(name, [0])
    if name in ("Q2_K", "Q3_K"):
        factors = {"Q2_K": [80, 82], "Q3_K": [108]}[name]
    if name == "MXFP4":  # the factor is a power of two in one byte
        factors, data[..., 0] = [], rng.integers(110, 130, (rows, blocks))
    for at in factors:
        values = (rng.random((rows, blocks, 1)) * 0.02).astype(np.float16)
        data[..., at : at + 2] = values.view(np.uint8)
    return data
