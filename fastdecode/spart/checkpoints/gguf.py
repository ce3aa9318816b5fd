"""Models in GGUF files: their hyper-parameters as a ModelConfig, their tensors as a Checkpoint.

A quantised tensor stays in 4 or 8 bits: Q4_0, Q4_1, Q4_K, MXFP4, Q8_0 and Q5 are kept number by number; Q6_K and the
other types are rounded to 8 bits in groups of 32. The layouts of blocks are those of ggml's quants.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fastdecode.gguf.file import GGUFFile, GGUFTensor
from fastdecode.spart.checkpoints.config import CheckpointError, ModelConfig, Rope, TensorNames
from fastdecode.spart.checkpoints.families import make_config
from fastdecode.spart.checkpoints.mxfp4 import mxfp4
from fastdecode.spart.checkpoints.tensors import Checkpoint
from fastdecode.spart.linears.quantised import GROUP, Quantised, concatenate, quantise

#: The native family of each `general.architecture`.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
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
#: More such keys, which only these architectures' families read.
_FAMILY_KEYS = {
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
#: Architectures whose files hold Q and K with RoPE's pairs side by side, where Hugging Face has halves.
_INTERLEAVED = ("llama", "granite")
_ROPE_FACTORS = "rope_freqs.weight"
_ROWS = 4096  # unpacked at a time

_NAMES = TensorNames(
    embedding="token_embd",
    block="blk.{i}.",
    attention_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    o="attn_output",
    mlp_norm="ffn_norm",
    up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    final_norm="output_norm",
    head="output",
)
_PHI3_NAMES = replace(_NAMES, qkv=("attn_qkv",), up=("ffn_up",))


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model of a GGUF file. Raises CheckpointError for a key or an architecture that is not understood, by name."""
    fields, tensors = file.fields, file.tensors
    architecture = fields.get("general.architecture")
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"{file.path}: architecture {architecture!r} is not known; known are {', '.join(FAMILIES)}"
        )
    if fields.get("split.count", 1) > 1:
        raise CheckpointError(f"{file.path} is one of {fields['split.count']} parts; join them with llama-gguf-split")
    meta = {key.removeprefix(f"{architecture}."): v for key, v in fields.items() if key.startswith(f"{architecture}.")}
    keys = _KEYS | _FAMILY_KEYS.get(architecture, {})
    if unknown := sorted(key for key in meta if key not in keys and key not in _OTHER_KEYS):
        raise CheckpointError(f"{file.path}: the key {architecture + '.' + unknown[0]!r} is not understood")
    raw: dict[str, Any] = {name: meta[key] for key, name in keys.items() if key in meta}
    if "token_embd.weight" not in tensors or "num_attention_heads" not in raw:
        raise CheckpointError(
            f"{file.path} holds no language model: it lacks 'token_embd.weight' or the number of heads"
        )
    raw |= {
        "architectures": [FAMILIES[architecture]],
        "dtype": _dtype(tensors),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": f"{_NAMES.head}.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [fields[key] for key in _END_TOKENS if key in fields],
        "rope_scaling": _rope_scaling(meta),
    }
    config = make_config(raw)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.get(key, config.head_size) != config.head_size:
            raise CheckpointError(f"{file.path}: {architecture}.{key} is {meta[key]}, the head size {config.head_size}")
    return replace(
        config,
        names=_PHI3_NAMES if architecture == "phi3" else _NAMES,
        rope=_rope(file, config),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
    )


_END_TOKENS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]


def _dtype(tensors: dict[str, GGUFTensor]) -> str:
    """The dtype of the matrices that are not quantised. fp16 if all are quantised: a GPU then computes in fp16."""
    kinds = {tensor.type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    return "bfloat16" if kinds == {"BF16"} else "float32" if kinds == {"F32"} else "float16"


def _rope_scaling(own: dict[str, Any]) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
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
    return Rope(config.rope.theta, "factors", factors=tuple(factors.tolist()))


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file."""

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self._tensors = {name: tensor for name, tensor in file.tensors.items() if name != _ROPE_FACTORS}
        self._file = file
        self._heads: dict[str, int] = {}  # of Q and K
        if file.fields["general.architecture"] in _INTERLEAVED:
            for i in range(config.n_layers):
                for end in ("weight", "bias"):
                    self._heads[f"blk.{i}.attn_q.{end}"] = config.n_q_heads
                    self._heads[f"blk.{i}.attn_k.{end}"] = config.n_kv_heads

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors[name]
        if tensor.type.name not in _UNPACKERS and tensor.type.name not in _FLOATS:
            _library(tensor)
        return tensor.shape

    def tensor(self, name: str) -> torch.Tensor:
        values = float_tensor(self._tensors[name])
        return values[self._order(name, len(values))] if name in self._heads else values

    def matrix(self, name: str) -> torch.Tensor | Quantised:
        tensor = self._tensors[name]
        if tensor.type.name in _FLOATS:
            return self.tensor(name)
        blocks = tensor.blocks
        matrix = concatenate([_unpack(tensor, blocks[i : i + _ROWS]) for i in range(0, len(blocks), _ROWS)])
        return matrix.select_rows(self._order(name, len(matrix.q))) if name in self._heads else matrix

    def head_differs(self, names: TensorNames) -> bool:
        return f"{names.head}.weight" in self._tensors

    @property
    def quantisation(self) -> str | None:
        kinds = {tensor.type.name for tensor in self._tensors.values() if tensor.type.name not in _FLOATS}
        return f"GGUF {', '.join(sorted(kinds))}" if kinds else None

    def _order(self, name: str, rows: int) -> torch.Tensor:
        """The file's row for each of ours: RoPE's pairs lie side by side in the file, half a head apart in ours."""
        heads = self._heads[name]
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def float_tensor(tensor: GGUFTensor) -> torch.Tensor:
    """A tensor in F32, F16 or BF16. Raises CheckpointError for another type."""
    if tensor.type.name not in _FLOATS:
        raise CheckpointError(f"tensor {tensor.name!r} is stored as {tensor.type.name}, not as F32, F16 or BF16")
    # A copy, because the mapped file is read-only and torch has no such tensors.
    return torch.from_numpy(tensor.data.copy()).view(_FLOATS[tensor.type.name]).view(tensor.shape)


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


_UNPACKERS = {
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


def _unpack(tensor: GGUFTensor, blocks: np.ndarray) -> Quantised:
    """Rows of a tensor: uint8 [rows, blocks, bytes]."""
    if unpack := _UNPACKERS.get(tensor.type.name):
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
