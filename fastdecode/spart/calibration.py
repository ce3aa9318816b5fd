"""Calibration: blocks are rounded to 4 bits as they are loaded, for the inputs that a text's tokens bring them.

Rounded one by one, weights of 4 bits cost a small model much of its quality. Here tokens pass through a block before it
is rounded, and GPTQ (linears/compensated.py) makes the error small for such inputs; then they pass
through the rounded block, so that the next block is fitted to the errors of those before it. Only one block is in
memory in 16 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fastdecode.spart.decoder import SPart
from fastdecode.spart.linears.base import Linear
from fastdecode.spart.linears.compensated import quantise_compensated
from fastdecode.spart.linears.quantised import ACTIVATION_BITS, Quantised, quantise
from fastdecode.spart.linears.stack import make_linear
from fastdecode.spart.probe import prompt_state, sequences_of
from fastdecode.spart.weights import Layer, Model

#: Wider inputs are rounded without calibration: their second moments take too much memory.
MOST_INPUTS = 16384
#: The most sequences that pass through the blocks.
_SEQUENCES = 20


class CalibratedLinear(Linear):
    """A linear that records the second moments of its inputs until `settle` rounds it."""

    __slots__ = ("_bias", "_bits", "_linear", "_moments", "_weights")

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        bits: Sequence[int],
        bias: torch.Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
    ):
        """`weights` [out_i, in] stand over one another; the i-th will have bits[i], 4 or 8, and equal ones are
        neighbours. `dtype` is that of activations."""
        self._weights = [weight.to(device, dtype) for weight in weights]
        self._bits, self._bias = bits, bias
        ins = weights[0].shape[1]
        self._moments = torch.zeros(ins, ins, device=device)
        self._linear: Linear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._linear is not None:
            return self._linear(x)
        inputs = x.float()
        self._moments.addmm_(inputs.mT, inputs)
        y = torch.cat([F.linear(x, weight) for weight in self._weights], 1)
        return y if self._bias is None else y.add_(self._bias)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights) if self._linear is None else self._linear.nbytes

    def settle(self) -> None:
        """Round the weights; those in float are freed."""
        parts: list[Quantised] = []
        for weight, bits in zip(self._weights, self._bits, strict=True):
            rounded = quantise(weight, 8, ACTIVATION_BITS) if bits == 8 else quantise_compensated(weight, self._moments)
            parts.append(rounded)
        device, dtype = self._weights[0].device, self._weights[0].dtype
        self._linear = make_linear(parts, self._bias, device, dtype)
        self._weights, self._moments = [], torch.empty(0)


class Calibration:
    """The tokens on their way through the blocks of a model that is being loaded."""

    def __init__(self, model: Model, tokens: Sequence[int]):
        """`model` has all weights before its blocks. `tokens` are those of a text."""
        self._spart = SPart(model, [])
        self._states = [
            prompt_state(self._spart, sequence) for sequence in sequences_of(model.config, tokens)[:_SEQUENCES]
        ]

    def settle(self, index: int, layer: Layer, linears: Sequence[CalibratedLinear]) -> None:
        """Round `linears`, those of the block `index`, and compute the next block's inputs."""
        before = [state.x.clone() for state in self._states]
        self._pass(index, layer)
        for linear in linears:
            linear.settle()
        for state, x in zip(self._states, before, strict=True):
            state.x = x
        self._pass(index, layer)

    def _pass(self, index: int, layer: Layer) -> None:
        for state in self._states:
            state.project(layer)
            state.attend_prompts(index)
            state.finish(layer)
