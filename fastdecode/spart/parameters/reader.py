"""Parameters: those of a model, made of a checkpoint's tensors.

Each parameter is made from its tensors in the mapped files, converted, quantised or packed on the way, so memory never
holds more than one linear, or one block that is calibrated, besides the parameters.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence

import torch

from fastdecode.spart.checkpoints.rounded import RoundedWriter
from fastdecode.spart.checkpoints.tensors import Checkpoint
from fastdecode.spart.decoder.weights import Weights
from fastdecode.spart.int4.gptq import quantise_head
from fastdecode.spart.linears.base import Embedding, Linear
from fastdecode.spart.linears.dense import make_dense, make_embedding
from fastdecode.spart.linears.experts import ExpertLinears
from fastdecode.spart.linears.heads import HeadLinears, make_heads
from fastdecode.spart.linears.quantised import BITS, Quantised, activation_bits
from fastdecode.spart.linears.rounding import quantise
from fastdecode.spart.linears.stack import make_experts, make_linear, quantised_embedding, tied_quantised
from fastdecode.spart.lora.adapters import AdaptedLinear, AdapterSet
from fastdecode.spart.parameters.progress import LoadProgress


class Parameters:
    """The ParameterReader that makes parameters from a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        weights: str,
        adapters: AdapterSet,
        progress: LoadProgress,
        writer: RoundedWriter | None = None,
    ):
        """`weights` and `writer` as in load_model. `progress` counts numbers of the checkpoint."""
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        self._bits, self._as_stored, self._heads_as_stored = BITS.get(weights), weights == "auto", weights != "dense"
        self._activation_bits = activation_bits(device)
        self._adapters, self._progress = adapters, progress
        self._writer = writer

    def _matrices(self, name: str) -> list[torch.Tensor | Quantised]:
        """A linear's or embedding's weight, rows over rows: several matrices only if all are quantised."""
        matrices = [self._in_form(matrix) for matrix in self._checkpoint.matrices(f"{name}.weight")]
        floats = [matrix for matrix in matrices if isinstance(matrix, torch.Tensor)]
        return [torch.cat(floats)] if len(floats) > 1 else matrices

    def _in_form(self, matrix: torch.Tensor | Quantised) -> torch.Tensor | Quantised:
        return matrix.dequantise() if isinstance(matrix, Quantised) and not self._as_stored else matrix

    def tensor(self, name: str, *shape: int, offset: float = 0.0, single: bool = False) -> torch.Tensor:
        self._progress.update(math.prod(shape))
        dtype = torch.float32 if single else self._dtype
        stored = self._checkpoint.tensor(name)
        if offset:
            return (stored.float() + offset).to(self._device, dtype)
        # A copy, because the checkpoint's tensor may be a view of the file.
        return stored.to(self._device, dtype, copy=True)

    def absorbed(self, name: str, heads: int, k_size: int, v_size: int, rank: int) -> tuple[HeadLinears, HeadLinears]:
        matrices = self._checkpoint.absorbed(f"{name}.weight", heads, k_size)
        k, v = (make_heads(each, self._device, self._dtype, self._heads_as_stored) for each in matrices)
        self._progress.update(heads * (k_size + v_size) * rank)
        return k, v

    def linear(
        self,
        names: Sequence[str],
        outs: Sequence[int],
        width: int,
        bias: bool,
        head: bool = False,
        layer: bool = False,
        precise: int | None = None,
    ) -> Linear:
        matrices = [matrix for name in names for matrix in self._matrices(name)]
        vector = (
            torch.cat([self.tensor(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)])
            if bias
            else None
        )
        floats = [matrix for matrix in matrices if isinstance(matrix, torch.Tensor)]
        if not self._bits:
            linear = make_linear(matrices, vector, self._device, self._dtype)
        elif head:
            linear = self._rounded_head(names[0], floats[0])
        else:
            bits = [8 if i == precise else self._bits for i in range(len(floats))]
            linear = self._rounded(dict(zip(names, floats, strict=True)), bits, vector, layer)
        self._progress.update(sum(outs) * width)
        return_free_memory()
        change = self._adapters.change(names, outs, width, self._device, self._dtype)
        return linear if change is None else AdaptedLinear(linear, change)

    def _rounded(
        self, weights: Mapping[str, torch.Tensor], bits: Sequence[int], bias: torch.Tensor | None, layer: bool
    ) -> Linear:
        """The linear of float matrices, by the names of their modules. The i-th gets bits[i]. `layer`: it belongs to a
        transformer block."""
        rounded = [quantise(matrix, n, self._activation_bits) for matrix, n in zip(weights.values(), bits, strict=True)]
        self._keep(row_counts(weights), rounded)
        return make_linear(rounded, bias, self._device, self._dtype)

    def _keep(self, sizes: Mapping[str, int], rounded: Sequence[Quantised]) -> None:
        """Let the writer have the rounded matrices of linears; see RoundedWriter.add."""
        if self._writer is not None:
            self._writer.add(sizes, rounded)

    def _rounded_head(self, name: str, matrix: torch.Tensor) -> Linear:
        """The LM head of a float matrix."""
        return make_linear(self._head_matrices(name, matrix), None, self._device, self._dtype)

    def _rounded_tied(self, name: str, matrix: torch.Tensor) -> tuple[Embedding, Linear]:
        """The embedding and the LM head of one float matrix."""
        return tied_quantised(self._head_matrices(name, matrix), self._device, self._dtype)

    def _head_matrices(self, name: str, matrix: torch.Tensor, moments: torch.Tensor | None = None) -> list[Quantised]:
        """The matrix of an LM head, rounded; see quantise_head."""
        assert self._bits is not None
        rounded = quantise_head(matrix, self._bits, moments, self._activation_bits)
        self._keep(row_counts({name: matrix}), rounded)
        return rounded

    def block_read(self, weights: Weights, index: int) -> None:
        """Does nothing."""

    def experts(self, names: Sequence[str], outs: Sequence[int], width: int, n: int, bias: bool) -> ExpertLinears:
        biases = self._expert_biases(names, outs, n) if bias else None
        experts = make_experts(
            ((self._expert(names, outs, e), None if biases is None else biases[e]) for e in range(n)),
            self._device,
            self._dtype,
        )
        self._progress.update(n * sum(outs) * width)
        return_free_memory()
        return experts

    def _expert_biases(self, names: Sequence[str], outs: Sequence[int], n: int) -> torch.Tensor:
        """The biases of all experts [n, sum of outs]."""
        if "{e}" in names[0]:
            ends = [(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)]
            own = [[self.tensor(name.replace("{e}", str(e)), out) for name, out in ends] for e in range(n)]
            return torch.stack([torch.cat(each) for each in own])
        biases = self.tensor(f"{names[0]}_bias", n, sum(outs))
        return biases[:, _in_turn(sum(outs)).to(self._device)] if len(outs) > 1 else biases

    def _expert(self, names: Sequence[str], outs: Sequence[int], index: int) -> list[torch.Tensor | Quantised]:
        """The matrices of an expert, rows over rows."""
        if "{e}" in names[0]:
            own = [name.replace("{e}", str(index)) for name in names]
            return [self._rounded_one(f"{name}.weight", matrix) for name in own for matrix in self._matrices(name)]
        stored = self._in_form(self._checkpoint.expert(names[0], index))
        matrix = self._rounded_one(f"{names[0]}.{index}", stored)
        if len(outs) > 1:  # columns of gate and up alternate in the checkpoint
            order = _in_turn(sum(outs))
            matrix = matrix.select_rows(order) if isinstance(matrix, Quantised) else matrix[order]
        return [matrix]

    def _rounded_one(self, name: str, matrix: torch.Tensor | Quantised) -> torch.Tensor | Quantised:
        """The matrix `name`, which is not calibrated, in the form of `weights`."""
        if self._bits and isinstance(matrix, torch.Tensor):
            matrix = quantise(matrix, self._bits, self._activation_bits)
            self._keep({name: len(matrix.q)}, [matrix])
        return matrix

    def embedding(self, name: str, rows: int, width: int) -> Embedding:
        matrices = [self._rounded_one(f"{name}.weight", matrix) for matrix in self._matrices(name)]
        self._progress.update(rows * width)
        if isinstance(matrices[0], torch.Tensor):
            return make_embedding(matrices[0].to(self._device, copy=True), self._dtype)
        return quantised_embedding(_quantised(matrices), self._device, self._dtype)

    def tied(self, name: str, rows: int, width: int) -> tuple[Embedding, Linear]:
        matrices = self._matrices(name)
        self._progress.update(rows * width)
        if not isinstance(matrices[0], torch.Tensor):
            return tied_quantised(_quantised(matrices), self._device, self._dtype)
        if self._bits:
            return self._rounded_tied(name, matrices[0])
        weight = matrices[0].to(self._device, self._dtype, copy=True)
        return make_embedding(weight, self._dtype), make_dense(weight)


def row_counts(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The rows of the weights of modules, by the names of the weights."""
    return {f"{name}.weight": len(matrix) for name, matrix in weights.items()}


def _quantised(matrices: Sequence[torch.Tensor | Quantised]) -> list[Quantised]:
    return [matrix for matrix in matrices if isinstance(matrix, Quantised)]


def _in_turn(n: int) -> torch.Tensor:
    """The even numbers below n, then the odd ones."""
    return torch.cat([torch.arange(0, n, 2), torch.arange(1, n, 2)])


def return_free_memory() -> None:
    """Give the heap's free pages back to the OS. Otherwise the memory that was needed to make a linear stays in
    holes of the heap between the linears, as much as a third of the model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
