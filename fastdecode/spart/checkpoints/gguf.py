"""The tensors of GGUF files as a Checkpoint.

A quantised tensor stays in 4 or 8 bits: Q4_0, Q4_1, Q4_K, MXFP4, Q8_0 and Q5 number by number; Q6_K and the other types
rounded to 8 bits in groups of 32. The layouts of blocks are those of ggml's quants. What llama.cpp does to the tensors
of each architecture, and how it is undone, is in gguf_layouts.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastdecode.gguf.file import GGUFFile, GGUFTensor
from fastdecode.spart.checkpoints.config import CheckpointError, ModelConfig, TensorNames
from fastdecode.spart.checkpoints.gguf_layouts import Part, find_parts
from fastdecode.spart.checkpoints.mxfp4 import mxfp4
from fastdecode.spart.checkpoints.tensors import Checkpoint, require_finite
from fastdecode.spart.linears.quantised import GROUP, HeadMatrices, Quantised, concatenate
from fastdecode.spart.linears.rounding import quantise

#: Divisors of RoPE's frequencies (Llama 3.1 and later), which are a part of the model's configuration.
ROPE_FACTORS = "rope_freqs.weight"


class GGUFCheckpoint(Checkpoint):
    """The tensors of a GGUF file."""

    def __init__(self, file: GGUFFile, config: ModelConfig):
        tensors = {name: tensor for name, tensor in file.tensors.items() if name != ROPE_FACTORS}
        self._parts = find_parts(tensors, file.fields["general.architecture"], config)

    def names(self) -> set[str]:
        return set(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts[name]
        for tensor in (part.tensor, part.v_heads):
            if tensor is not None:
                check_type(tensor)
        return part.shape

    def tensor(self, name: str) -> torch.Tensor:
        part = self._parts[name]
        values = _numbers(part.tensor)
        if part.v_heads is not None:
            values = torch.cat([values.transpose(1, 2), _numbers(part.v_heads)], dim=1).flatten(0, 1)
        values = values if part.reshaped is None else values.reshape(part.reshaped)
        values = values if part.rows is None else values[part.rows]
        values = values if part.inputs is None else values[:, part.inputs]
        return _logarithm(part, values) if part.negative_exp else values

    def matrix(self, name: str) -> torch.Tensor | Quantised:
        part = self._parts[name]
        if part.tensor.type.name in FLOATS:
            return self.tensor(name)
        matrix = unpack_matrix(part.tensor)
        matrix = matrix if part.rows is None else matrix.select_rows(part.rows)
        return matrix if part.inputs is None else matrix.select_inputs(part.inputs)

    def absorbed(self, name: str, heads: int, k_size: int) -> tuple[HeadMatrices, HeadMatrices]:
        part = self._parts[name]
        if part.v_heads is None:  # a file from before llama.cpp absorbed them
            return super().absorbed(name, heads, k_size)
        return _by_heads(part.tensor), _by_heads(part.v_heads)

    def head_differs(self, names: TensorNames) -> bool:
        return f"{names.head}.weight" in self._parts

    @property
    def quantisation(self) -> str | None:
        kinds = {part.tensor.type.name for part in self._parts.values()} - FLOATS.keys()
        return f"GGUF {', '.join(sorted(kinds))}" if kinds else None


def _by_heads(tensor: GGUFTensor) -> HeadMatrices:
    """The matrices of a tensor [heads, out, in]."""
    if tensor.type.name in FLOATS:
        return float_tensor(tensor)
    heads, outs, _ = tensor.shape
    matrix = unpack_matrix(tensor)
    return [matrix.select_rows(slice(i * outs, (i + 1) * outs)) for i in range(heads)]


def _numbers(tensor: GGUFTensor) -> torch.Tensor:
    """A tensor of any type; a quantised one is dequantised."""
    if tensor.type.name in FLOATS:
        return float_tensor(tensor)
    return unpack_matrix(tensor).dequantise().view(tensor.shape)


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
