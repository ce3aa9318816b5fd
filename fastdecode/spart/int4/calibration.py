"""Calibration: blocks are rounded to 4 bits as they are loaded, for the inputs that a text's tokens bring them.

Rounded one by one, weights of 4 bits cost a small model much of its quality. Here all tokens of a text pass through the
blocks together. A linear is rounded when they reach it: GPTQ (int4/gptq.py) makes the error small for
such inputs. The rounded linear computes its outputs, so that every later one is fitted to the errors of those before
it. Only one block is in memory in 16 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from fastdecode.spart.decoder.layer_pass import DecoderLayers
from fastdecode.spart.decoder.weights import AttentionBlock, Model
from fastdecode.spart.int4.gptq import quantise_compensated, second_moments
from fastdecode.spart.int4.probe import prompt_pass, sequences_of
from fastdecode.spart.linears.base import Linear
from fastdecode.spart.linears.quantised import Quantised, activation_bits
from fastdecode.spart.linears.rounding import quantise
from fastdecode.spart.linears.stack import make_linear

#: Wider inputs are rounded without calibration: their second moments take too much memory.
MOST_INPUTS = 16384
#: The most sequences that pass through the blocks.
_SEQUENCES = 52


class CalibratedLinear(Linear):
    """A linear whose weights are rounded when it is first called, for the rows of that call."""

    __slots__ = ("_bias", "_bits", "_keep", "_linear", "_weights")

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        bits: Sequence[int],
        bias: torch.Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
        keep: Callable[[Sequence[Quantised]], None] = lambda rounded: None,
    ):
        """`weights` [out_i, in] stand over one another; the i-th will have bits[i], 4 or 8, and equal ones are
        neighbours. `dtype` is that of activations. `keep` gets the rounded matrices, rows over rows."""
        self._weights = [weight.to(device, dtype) for weight in weights]
        self._bits, self._bias, self._keep = bits, bias, keep
        self._linear: Linear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._linear is None:
            self._linear = self._rounded(x.float())
            self._weights = []
        return self._linear(x)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights) if self._linear is None else self._linear.nbytes

    def _rounded(self, x: torch.Tensor) -> Linear:
        activations = activation_bits(x.device)
        matrices: list[Quantised] = []
        for bits, members in groupby(zip(self._bits, self._weights, strict=True), key=lambda member: member[0]):
            weight = torch.cat([weight for _, weight in members])
            if bits == 8:
                matrices.append(quantise(weight, 8, activations))
            else:
                matrices.append(quantise_compensated(weight, second_moments(x), activations))
        self._keep(matrices)
        return make_linear(matrices, self._bias, weight.device, weight.dtype)


class Calibration:
    """The tokens on their way through the blocks of a model that is being loaded."""

    def __init__(self, model: Model, tokens: Sequence[int]):
        """`model` has all weights before its blocks. `tokens` are those of a text; the model knows some of them."""
        self._layers = DecoderLayers(model)
        self._pass = prompt_pass(self._layers, sequences_of(model.config, tokens)[:_SEQUENCES])

    def pass_block(self, index: int, layer: AttentionBlock) -> None:
        """Bring the tokens through the block `index`, which rounds its linears, to the next."""
        self._pass.project(layer)
        self._pass.attend_prompts(index)
        self._pass.finish(layer)

    def head_moments(self) -> torch.Tensor:
        """The second moments of the LM head's inputs, fp32 [embed_size, embed_size], after all blocks."""
        return second_moments(self._layers.head_inputs(self._pass.x).float())
