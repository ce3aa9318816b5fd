"""The checkpoint of the decode benchmark as llama.cpp takes it: a GGUF file whose matrices have as many bits, in BF16
or F16, Q8_0, or Q4_0."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from tqdm import tqdm

from fastdecode.bench.load import PeerLoad
from fastdecode.gguf.file import find_gguf

#: KV format -> the nearest type of llama.cpp.
KV_TYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0", "int8-int4": "q8_0"}
#: Format of the weights -> name and number of the file's type.
_FILE_TYPES = {"int8": ("Q8_0", 7), "int4": ("Q4_0", 2)}
_DENSE_TYPES = {torch.float32: ("F32", 0), torch.float16: ("F16", 1), torch.bfloat16: ("BF16", 32)}
#: `model_type` of config.json -> llama.cpp's name of the architecture.
_ARCHITECTURES = {"llama": "llama", "qwen3_moe": "qwen3moe"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def gguf_of(load: PeerLoad, folder: Path) -> Path:
    """The GGUF file that llama.cpp is to load: the model's own, or one in `folder`. Raises ValueError."""
    own = find_gguf(load.model)
    if own is not None and load.weights == "auto":
        return own
    if own is None:
        own = folder / "dense.gguf"
        _write(load.model, load.dtype, own)
        if load.weights in ("auto", "dense"):
            return own
    name, number = _FILE_TYPES.get(load.weights) or _DENSE_TYPES[load.dtype]
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.pure, params.nthread = number, True, True, load.threads
    path = folder / f"{name}.gguf"
    if llama_cpp.llama_model_quantize(str(own).encode(), str(path).encode(), params):
        raise ValueError(f"llama.cpp could not write the weights of {load.model} as {name}")
    return path


def _write(directory: Path, dtype: torch.dtype, path: Path) -> None:
    """Write a checkpoint of Hugging Face's layout as a GGUF file without a tokenizer. Raises ValueError for a family
    that _ARCHITECTURES lacks."""
    import gguf

    config = json.loads((directory / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config.get("model_type"))
    if architecture is None:
        known, model_type = " and ".join(_ARCHITECTURES), config.get("model_type")
        raise ValueError(f"the llama.cpp peer takes {known} checkpoints and GGUF files, not {model_type!r}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    if config.get("rope_scaling") or rope.get("rope_type", "default") != "default":
        raise ValueError("the llama.cpp peer takes no checkpoint with scaled RoPE")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    if head_size := config.get("head_dim"):
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    [known_as] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(known_as, config["num_hidden_layers"])
    kind = gguf.GGMLQuantizationType[_DENSE_TYPES[dtype][0]]
    for name, values in tqdm(_tensors(directory), desc="writing GGUF", leave=False):
        stored = names.get_name(name, (".weight",))
        if stored is None:
            raise ValueError(f"llama.cpp has no tensor {name} in a {architecture} checkpoint")
        turned = {"attn_q": heads, "attn_k": kv_heads}.get(stored.split(".")[-2])
        if turned and architecture == "llama":  # llama.cpp wants the two elements of a pair of RoPE side by side
            shape = values.shape
            values = values.view(turned, 2, -1, *shape[1:]).transpose(1, 2).reshape(shape)
        single = values.ndim == 1 or "ffn_gate_inp" in stored  # vectors and routers
        used = gguf.GGMLQuantizationType.F32 if single else kind
        data = gguf.quants.quantize(np.ascontiguousarray(values.numpy()), used)
        writer.add_tensor(stored, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The names and the values in fp32 of a checkpoint's tensors. Experts' matrices of one kind in a layer, each
    [out, in], are one tensor [experts, out, in], whose name lacks the number of the expert."""
    with ExitStack() as stack:
        parts = [stack.enter_context(safe_open(part, "pt")) for part in sorted(directory.glob("*.safetensors"))]
        where = {name: part for part in parts for name in part.keys()}  # noqa: SIM118 - not a dict
        experts: dict[str, dict[int, str]] = defaultdict(dict)
        for name, part in where.items():
            if match := _EXPERT.fullmatch(name):
                experts[f"{match[1]}.{match[3]}"][int(match[2])] = name
            else:
                yield name, part.get_tensor(name).float()
        for name, each in experts.items():
            yield name, torch.stack([where[each[i]].get_tensor(each[i]).float() for i in range(len(each))])
