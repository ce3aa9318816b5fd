"""Blueprint: which tensors of a checkpoint make up which parameter of a model. A ParameterReader brings the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fastdecode.spart.checkpoints.config import DeltaRule, Latent, ModelConfig
from fastdecode.spart.decoder.experts import MLP, Mixture, SharedExpert
from fastdecode.spart.decoder.latent import LatentAttention
from fastdecode.spart.decoder.weights import (
    AttentionBlock,
    Block,
    LatentLayer,
    Layer,
    MixtureNorms,
    MTPHead,
    Norm,
    PerLayerInput,
    PerLayerWeights,
    StateBlock,
    Weights,
)
from fastdecode.spart.linears.base import Embedding, Linear
from fastdecode.spart.linears.experts import ExpertLinears
from fastdecode.spart.linears.heads import HeadLinears
from fastdecode.spart.states.delta import DeltaWeights

#: The index of V among Q, K and V. The matrix of V is small and loses most in 4 bits.
_V = 2
#: One of this many blocks at each end of a model has a down projection that loses much in 4 bits.
_BLOCKS_OF_AN_END = 12


class ParameterReader(Protocol):
    """Makes parameters of a checkpoint's tensors, whose names end in ".weight" or ".bias"."""

    def tensor(self, name: str, *shape: int, offset: float = 0.0, single: bool = False) -> torch.Tensor:
        """The tensor `name` plus `offset`, in the activation dtype, or with `single` in fp32."""

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
        """The linears `names` as one, stacked in that order; the i-th is [outs[i], width]. `head`: the LM head.
        `layer`: of a transformer block. `precise`: the index of one that 8 bits serve better than 4."""

    def experts(self, names: Sequence[str], outs: Sequence[int], width: int, n: int, bias: bool) -> ExpertLinears:
        """The linears `names` of `n` experts, as `linear` for each of them; see TensorNames.expert_up."""

    def absorbed(self, name: str, heads: int, k_size: int, v_size: int, rank: int) -> tuple[HeadLinears, HeadLinears]:
        """The matrices `name`, [heads * (k_size + v_size), rank]: that of K of the first head, that of its V, and so
        on. The first result multiplies queries, the second O rows (LatentAttention)."""

    def embedding(self, name: str, rows: int, width: int) -> Embedding:
        """The embedding `name`, [rows, width]."""

    def block_read(self, weights: Weights, index: int) -> None:
        """The block `index`, the last one in weights.blocks so far, has all of its parameters."""

    def tied(self, name: str, rows: int, width: int) -> tuple[Embedding, Linear]:
        """The embedding `name`, [rows, width], and the LM head with the same weight."""


class Blueprint:
    """Asks a reader for every parameter of a configuration, each once.

    `own_head`: the LM head is a parameter of its own. A checkpoint may bring a head though its config says tied, so
    this is not ModelConfig.tied.
    """

    def __init__(self, config: ModelConfig, own_head: bool):
        self._config, self.own_head = config, own_head

    def weights(self, reader: ParameterReader) -> Weights:
        c, names = self._config, self._config.names
        if self.own_head:
            embedding = reader.embedding(names.embedding, c.vocab_size, c.embed_size)
            head = reader.linear([names.head], [c.vocab_size], c.embed_size, bias=False, head=True)
        else:
            embedding, head = reader.tied(names.embedding, c.vocab_size, c.embed_size)
        positions = c.position_offset + c.max_positions
        weights = Weights(
            embedding=embedding,
            positions=reader.tensor(f"{names.positions}.weight", positions, c.hidden_size) if names.positions else None,
            project_in=self._projection(reader, names.project_in, c.hidden_size, c.embed_size),
            blocks=[],
            final_norm=self._norm(reader, names.final_norm) if c.final_norm else None,
            project_out=self._projection(reader, names.project_out, c.embed_size, c.hidden_size),
            head=head,
            per_layer=self._per_layer(reader) if c.per_layer else None,
        )
        for i in range(c.n_blocks):
            weights.blocks.append(self._block(reader, i, len(weights.layers)))
            reader.block_read(weights, i)
        if c.mtp:
            weights.mtp = self._mtp(reader)
        return weights

    def _mtp(self, reader: ParameterReader) -> MTPHead:
        c, names = self._config, self._config.names.mtp
        assert names is not None, "ModelConfig.with_mtp has refused a model without such names"
        return MTPHead(
            embedding_norm=self._norm(reader, names.embedding_norm),
            hidden_norm=self._norm(reader, names.hidden_norm),
            fc=reader.linear([names.fc], [c.hidden_size], 2 * c.hidden_size, bias=False, layer=True),
            layer=self._attending(reader, names.block, c.experts is not None, c.n_layers - c.mtp, None),
            final_norm=self._norm(reader, names.final_norm),
        )

    def _block(self, reader: ParameterReader, index: int, layer: int) -> Block:
        """The block `index`, which is the layer `layer` if it attends."""
        c = self._config
        block = c.names.block.replace("{i}", str(index))
        has_experts = c.experts is not None and index not in c.experts.dense_layers
        if c.delta is not None and index in c.delta.blocks:
            common = self._common(reader, block, has_experts, index)
            return StateBlock(**common, delta=self._delta(reader, c.delta, block))
        return self._attending(reader, block, has_experts, layer, index)

    def _per_layer(self, reader: ParameterReader) -> PerLayerWeights:
        c, names = self._config, self._config.names.per_layer
        assert c.per_layer is not None and names is not None
        width = c.n_blocks * c.per_layer.size
        return PerLayerWeights(
            reader.embedding(names.table, c.per_layer.rows, width),
            reader.linear([names.projection], [width], c.hidden_size, bias=False, precise=0),
            reader.tensor(f"{names.norm}.weight", c.per_layer.size),
        )

    def _per_layer_input(self, reader: ParameterReader, block: str, index: int) -> PerLayerInput:
        c, names = self._config, self._config.names.per_layer
        assert c.per_layer is not None and names is not None
        return PerLayerInput(
            index,
            _block_linear(reader, [f"{block}{names.gate}"], [c.per_layer.size], c.hidden_size, bias=False),
            _block_linear(reader, [f"{block}{names.out}"], [c.hidden_size], c.per_layer.size, bias=False),
            self._norm(reader, f"{block}{names.post_norm}"),
        )

    def _common(self, reader: ParameterReader, block: str, has_experts: bool, index: int | None) -> dict[str, Any]:
        """The parameters that blocks of every kind have. `index` None: the block is that of an MTP head."""
        c, names = self._config, self._config.names
        return {
            "attention_norm": self._norm(reader, f"{block}{names.attention_norm}") if names.attention_norm else None,
            "attention_post_norm": self._norm(reader, f"{block}{names.attention_post_norm}") if c.post_norms else None,
            "mlp_norm": self._norm(reader, f"{block}{names.mlp_norm}") if names.mlp_norm else None,
            "mlp_post_norm": self._norm(reader, f"{block}{names.mlp_post_norm}") if c.post_norms else None,
            "mlp": self._mixture(reader, block) if has_experts else self._mlp(reader, block, index),
            "mixture_norms": self._mixture_norms(reader, block) if has_experts and names.mixture_norms else None,
            "per_layer": None if index is None or not c.per_layer else self._per_layer_input(reader, block, index),
            "scale": reader.tensor(f"{block}{names.block_scale}", 1) if names.block_scale else None,
        }

    def _attending(
        self, reader: ParameterReader, block: str, has_experts: bool, layer: int, index: int | None
    ) -> AttentionBlock:
        """The block that is layer `layer` of the links; `index` as for `_common`."""
        c, names, heads = self._config, self._config.names, self._config.heads_of(layer)
        if c.latent is not None:
            common = self._common(reader, block, has_experts, index)
            return LatentLayer(**common, heads=heads, latent=self._latent(reader, c.latent, block))
        q_size, kv_size = heads.n_q * heads.k_size, heads.n_kv * heads.k_size
        sizes = [2 * q_size if c.output_gate else q_size, kv_size, kv_size]
        qkv, v_in = [f"{block}{name}" for name in names.qkv], _V
        k_as_v, shares = layer in c.k_as_v_layers, c.kv_layers[layer] != layer
        if k_as_v:
            qkv, sizes, v_in = qkv[:_V], sizes[:_V], _V - 1
        if shares:
            qkv, sizes, heads = qkv[:1], sizes[:1], heads._replace(n_kv=0)
        k_norm = None
        if c.qk_norm and not shares:
            k_norm = self._head_norm(reader, f"{block}{names.k_norm}", heads.k_size, heads.n_kv)
        return Layer(
            **self._common(reader, block, has_experts, index),
            heads=heads,
            qkv=_block_linear(reader, qkv, sizes, c.hidden_size, c.qkv_bias, precise=v_in),
            q_norm=self._head_norm(reader, f"{block}{names.q_norm}", heads.k_size, heads.n_q) if c.qk_norm else None,
            k_norm=k_norm,
            v_norm=torch.ones_like(k_norm) if c.v_norm and k_norm is not None else None,
            o=_block_linear(reader, [f"{block}{names.o}"], [c.hidden_size], q_size, c.o_bias),
            sinks=reader.tensor(f"{block}{names.sinks}", heads.n_q) if names.sinks else None,
            second_rope=layer in c.second_rope_layers,
            k_as_v=k_as_v and not shares,
        )

    def _latent(self, reader: ParameterReader, latent: Latent, block: str) -> LatentAttention:
        c, names, n = self._config, self._config.names.latent, self._config.n_q_heads
        assert names is not None, "the family's TensorNames has no names for latent attention"
        q, sizes = names.q_a if latent.q_rank else names.q, [latent.q_rank or n * latent.q_size, latent.row_size]
        q_norm = of_queries = None
        if latent.q_rank:
            q_norm = reader.tensor(f"{block}{names.q_a_norm}.weight", latent.q_rank)
            of_queries = _block_linear(reader, [f"{block}{names.q_b}"], [n * latent.q_size], latent.q_rank, bias=False)
        k, v = reader.absorbed(f"{block}{names.kv_b}", n, latent.k_size, latent.v_size, latent.rank)
        return LatentAttention(
            config=latent,
            inputs=_block_linear(reader, [f"{block}{q}", f"{block}{names.kv_a}"], sizes, c.hidden_size, c.qkv_bias),
            q_norm=q_norm,
            q=of_queries,
            kv_norm=reader.tensor(f"{block}{names.kv_a_norm}.weight", latent.rank),
            k=k,
            v=v,
            o=_block_linear(reader, [f"{block}{c.names.o}"], [c.hidden_size], n * latent.v_size, c.o_bias),
        )

    def _delta(self, reader: ParameterReader, rule: DeltaRule, block: str) -> DeltaWeights:
        names, hidden = self._config.names.delta, self._config.hidden_size
        assert names is not None, "the family's TensorNames has no names for the rule"
        sizes = [rule.channels, rule.v_width, rule.v_heads, rule.v_heads]
        if rule.by_head:
            sizes = [rule.channels + rule.v_width, 2 * rule.v_heads]
        inputs = [f"{block}{name}" for name in names.inputs]
        return DeltaWeights(
            inputs=reader.linear(inputs, sizes, hidden, bias=False, layer=True),
            conv=reader.tensor(f"{block}{names.conv}.weight", rule.channels, 1, rule.kernel, single=True),
            decay=reader.tensor(f"{block}{names.decay}", rule.v_heads, single=True),
            decay_bias=reader.tensor(f"{block}{names.decay_bias}", rule.v_heads, single=True),
            norm=reader.tensor(f"{block}{names.norm}.weight", rule.v_size, single=True),
            out=reader.linear([f"{block}{names.out}"], [hidden], rule.v_width, bias=False, layer=True),
        )

    def _mlp(self, reader: ParameterReader, block: str, index: int | None) -> MLP:
        c, names = self._config, self._config.names
        size = c.intermediate_size if index is None or not c.mlp_sizes else c.mlp_sizes[index]
        at_end = index is not None and min(index, c.n_blocks - 1 - index) < c.n_blocks // _BLOCKS_OF_AN_END
        up, sizes = [f"{block}{name}" for name in names.up], [size] * (2 if c.gated else 1)
        down, precise = [f"{block}{names.down}"], 0 if at_end else None
        return MLP(
            _block_linear(reader, up, sizes, c.hidden_size, c.mlp_bias),
            _block_linear(reader, down, [c.hidden_size], size, c.mlp_bias, precise=precise),
        )

    def _mixture(self, reader: ParameterReader, block: str) -> Mixture:
        names, experts, hidden = self._config.names, self._config.experts, self._config.hidden_size
        assert experts is not None, "a model without experts has no mixtures"
        n, size, bias = experts.n, experts.intermediate_size, experts.bias
        correction = (experts.correction_rows, n) if experts.correction_rows else (n,)
        return Mixture(
            experts,
            reader.tensor(f"{block}{names.router}.weight", n, hidden, single=experts.single_router),
            reader.tensor(f"{block}{names.router}.bias", n) if bias else None,
            reader.tensor(f"{block}{names.router_correction}", *correction, single=True)
            if names.router_correction
            else None,
            reader.experts([f"{block}{name}" for name in names.expert_up], [size, size], hidden, n, bias),
            reader.experts([f"{block}{names.expert_down}"], [hidden], size, n, bias),
            self._shared_expert(reader, experts.shared_size, block) if experts.shared_size else None,
            reader.tensor(f"{block}{names.expert_scale}", n, single=True) if names.expert_scale else None,
        )

    def _mixture_norms(self, reader: ParameterReader, block: str) -> MixtureNorms:
        names = self._config.names.mixture_norms
        assert names is not None
        return MixtureNorms(
            Norm(reader.tensor(f"{block}{names.router}", self._config.hidden_size), None),
            *(self._norm(reader, f"{block}{name}") for name in (names.experts, names.experts_post, names.shared_post)),
        )

    def _shared_expert(self, reader: ParameterReader, size: int, block: str) -> SharedExpert:
        names, hidden = self._config.names, self._config.hidden_size
        up, down = [f"{block}{name}" for name in names.shared_up], [f"{block}{names.shared_down}"]
        return SharedExpert(
            MLP(
                reader.linear(up, [size, size], hidden, bias=False, layer=True),
                reader.linear(down, [hidden], size, bias=False, layer=True),
            ),
            reader.tensor(f"{block}{names.shared_gate}.weight", 1, hidden) if names.shared_gate else None,
        )

    def _projection(self, reader: ParameterReader, name: str | None, out: int, width: int) -> Linear | None:
        """A projection between embedding and hidden size; None if these are equal."""
        if out == width:
            return None
        assert name is not None, "the family's TensorNames has no projection"
        return reader.linear([name], [out], width, bias=False)

    def _norm(self, reader: ParameterReader, name: str) -> Norm:
        c = self._config
        if not c.norm_affine:
            return Norm(None, None)
        weight = reader.tensor(f"{name}.weight", c.hidden_size, offset=c.norm_offset)
        return Norm(weight, reader.tensor(f"{name}.bias", c.hidden_size) if c.norm == "layer" else None)

    def _head_norm(self, reader: ParameterReader, name: str, size: int, n_heads: int) -> torch.Tensor:
        """The norm of `n_heads` heads of `size` elements."""
        c = self._config
        return reader.tensor(f"{name}.weight", size * n_heads if c.whole_qk_norm else size, offset=c.norm_offset)


def _block_linear(
    reader: ParameterReader, names: list[str], outs: list[int], width: int, bias: bool, precise: int | None = None
) -> Linear:
    """The linear of `names`. A single name means that the checkpoint stores the whole stack as one tensor."""
    if len(names) < len(outs):
        outs, precise = [sum(outs)], None
    return reader.linear(names, outs, width, bias, layer=True, precise=precise)
