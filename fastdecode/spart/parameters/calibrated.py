"""CalibratedParameters: parameters that are rounded to 4 bits for the inputs that a text brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fastdecode.spart.checkpoints.config import ModelConfig
from fastdecode.spart.decoder.weights import AttentionBlock, Model, Weights
from fastdecode.spart.int4.calibration import MOST_INPUTS, CalibratedLinear, Calibration
from fastdecode.spart.linears.base import Embedding, Linear
from fastdecode.spart.linears.dense import DenseEmbedding, DenseLinear
from fastdecode.spart.linears.stack import make_linear, tied_quantised
from fastdecode.spart.parameters.reader import Parameters, return_free_memory, row_counts


class CalibratedParameters(Parameters):
    """Parameters that are rounded to 4 bits for the inputs that a text brings (int4/calibration.py).

    The LM head stays as it is in the checkpoint until all blocks are read.
    """

    def __init__(self, config: ModelConfig, tokens: Sequence[int], *made: Any):
        """`tokens` are those of the text; `made` are the arguments of Parameters."""
        super().__init__(*made)
        self._config, self._tokens = config, tokens
        self._calibration: Calibration | None = None
        self._head: torch.Tensor | None = None  # None: the checkpoint's own is in few bits
        self._head_name = ""
        self._tied = False

    def _rounded(
        self, weights: Mapping[str, torch.Tensor], bits: Sequence[int], bias: torch.Tensor | None, layer: bool
    ) -> Linear:
        matrices = [*weights.values()]
        if layer and matrices[0].shape[1] <= MOST_INPUTS:
            keep = partial(self._keep, row_counts(weights))  # and not the weights themselves, which take memory
            return CalibratedLinear(matrices, bits, bias, self._device, self._dtype, keep)
        return super()._rounded(weights, bits, bias, layer)

    def _rounded_head(self, name: str, matrix: torch.Tensor) -> Linear:
        self._head_name, self._head = name, matrix.to(self._device, self._dtype)
        return DenseLinear(self._head)

    def _rounded_tied(self, name: str, matrix: torch.Tensor) -> tuple[Embedding, Linear]:
        head, self._tied = self._rounded_head(name, matrix), True
        assert self._head is not None
        return DenseEmbedding(self._head, self._dtype), head

    def block_read(self, weights: Weights, index: int) -> None:
        """Round the block, and after the last one the LM head."""
        if self._calibration is None:
            model = Model(
                config=self._config,
                weights=weights,
                device=self._device,
                dtype=self._dtype,
                parameters=0,
                weight_bytes=0,
            )
            self._calibration = Calibration(model, self._tokens)
        block = weights.blocks[index]
        assert isinstance(block, AttentionBlock), "a model whose blocks keep states is not calibrated"
        self._calibration.pass_block(index, block)
        return_free_memory()
        if index == self._config.n_blocks - 1:
            self._settle_head(weights, self._calibration)
            self._calibration = None

    def _settle_head(self, weights: Weights, calibration: Calibration) -> None:
        """Round the LM head for the inputs that the blocks give it."""
        if self._head is None:
            return
        matrices = self._head_matrices(self._head_name, self._head, calibration.head_moments())
        if self._tied:
            weights.embedding, weights.head = tied_quantised(matrices, self._device, self._dtype)
        else:
            weights.head = make_linear(matrices, None, self._device, self._dtype)
        self._head = None
