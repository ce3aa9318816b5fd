"""Parameters: those of a model, made of a checkpoint's tensors.

Each parameter is made from its tensors in the mapped files, converted, quantised or packed on the way, so memory never
holds more than one linear, or one block that is calibrated, besides the parameters.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from fastdecode.spart.checkpoints.tensors import Checkpoint
from fastdecode.spart.decoder.weights import Weights
from fastdecode.spart.int4.gptq import quantise_head
from fastdecode.spart.linears.base import Embedding, Linear
from fastdecode.spart.linears.dense import make_dense, make_embedding
from fastdecode.spart.linears.experts import ExpertLinears
from fastdecode.spart.linears.quantised import BITS, Quantised, activation_bits, quantise
from fastdecode.spart.linears.stack import make_experts, make_linear, quantised_embedding, tied_quantised
from fastdecode.spart.lora.adapters import AdaptedLinear, AdapterSet


class Parameters:
    """The ParameterReader that makes parameters from a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        weights: str,
        adapters: AdapterSet,
        progress: Any,
    ):
        """`weights` as in load_model. `progress` is a tqdm, which counts numbers of the checkpoint."""
        self._checkpoint, self._device, self._dtype = checkpoint, device, dtype
        self._bits, self._as_stored = BITS.get(weights), weights == "auto"
        self._activation_bits = activation_bits(device)
        self._adapters, self._progress = adapters, progress

    def _matrix(self, name: str) -> torch.Tensor | Quantised:
        return self._in_form(self._checkpoint.matrix(f"{name}.weight"))

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
        matrices = [self._matrix(name) for name in names]
        vector = (
            torch.cat([self.tensor(f"{name}.bias", out) for name, out in zip(names, outs, strict=True)])
            if bias
            else None
        )
        floats = [matrix for matrix in matrices if isinstance(matrix, torch.Tensor)]
        if not self._bits:
            linear = make_linear(matrices, vector, self._device, self._dtype)
        elif head:
            linear = self._rounded_head(floats[0])
        else:
            bits = [8 if i == precise else self._bits for i in range(len(floats))]
            linear = self._rounded(floats, bits, vector, layer)
        self._progress.update(sum(outs) * width)
        return_free_memory()
        change = self._adapters.change(names, outs, width, self._device, self._dtype)
        return linear if change is None else AdaptedLinear(linear, change)

    def _rounded(
        self, matrices: Sequence[torch.Tensor], bits: Sequence[int], bias: torch.Tensor | None, layer: bool
    ) -> Linear:
        """The linear of float matrices, the i-th of which gets bits[i]. `layer`: of a transformer block."""
        rounded = [quantise(matrix, n, self._activation_bits) for matrix, n in zip(matrices, bits, strict=True)]
        return make_linear(rounded, bias, self._device, self._dtype)

    def _rounded_head(self, matrix: torch.Tensor) -> Linear:
        """The LM head of a float matrix."""
        return make_linear(self._head_matrices(matrix), None, self._device, self._dtype)

    def _rounded_tied(self, matrix: torch.Tensor) -> tuple[Embedding, Linear]:
        """The embedding and the LM head of one float matrix."""
        return tied_quantised(self._head_matrices(matrix), self._device, self._dtype)

    def _head_matrices(self, matrix: torch.Tensor, moments: torch.Tensor | None = None) -> list[Quantised]:
        """The matrix of an LM head, rounded; see quantise_head."""
        assert self._bits is not None
        return quantise_head(matrix, self._bits, moments, self._activation_bits)

    def block_read(self, weights: Weights, index: int) -> None:
        """Does nothing."""

    def experts(self, names: Sequence[str], outs: Sequence[int], width: int, n: int, bias: bool) -> ExpertLinears:
        biases = self.tensor(f"{names[0]}_bias", n, sum(outs)) if bias else None
        if biases is not None and len(outs) > 1:
            biases = biases[:, _in_turn(sum(outs)).to(self._device)]
        experts = make_experts(
            ((self._expert(names, outs, e), None if biases is None else biases[e]) for e in range(n)),
            self._device,
            self._dtype,
        )
        self._progress.update(n * sum(outs) * width)
        return_free_memory()
        return experts

    def _expert(self, names: Sequence[str], outs: Sequence[int], index: int) -> list[torch.Tensor | Quantised]:
        """The matrices of an expert, rows over rows."""
        if "{e}" in names[0]:
            return [self._rounded_one(self._matrix(name.replace("{e}", str(index)))) for name in names]
        matrix = self._rounded_one(self._in_form(self._checkpoint.expert(names[0], index)))
        if len(outs) > 1:  # columns of gate and up alternate in the checkpoint
            order = _in_turn(sum(outs))
            matrix = matrix.select_rows(order) if isinstance(matrix, Quantised) else matrix[order]
        return [matrix]

    def _rounded_one(self, matrix: torch.Tensor | Quantised) -> torch.Tensor | Quantised:
        """A matrix that is not calibrated, in the form of `weights`."""
        if self._bits and isinstance(matrix, torch.Tensor):
            return quantise(matrix, self._bits, self._activation_bits)
        return matrix

    def embedding(self, name: str, rows: int, width: int) -> Embedding:
        matrix = self._rounded_one(self._matrix(name))
        self._progress.update(rows * width)
        if isinstance(matrix, Quantised):
            return quantised_embedding([matrix], self._device, self._dtype)
        return make_embedding(matrix.to(self._device, self._dtype, copy=True))

    def tied(self, name: str, rows: int, width: int) -> tuple[Embedding, Linear]:
        matrix = self._matrix(name)
        self._progress.update(rows * width)
        if isinstance(matrix, Quantised):
            return tied_quantised([matrix], self._device, self._dtype)
        if self._bits:
            return self._rounded_tied(matrix)
        weight = matrix.to(self._device, self._dtype, copy=True)
        return make_embedding(weight), make_dense(weight)


def _in_turn(n: int) -> torch.Tensor:
    """The even numbers below n, then the odd ones."""
    return torch.cat([torch.arange(0, n, 2), torch.arange(1, n, 2)])


def return_free_memory() -> None:
    """Give the heap's free pages back to the OS. Otherwise the memory that was needed to make a linear stays in
    holes of the heap between the linears, as much as a third of the model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
