"""A model's parameters on its device, in the form that the decoder multiplies with.

`Blueprint` knows which tensors of a checkpoint make up which parameter; a `ParameterReader` brings the tensors.
Matrices that multiply the same rows are stacked into one linear: Q over K over V, gate over up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fastdecode.spart.config import ModelConfig
from fastdecode.spart.linears.base import Embedding, Linear
from fastdecode.spart.served import ServedModel


@dataclass(slots=True)
class Norm:
    """The parameters of a norm, [hidden_size]. Both None: rows are only normalised. RMS norms have no bias."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(slots=True)
class Layer:
    """One transformer block. The rows of `qkv` are Q heads, K heads, V heads; those of `up` are gate, up if it is
    gated."""

    attention_norm: Norm
    qkv: Linear
    q_norm: torch.Tensor | None  # [head_size]
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


@dataclass(slots=True)
class Weights:
    """All parameters of a model."""

    embedding: Embedding  # rows of embed_size
    positions: torch.Tensor | None  # [position_offset + max_positions, hidden_size]
    project_in: Linear | None
    layers: list[Layer]
    final_norm: Norm | None
    project_out: Linear | None
    head: Linear


@dataclass(slots=True)
class Model(ServedModel):
    """A loaded checkpoint."""

    config: ModelConfig
    weights: Weights
    device: torch.device
    dtype: torch.dtype  # of activations, and of weights that are not quantised
    parameters: int  # how many numbers the checkpoint has; a tied head counts once
    weight_bytes: int  # memory that the linears and embeddings take
    adapters: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelConfig:
        return self.config

    @property
    def widths(self) -> tuple[int, int]:
        return self.config.hidden_size, self.config.intermediate_size * (2 if self.config.gated else 1)


class ParameterReader(Protocol):
    """Makes parameters of a checkpoint's tensors, whose names end in ".weight" or ".bias"."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor `name` in the activation dtype."""

    def linear(self, names: Sequence[str], outs: Sequence[int], width: int, bias: bool, head: bool = False) -> Linear:
        """The linears `names` as one, stacked in that order; the i-th is [outs[i], width]. `head`: the LM head."""

    def embedding(self, name: str, rows: int, width: int) -> Embedding:
        """The embedding `name`, [rows, width]."""

    def tied(self, name: str, rows: int, width: int) -> tuple[Embedding, Linear]:
        """The embedding `name`, [rows, width], and the LM head with the same weight."""


class Blueprint:
    """Asks a reader for every parameter of a configuration, each once.

    `own_head`: the LM head is a parameter of its own. A checkpoint may bring a head though its config says tied, so
    this is not ModelConfig.tied.
    """

    def __init__(self, config: ModelConfig, own_head: bool):
        self._config, self._own_head = config, own_head

    def weights(self, reader: ParameterReader) -> Weights:
        c, names = self._config, self._config.names
        if self._own_head:
            embedding = reader.embedding(names.embedding, c.vocab_size, c.embed_size)
            head = reader.linear([names.head], [c.vocab_size], c.embed_size, bias=False, head=True)
        else:
            embedding, head = reader.tied(names.embedding, c.vocab_size, c.embed_size)
        positions = c.position_offset + c.max_positions
        return Weights(
            embedding=embedding,
            positions=reader.tensor(f"{names.positions}.weight", positions, c.hidden_size) if names.positions else None,
            project_in=self._projection(reader, names.project_in, c.hidden_size, c.embed_size),
            layers=[self._layer(reader, names.block.replace("{i}", str(i))) for i in range(c.n_layers)],
            final_norm=self._norm(reader, names.final_norm) if c.final_norm else None,
            project_out=self._projection(reader, names.project_out, c.embed_size, c.hidden_size),
            head=head,
        )

    def _layer(self, reader: ParameterReader, block: str) -> Layer:
        """The parameters of the block whose tensors' names begin with `block`."""
        c, names = self._config, self._config.names
        q_size, kv_size = c.n_q_heads * c.head_size, c.n_kv_heads * c.head_size
        qkv, up = [f"{block}{name}" for name in names.qkv], [f"{block}{name}" for name in names.up]
        up_sizes = [c.intermediate_size] * (2 if c.gated else 1)
        return Layer(
            attention_norm=self._norm(reader, f"{block}{names.attention_norm}"),
            qkv=_linear(reader, qkv, [q_size, kv_size, kv_size], c.hidden_size, c.qkv_bias),
            q_norm=reader.tensor(f"{block}{names.q_norm}.weight", c.head_size) if c.qk_norm else None,
            k_norm=reader.tensor(f"{block}{names.k_norm}.weight", c.head_size) if c.qk_norm else None,
            o=_linear(reader, [f"{block}{names.o}"], [c.hidden_size], q_size, c.o_bias),
            mlp_norm=self._norm(reader, f"{block}{names.mlp_norm}"),
            up=_linear(reader, up, up_sizes, c.hidden_size, c.mlp_bias),
            down=_linear(reader, [f"{block}{names.down}"], [c.hidden_size], c.intermediate_size, c.mlp_bias),
        )

    def _projection(self, reader: ParameterReader, name: str | None, out: int, width: int) -> Linear | None:
        """A projection between embedding and hidden size; None if these are equal."""
        if out == width:
            return None
        assert name is not None, "the family's TensorNames has no projection"
        return _linear(reader, [name], [out], width)

    def _norm(self, reader: ParameterReader, name: str) -> Norm:
        c = self._config
        if not c.norm_affine:
            return Norm(None, None)
        weight = reader.tensor(f"{name}.weight", c.hidden_size)
        return Norm(weight, reader.tensor(f"{name}.bias", c.hidden_size) if c.norm == "layer" else None)


def _linear(reader: ParameterReader, names: list[str], outs: list[int], width: int, bias: bool = False) -> Linear:
    """The linear of `names`. A single name means that the checkpoint stores the whole stack as one tensor."""
    return reader.linear(names, outs if len(names) == len(outs) else [sum(outs)], width, bias)
