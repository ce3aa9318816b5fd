"""The checkpoint of the decode benchmark as llama.cpp takes it: a GGUF file whose matrices have as many bits, in BF16
or F16, Q8_0, or Q4_0."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open
from tqdm import tqdm

from fastdecode.bench.load import PeerLoad
from fastdecode.gguf.file import find_gguf
from fastdecode.spart import ModelConfig, read_config
from fastdecode.spart.checkpoints.config import DeltaRule

if TYPE_CHECKING:
    import gguf

#: KV format -> the nearest type of llama.cpp.
KV_TYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0", "int8-int4": "q8_0"}
#: Format of the weights -> name and number of the file's type.
_FILE_TYPES = {"int8": ("Q8_0", 7), "int4": ("Q4_0", 2)}
_DENSE_TYPES = {torch.float32: ("F32", 0), torch.float16: ("F16", 1), torch.bfloat16: ("BF16", 32)}
#: `architectures` of config.json -> llama.cpp's name of the architecture.
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
}
#: The numbers of RoPE's pairs that turn by a token's time, row and column in an image; in text all three are equal.
_ROPE_SECTIONS = [11, 11, 10, 0]
#: Tensors that have the V heads of the delta rule -> the dimension along which these stand, behind Q and K if there
#: are such.
_V_HEADS = {
    **dict.fromkeys(("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"), 0),
    "ssm_out": 1,
}
#: Parts of the names of matrices that llama.cpp takes in fp32 alone, as it takes vectors.
_SINGLE = ("ffn_gate_inp", "ssm_conv1d")
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

    config = read_config(directory)
    architecture = _ARCHITECTURES.get(config.architecture)
    if architecture is None:
        known = ", ".join(_ARCHITECTURES)
        raise ValueError(f"the llama.cpp peer takes GGUF files and {known}, not {config.architecture}")
    if config.rope is None or config.rope.kind != "default":
        raise ValueError("the llama.cpp peer takes no checkpoint with scaled RoPE")
    writer = gguf.GGUFWriter(path, architecture)
    _add_keys(writer, config)
    [known_as] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(known_as, config.n_blocks)
    kind = gguf.GGMLQuantizationType[_DENSE_TYPES[dtype][0]]
    for name, values in tqdm(_tensors(directory), desc="writing GGUF", leave=False):
        stored = names.get_name(name.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias"))
        if stored is None:
            raise ValueError(f"llama.cpp has no tensor {name} in a {architecture} checkpoint")
        values = _in_its_layout(stored, values, config)
        single = values.ndim == 1 or any(part in stored for part in _SINGLE)
        used = gguf.GGMLQuantizationType.F32 if single else kind
        data = gguf.quants.quantize(np.ascontiguousarray(values.numpy()), used)
        writer.add_tensor(stored, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_keys(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.n_blocks)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_q_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rope.width(config.head_size))
    writer.add_vocab_size(config.vocab_size)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    if experts := config.experts:
        writer.add_expert_count(experts.n)
        writer.add_expert_used_count(experts.used)
        writer.add_expert_feed_forward_length(experts.intermediate_size)
        if experts.shared_size:
            writer.add_expert_shared_feed_forward_length(experts.shared_size)
    if rule := config.delta:
        recurrent = [i in rule.blocks for i in range(config.n_blocks)]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
        writer.add_rope_dimension_sections(_ROPE_SECTIONS)
        writer.add_ssm_conv_kernel(rule.kernel)
        writer.add_ssm_state_size(rule.k_size)
        writer.add_ssm_group_count(rule.k_heads)
        writer.add_ssm_time_step_rank(rule.v_heads)
        writer.add_ssm_inner_size(rule.v_width)


def _in_its_layout(stored: str, values: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """A tensor of a checkpoint as llama.cpp wants it, which calls it `stored`."""
    part = stored.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    values = values.squeeze()  # a convolution [channels, 1, kernel], a gate [1, in]
    turned = {"attn_q": config.n_q_heads, "attn_k": config.n_kv_heads}.get(part)
    if turned and config.architecture == "LlamaForCausalLM":  # the two elements of a pair of RoPE stand side by side
        values = values.unflatten(0, (turned, 2, -1)).transpose(1, 2).flatten(0, 2)
    elif part == "ssm_a":
        values = -values.exp()
    elif part.endswith("_norm") and part != "ssm_norm":
        values = values + config.norm_offset
    return _tiled(values, _V_HEADS[part], config.delta) if config.delta and part in _V_HEADS else values


def _tiled(values: torch.Tensor, dim: int, rule: DeltaRule) -> torch.Tensor:
    """`values` with another order of the V heads along `dim`: the first of each K head, then the second, and so on."""
    size = 1 if values.shape[dim] == rule.v_heads else rule.v_size
    width = rule.v_heads * size
    before, heads = values.split([values.shape[dim] - width, width], dim)
    heads = heads.unflatten(dim, (rule.k_heads, -1, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat([before, heads], dim)


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
