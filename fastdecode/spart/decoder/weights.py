"""A model's parameters on its device, in the form that the decoder multiplies with. Matrices that multiply the same
rows are stacked into one linear: Q over K over V, gate over up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastdecode.spart.checkpoints.config import ModelConfig
from fastdecode.spart.decoder.experts import MLP, Mixture
from fastdecode.spart.decoder.latent import LatentAttention
from fastdecode.spart.linears.base import Embedding, Linear
from fastdecode.spart.linears.heads import HeadLinears
from fastdecode.spart.ranks.reduction import Reduction
from fastdecode.spart.served import ServedModel
from fastdecode.spart.shape import Heads
from fastdecode.spart.states.delta import DeltaWeights, step_bytes
from fastdecode.transports.base import HadamardHeads


@dataclass(slots=True)
class Balance:
    """The matrices by which the rows of a layer's heads are multiplied, each [KV heads, head_size, head_size];
    balance.py. Q and K have none if the KV-cache does not store K in 4 bits."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor
    o: torch.Tensor


@dataclass(slots=True)
class Norm:
    """The parameters of a norm, [hidden_size]. Both None: rows are only normalised. RMS norms have no bias."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(slots=True)
class MixtureNorms:
    """The norms of a mixture; see MixtureNormNames."""

    router: Norm
    experts: Norm
    experts_post: Norm
    shared_post: Norm


@dataclass(slots=True)
class PerLayerInput:
    """How a block adds its part of the per-layer embedding: the norm of out(act(gate(x)) * part)."""

    block: int  # the number of the part
    gate: Linear
    out: Linear
    post_norm: Norm


@dataclass(slots=True)
class PerLayerWeights:
    """The parameters of a per-layer embedding that no block has; see PerLayerNames."""

    table: Embedding
    projection: Linear
    norm: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Block:
    """One transformer block."""

    attention_norm: Norm | None  # before attention, or before what the block has in its place
    mlp_norm: Norm | None
    mlp: MLP | Mixture
    attention_post_norm: Norm | None = None  # of the output of attention, or of what the block has in its place
    mlp_post_norm: Norm | None = None
    mixture_norms: MixtureNorms | None = None  # only of a mixture with a shared expert
    per_layer: PerLayerInput | None = None
    scale: torch.Tensor | None = None  # [1], of the block's output

    @property
    def mixing(self) -> Sequence[Linear]:
        """The linears before and after attention, or before and after what the block has in its place."""
        raise NotImplementedError

    @property
    def linears(self) -> Sequence[Linear]:
        """All linears but those of `mlp`."""
        return self.mixing if self.per_layer is None else (*self.mixing, self.per_layer.gate, self.per_layer.out)

    @property
    def absorbed(self) -> Sequence[HeadLinears]:
        """The absorbed matrices, which latent attention alone has."""
        return ()


@dataclass(slots=True, kw_only=True)
class StateBlock(Block):
    """A block that keeps a state in place of attention to K and V."""

    delta: DeltaWeights

    @property
    def mixing(self) -> Sequence[Linear]:
        return self.delta.inputs, self.delta.out


@dataclass(slots=True, kw_only=True)
class AttentionBlock(Block):
    """A block that attends. `heads` counts the heads that it projects: no KV heads, if it attends to those of an
    earlier layer."""

    heads: Heads
    sinks: torch.Tensor | None = None  # [n_q_heads]
    second_rope: bool = False  # RoPE is ModelConfig.second_rope
    balance: Balance | None = None


@dataclass(slots=True, kw_only=True)
class Layer(AttentionBlock):
    """A block with Q, K and V heads. The rows of `qkv` are Q heads, K heads, V heads; with ModelConfig.output_gate,
    each Q head is followed by its gate."""

    qkv: Linear
    q_norm: torch.Tensor | None  # [head_size]; with ModelConfig.whole_qk_norm [n_q_heads * head_size], K likewise
    k_norm: torch.Tensor | None
    o: Linear
    v_norm: torch.Tensor | None = None  # [head_size]
    k_as_v: bool = False  # `qkv` has no rows for V, which is K before its norm and RoPE

    @property
    def mixing(self) -> Sequence[Linear]:
        return self.qkv, self.o


@dataclass(slots=True, kw_only=True)
class LatentLayer(AttentionBlock):
    """A block with latent attention."""

    latent: LatentAttention

    @property
    def mixing(self) -> Sequence[Linear]:
        return self.latent.linears

    @property
    def absorbed(self) -> Sequence[HeadLinears]:
        return self.latent.k, self.latent.v


@dataclass(slots=True, kw_only=True)
class MTPHead:
    """The head that drafts a token from a row's hidden state and the token after the row."""

    embedding_norm: Norm
    hidden_norm: Norm
    fc: Linear  # of the normalised embedding, then of the normalised hidden state
    layer: AttentionBlock
    final_norm: Norm


@dataclass(slots=True)
class Weights:
    """All parameters of a model."""

    embedding: Embedding  # rows of embed_size
    positions: torch.Tensor | None  # [position_offset + max_positions, hidden_size]
    project_in: Linear | None
    blocks: list[Block]
    final_norm: Norm | None
    project_out: Linear | None
    head: Linear
    per_layer: PerLayerWeights | None = None
    mtp: MTPHead | None = None

    @property
    def layers(self) -> list[AttentionBlock]:
        """The blocks that attend; the i-th is layer i of the links."""
        return [block for block in self.blocks if isinstance(block, AttentionBlock)]

    @property
    def all_blocks(self) -> list[Block]:
        """The blocks, and that of the MTP head behind them."""
        return self.blocks if self.mtp is None else [*self.blocks, self.mtp.layer]


@dataclass(slots=True, kw_only=True)
class Model(ServedModel):
    """A loaded checkpoint. `weight_bytes` counts the linears and embeddings."""

    config: ModelConfig
    weights: Weights
    reduction: Reduction | None = None  # sums over the ranks that share the model

    @property
    def pooled(self) -> bool:
        blocks = self.weights.blocks
        pooled = all(linear.pooled for block in blocks for linear in block.linears)
        pooled = pooled and all(heads.native is not None for block in blocks for heads in block.absorbed)
        return pooled and all(block.mlp.pooled for block in blocks) and self.weights.head.pooled

    @property
    def kept_width(self) -> int:
        own = self.config.per_layer
        return 0 if own is None else self.config.n_blocks * own.size

    def state_step_bytes(self, rows: int, single: int) -> int:
        rule = self.config.delta
        return 0 if rule is None else step_bytes(rule, rows, single, self.dtype.itemsize)

    @property
    def hadamard(self) -> HadamardHeads:
        balances = [layer.balance for layer in self.weights.layers]
        heads = HadamardHeads(0)
        if all(balance is not None for balance in balances):
            heads |= HadamardHeads.VO
        if all(balance is not None and balance.q is not None for balance in balances):
            heads |= HadamardHeads.QK
        return heads

    @property
    def widths(self) -> tuple[int, int]:
        hidden, experts = self.config.hidden_size, self.config.experts
        widest = max([self.config.intermediate_size, *self.config.mlp_sizes]) * (2 if self.config.gated else 1)
        widest = max(widest, 3 * self.kept_width)  # the projection, its norm, and the rows of the table
        if experts is not None:
            widest = max(widest, experts.used * (2 * experts.intermediate_size + hidden), 2 * experts.shared_size)
        return hidden, widest
