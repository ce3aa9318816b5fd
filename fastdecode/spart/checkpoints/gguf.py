"""Models in GGUF files: their hyper-parameters as a ModelConfig, their tensors as a Checkpoint.

A quantised tensor stays in 4 or 8 bits: Q4_0, Q4_1, Q4_K, MXFP4, Q8_0 and Q5 number by number; Q6_K and the other types
rounded to 8 bits in groups of 32. The layouts of blocks are those of ggml's quants. What llama.cpp does to the tensors
of each architecture, and how it is undone, is in gguf_layouts.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fastdecode.gguf.file import GGUFFile, GGUFTensor
from fastdecode.spart.checkpoints.config import CheckpointError, ModelConfig, Rope, TensorNames
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.checkpoints.gguf_layouts import NAMES, Part, find_parts, tensor_names
from fastdecode.spart.checkpoints.mxfp4 import mxfp4
from fastdecode.spart.checkpoints.tensors import Checkpoint, require_finite
from fastdecode.spart.linears.quantised import GROUP, Quantised, concatenate, quantise

#: The native family of each `general.architecture`; that of a mixture of experts, if it has another one.
FAMILIES = {
    "llama": ("LlamaForCausalLM", "MixtralForCausalLM"),
    "qwen2": ("Qwen2ForCausalLM", None),
    "qwen3": ("Qwen3ForCausalLM", None),
    "qwen3moe": (None, "Qwen3MoeForCausalLM"),
    "qwen3next": (None, "Qwen3NextForCausalLM"),
    "qwen35": ("Qwen3_5ForCausalLM", None),
    "qwen35moe": (None, "Qwen3_5MoeForCausalLM"),
    "phi3": ("Phi3ForCausalLM", None),
    "granite": ("GraniteForCausalLM", None),
}
#: Keys behind the architecture's name, and what config.json calls them.
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_DELTA_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
_SHARED_KEYS = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
#: More such keys, which only these architectures' families read.
_FAMILY_KEYS = {
    "llama": _EXPERT_KEYS,
    "qwen3moe": _EXPERT_KEYS,
    "qwen3next": _EXPERT_KEYS | _SHARED_KEYS | _DELTA_KEYS,
    "qwen35": _DELTA_KEYS,
    "qwen35moe": _EXPERT_KEYS | _SHARED_KEYS | _DELTA_KEYS,
    "phi3": {"attention.sliding_window": "sliding_window"},
    "granite": {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
}
#: Keys that repeat the tensors or the keys above, and keys that are read below.
_OTHER_KEYS = {
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}
#: The same for architectures with the gated delta rule. `rope.dimension_sections`: the three positions of images.
_DELTA_OTHER_KEYS = {"rope.dimension_sections", "ssm.inner_size", "attention.recurrent_layers", "nextn_predict_layers"}
#: The keys of RoPE's scaling, and what config.json calls them in `rope_scaling`.
_SCALING_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_ROPE_FACTORS = "rope_freqs.weight"


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model of a GGUF file. Raises CheckpointError for a key or an architecture that is not understood, by name."""
    fields, tensors = file.fields, file.tensors
    architecture = fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise CheckpointError(
            f"{file.path}: architecture {architecture!r} is not known; known are {', '.join(FAMILIES)}"
        )
    if (parts := _whole(file, fields, "split.count")) > 1:
        raise CheckpointError(f"{file.path} is one of {parts} parts; join them with llama-gguf-split")
    meta = {key.removeprefix(f"{architecture}."): v for key, v in fields.items() if key.startswith(f"{architecture}.")}
    keys = _KEYS | _FAMILY_KEYS.get(architecture, {})
    has_delta = "ssm.conv_kernel" in keys
    others = _OTHER_KEYS | _DELTA_OTHER_KEYS if has_delta else _OTHER_KEYS
    if unknown := sorted(key for key in meta if key not in keys and key not in others):
        raise CheckpointError(f"{file.path}: the key {architecture + '.' + unknown[0]!r} is not understood")
    raw: dict[str, Any] = {name: meta[key] for key, name in keys.items() if key in meta}
    if "token_embd.weight" not in tensors or "num_attention_heads" not in raw:
        raise CheckpointError(
            f"{file.path} holds no language model: it lacks 'token_embd.weight' or the number of heads"
        )
    family = FAMILIES[architecture][bool(raw.get("num_experts"))]
    if family is None:
        raise CheckpointError(f"{file.path}: {raw.get('num_experts', 0)} experts are not understood in {architecture}")
    raw |= {
        "architectures": [family],
        "dtype": _dtype(tensors),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": f"{NAMES.head}.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [fields[key] for key in _END_TOKENS if key in fields],
        "rope_scaling": _rope_scaling(file, architecture, meta),
        "norm_topk_prob": True,
    }
    drafts = _whole(file, meta, "nextn_predict_layers") if has_delta else 0
    if has_delta:
        raw |= _delta_config(file, meta, drafts)
    try:
        config = make_config(raw)
    except CheckpointError as error:
        raise CheckpointError(_in_terms_of(file, architecture, keys, str(error))) from None
    turned = config.rope.width(config.head_size) if config.rope else config.head_size
    for key, size in (("attention.value_length", config.head_size), ("rope.dimension_count", turned)):
        if meta.get(key, size) != size:
            raise CheckpointError(
                f"{file.path}: {architecture}.{key} is {meta[key]!r}, the head size {config.head_size}"
            )
    if config.delta is not None:
        by_head = any(name.endswith(".ssm_in.weight") for name in tensors)
        config = replace(config, delta=replace(config.delta, by_head=by_head), norm_offset=0.0)
    return replace(
        config,
        names=tensor_names(config, architecture, drafts),
        rope=_rope(file, config),
        qkv_bias=any(name.endswith(".attn_q.bias") for name in tensors),
        o_bias=any(name.endswith(".attn_output.bias") for name in tensors),
        mlp_bias=any(name.endswith(".ffn_down.bias") for name in tensors),
    )


_END_TOKENS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]


def _whole(file: GGUFFile, meta: dict[str, Any], key: str, default: int = 0) -> int:
    """A whole number. Raises CheckpointError."""
    value = meta.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"{file.path}: the key {key!r} is {value!r}, not a whole number")
    return value


def _in_terms_of(file: GGUFFile, architecture: str, keys: dict[str, str], sentence: str) -> str:
    """A sentence of make_config about config.json, with the GGUF file and its keys in place of config.json and its."""
    for key, name in (keys | _SCALING_KEYS).items():
        sentence = sentence.replace(repr(name), repr(f"{architecture}.{key}"))
    named = sentence.replace("config.json", str(file.path))
    return named if named != sentence else f"{file.path}: {sentence}"


def _delta_config(file: GGUFFile, meta: dict[str, Any], drafts: int) -> dict[str, Any]:
    """The keys of config.json in which llama.cpp says otherwise what blocks with the gated delta rule are like."""
    n_blocks = _whole(file, meta, "block_count") - drafts
    more: dict[str, Any] = {"num_hidden_layers": n_blocks}
    if v_heads := _whole(file, meta, "ssm.time_step_rank"):
        more["linear_value_head_dim"] = _whole(file, meta, "ssm.inner_size") // v_heads
    if (size := _whole(file, meta, "attention.key_length")) and (turned := _whole(file, meta, "rope.dimension_count")):
        more["partial_rotary_factor"] = turned / size
    recurrent = meta.get("attention.recurrent_layers")
    if isinstance(recurrent, list):
        more["layer_types"] = ["linear_attention" if each else "full_attention" for each in recurrent[:n_blocks]]
    return more


def _dtype(tensors: dict[str, GGUFTensor]) -> str:
    """The dtype of the matrices that are not quantised. Small ones are in F32 in every file. fp16 if all others are
    quantised: a GPU then computes in fp16."""
    kinds = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    return "float32" if kinds == {"F32"} else "bfloat16" if kinds - {"F32"} == {"BF16"} else "float16"


def _rope_scaling(file: GGUFFile, architecture: str, own: dict[str, Any]) -> dict[str, Any] | None:
    # A factor without a type is a linear one, as in llama.cpp.
    kind = own.get("rope.scaling.type", "linear" if own.get("rope.scaling.factor") else "none")
    if not isinstance(kind, str):
        raise CheckpointError(f"{file.path}: '{architecture}.rope.scaling.type' is {kind!r}, not a string")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    if original := own.get("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _rope(file: GGUFFile, config: ModelConfig) -> Rope | None:
    """RoPE with the divisors of frequencies that the file has (Llama 3.1 and later)."""
    if _ROPE_FACTORS not in file.tensors or config.rope is None:
        return config.rope
    factors = float_tensor(file.tensors[_ROPE_FACTORS])
    if config.rope.kind != "default" or tuple(factors.shape) != (config.head_size // 2,):
        raise CheckpointError(f"{file.path}: {_ROPE_FACTORS!r} does not fit the model's RoPE")
    if not bool((factors > 0).all()):
        raise CheckpointError(f"{file.path}: {_ROPE_FACTORS!r} is {factors.tolist()}, not positive numbers")
    return Rope(config.rope.theta, "factors", factors=tuple(factors.tolist()))


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file."""

    def __init__(self, file: GGUFFile, config: ModelConfig):
        tensors = {name: tensor for name, tensor in file.tensors.items() if name != _ROPE_FACTORS}
        self._parts = find_parts(tensors, file.fields["general.architecture"], config)

    def names(self) -> set[str]:
        return set(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts[name]
        check_type(part.tensor)
        return part.shape

    def tensor(self, name: str) -> torch.Tensor:
        part = self._parts[name]
        values = float_tensor(part.tensor)
        values = values.flatten() if part.negative_exp else values
        values = values if part.rows is None else values[part.rows]
        values = values if part.inputs is None else values[:, part.inputs]
        if part.negative_exp:
            values = _logarithm(part, values)
        return values if part.reshaped is None else values.reshape(part.reshaped)

    def matrix(self, name: str) -> torch.Tensor | Quantised:
        part = self._parts[name]
        if part.tensor.type.name in FLOATS:
            return self.tensor(name)
        matrix = unpack_matrix(part.tensor)
        matrix = matrix if part.rows is None else matrix.select_rows(part.rows)
        return matrix if part.inputs is None else matrix.select_inputs(part.inputs)

    def head_differs(self, names: TensorNames) -> bool:
        return f"{names.head}.weight" in self._parts

    @property
    def quantisation(self) -> str | None:
        kinds = {part.tensor.type.name for part in self._parts.values()} - FLOATS.keys()
        return f"GGUF {', '.join(sorted(kinds))}" if kinds else None


def _logarithm(part: Part, values: torch.Tensor) -> torch.Tensor:
    """x for values of -exp(x), computed in float64. Raises CheckpointError for positive values and NaN."""
    if not bool((values <= 0).all()):
        raise CheckpointError(f"tensor {part.tensor.name!r} has numbers that are not -exp(x) of any x")
    return values.double().neg().log().float()


_ROWS = 4096  # unpacked at a time

#: The types of tensors that are not quantised.
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def float_tensor(tensor: GGUFTensor) -> torch.Tensor:
    """A tensor in F32, F16 or BF16. Raises CheckpointError for another type."""
    if tensor.type.name not in FLOATS:
        raise CheckpointError(f"tensor {tensor.name!r} is stored as {tensor.type.name}, not as F32, F16 or BF16")
    # A copy, because the mapped file is read-only and torch has no such tensors.
    numbers = torch.from_numpy(tensor.data.copy()).view(FLOATS[tensor.type.name]).view(tensor.shape)
    return require_finite(numbers, tensor.name)


# -- blocks to Quantised: uint8 [rows, blocks, bytes] ------------------------------------------------------------------


def _half(data: np.ndarray) -> torch.Tensor:
    """fp16 in the last dimension's bytes -> fp32."""
    return torch.from_numpy(np.ascontiguousarray(data)).view(torch.float16).float()


def _bytes(data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(data))


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] -> their low halves, then their high halves [..., 2 n]."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _make(q: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None, zero: int, bits: int) -> Quantised:
    """q [rows, ...] and scales [rows, ...], in the order of inputs."""
    return Quantised(q.flatten(1), scales.flatten(1), None if mins is None else mins.flatten(1), zero, bits, GROUP)


def _q8_0(b: np.ndarray) -> Quantised:
    return _make(_bytes(b[..., 2:]) ^ 128, _half(b[..., :2]), None, 128, 8)


def _q4_0(b: np.ndarray) -> Quantised:
    return _make(_halves(_bytes(b[..., 2:])), _half(b[..., :2]), None, 8, 4)


def _q4_1(b: np.ndarray) -> Quantised:
    return _make(_halves(_bytes(b[..., 4:])), _half(b[..., :2]), _half(b[..., 2:4]), 0, 4)


def _mxfp4(b: np.ndarray) -> Quantised:
    return mxfp4(_halves(_bytes(b[..., 1:])).flatten(1), _bytes(b[..., 0]))


def _fifth_bits(b: np.ndarray) -> torch.Tensor:
    """4 bytes -> 32 numbers that are 16 where the bit is set."""
    return torch.from_numpy(np.unpackbits(b, axis=-1, bitorder="little")) << 4


def _q5_0(b: np.ndarray) -> Quantised:
    return _make(_halves(_bytes(b[..., 6:])) | _fifth_bits(b[..., 2:6]), _half(b[..., :2]), None, 16, 8)


def _q5_1(b: np.ndarray) -> Quantised:
    q = _halves(_bytes(b[..., 8:])) | _fifth_bits(b[..., 4:8])
    return _make(q, _half(b[..., :2]), _half(b[..., 2:4]), 0, 8)


def _k_scales(b: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of the 8 groups of a K block: two fp16 factors, then 6 bits of each in 12 bytes."""
    first, second, third = _bytes(b[..., 4:8]), _bytes(b[..., 8:12]), _bytes(b[..., 12:16])
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], dim=-1)
    mins = torch.cat([second & 63, third >> 4 | second >> 2 & 48], dim=-1)
    return _half(b[..., :2]) * scales, -_half(b[..., 2:4]) * mins


def _q4_k(b: np.ndarray) -> Quantised:
    scales, mins = _k_scales(b)
    q = _halves(_bytes(b[..., 16:]).unflatten(-1, (4, 32)))
    return _make(q, scales, mins, 0, 4)


def _q5_k(b: np.ndarray) -> Quantised:
    scales, mins = _k_scales(b)
    low = _halves(_bytes(b[..., 48:]).unflatten(-1, (4, 32))).flatten(-2).unflatten(-1, (8, 32))
    high = _bytes(b[..., 16:48])[..., None, :] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _make(low | high << 4, scales, mins, 0, 8)


def _q6_k(b: np.ndarray) -> Quantised:
    """Groups of 16, which the kernels do not have: rounded again, to 8 bits in groups of 32."""
    low = _bytes(b[..., :128]).unflatten(-1, (2, 1, 64)) >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 15
    high = (
        _bytes(b[..., 128:192]).unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    )
    q = (low.flatten(-3) | high.flatten(-3) << 4).unflatten(-1, (16, 16)).float() - 32
    scales = _bytes(b[..., 192:208]).view(torch.int8).float() * _half(b[..., 208:])
    return quantise((q * scales[..., None]).flatten(1), 8)


#: The functions that unpack a type's blocks.
UNPACKERS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "MXFP4": _mxfp4,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def check_type(tensor: GGUFTensor) -> None:
    """Raise CheckpointError for a tensor of a type that cannot be read."""
    if tensor.type.name not in FLOATS and tensor.type.name not in UNPACKERS:
        _library(tensor)


def unpack_matrix(tensor: GGUFTensor) -> Quantised:
    """A quantised matrix. Raises CheckpointError."""
    blocks = tensor.blocks
    matrix = concatenate([unpack_blocks(tensor, blocks[i : i + _ROWS]) for i in range(0, len(blocks), _ROWS)])
    for numbers in (matrix.scales, matrix.mins):
        if numbers is not None:
            require_finite(numbers, tensor.name)
    return matrix


def unpack_blocks(tensor: GGUFTensor, blocks: np.ndarray) -> Quantised:
    """Rows of a tensor: uint8 [rows, blocks, bytes]. Raises CheckpointError."""
    if unpack := UNPACKERS.get(tensor.type.name):
        try:
            return unpack(blocks)
        except ValueError as error:
            raise CheckpointError(f"tensor {tensor.name!r} is corrupt: {error}") from None
    library = _library(tensor)
    kind = library.GGMLQuantizationType[tensor.type.name]
    values = library.quants.dequantize(np.ascontiguousarray(blocks.reshape(len(blocks), -1)), kind)
    return quantise(torch.from_numpy(values), 8)


def _library(tensor: GGUFTensor) -> Any:
    """The package gguf, which unpacks the rarer types. Raises CheckpointError if it is missing or lacks the type."""
    try:
        import gguf
        from gguf import quants
    except ImportError:
        raise CheckpointError(
            f"tensor {tensor.name!r} is stored as {tensor.type.name}, for which the package gguf is needed: "
            "pip install 'fastdecode[gguf]'"
        ) from None
    if tensor.type.name not in {kind.name for kind in quants._type_traits}:
        raise CheckpointError(f"tensor {tensor.name!r} is stored as {tensor.type.name}, which is not supported")
    return gguf
