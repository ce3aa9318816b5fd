"""LayerJoints: what a CPU computes between the attention of two layers, in one call of kernels/decoder.

The call does what BlockOps and the linears do one by one, in the same order and with the same results, but for the
sigmoids of gates, which differ by rounding. A model has joints if its blocks are Llama's or Gemma's (RMS norms, RoPE,
and a gated SiLU or GELU or experts), have latent attention or keep a state by the gated delta rule, and kernels/ has
all of their products.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from fastdecode.kernels import _native
from fastdecode.region.contract import ACT_DTYPES
from fastdecode.spart.checkpoints.config import ModelConfig
from fastdecode.spart.decoder.block_ops import BlockOps, NativeBlockOps, RowHeads
from fastdecode.spart.decoder.experts import MLP, Mixture
from fastdecode.spart.decoder.latent import LatentAttention
from fastdecode.spart.decoder.rope import Angles
from fastdecode.spart.decoder.weights import AttentionBlock, Block, LatentLayer, Layer, Norm, StateBlock
from fastdecode.spart.linears.base import Linear, multiplies
from fastdecode.spart.prefill.prompt_attention import NativePrompts
from fastdecode.spart.ranks.reduction import Reduction
from fastdecode.spart.served import address_of
from fastdecode.spart.states.delta import DeltaBlock
from fastdecode.spart.states.pool import StateRows
from fastdecode.spart.threads import pool_threads

log = logging.getLogger(__name__)


#: The blocks with a state before each layer, and behind the last one, with their rules.
StatesBetween = Sequence[Sequence[tuple[StateBlock, DeltaBlock]]]


class LayerJoints:
    """The joints of a model's layers: joint i is between the attention of layers i - 1 and i."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[AttentionBlock],
        act_dtype: str,
        reduction: Reduction | None = None,
        gelu: bool = False,
        between: StatesBetween = (),
    ):
        """The layers of a model for which why_no_joints returned None, and the dtype of its activations. `gelu`: they
        have GELU in place of SiLU. Where a `reduction` sums over ranks, `config` counts the heads and the MLP's columns
        of this rank.

        Raises ValueError if the sizes of its linears are not those of `config`.
        """
        self._layers = tuple(layers)
        self._gates = config.n_q_heads * config.head_size if config.output_gate else 0  # of a row
        states = [
            tuple(_native_state(config, *each) for each in blocks) for blocks in between or [()] * (len(layers) + 1)
        ]
        self._native = _native.Joints(
            ACT_DTYPES.index(act_dtype),
            config.hidden_size,
            config.norm_eps,
            config.residual_scale,
            gelu,
            config.whole_qk_norm,
            config.output_gate,
            tuple(
                (*_native_layer(config, i, layer), before)
                for i, (layer, before) in enumerate(zip(layers, states, strict=False))
            ),
            states[-1],
            None if reduction is None else reduction.native,
        )

    def rows(
        self,
        x: torch.Tensor,
        o: torch.Tensor,
        angles: Angles,
        out: RowHeads,
        second_angles: Angles | None = None,
        parts: torch.Tensor | None = None,
        states: StateRows | None = None,
    ) -> JointRows | None:
        """The rows of a step: x [n, hidden_size] is the residual stream, o [n, elements] the O rows, and `angles` are
        in fp32; `second_angles` are those of layers with the second RoPE, and `parts` [n, blocks, size] those of the
        per-layer embedding. Returns None if they do not lie as the joints need them, or if a gated layer is balanced.
        """
        if self._gates and _balanced(self._layers):
            return None
        second = angles if second_angles is None else second_angles
        dense = (x, o, *angles, *second)
        if not all(tensor.is_contiguous() for tensor in dense) or len(o) != len(x) or len(out.q) != len(x):
            return None
        assert x.dtype is o.dtype is out.q.dtype is out.kv.dtype
        assert all(tensor.dtype is torch.float32 for tensor in dense[2:])
        gates = x.new_empty(len(x), self._gates) if self._gates else None
        projected = (
            address_of(gates),
            out.q.data_ptr(),
            out.q.stride(0),
            out.kv.data_ptr(),
            out.kv.stride(0),
            angles.addresses,
            angles.cos.shape[-1],
            second.addresses,
            second.cos.shape[-1],
            () if states is None else states.pool.addresses,
            (0,) * 6 if states is None else states.addresses,
        )
        return JointRows(self._native, self._layers, x, o, parts, projected, gates)

    def last_rows(self, x: torch.Tensor, o: torch.Tensor, parts: torch.Tensor | None) -> JointRows:
        """Rows that are only to be finished in the last layer; the arguments are as for `rows`, contiguous."""
        return JointRows(self._native, self._layers, x, o, parts)


#: The address of the gates, the addresses and the distances of the rows of Q and of K and V, the addresses of the
#: angles and their pairs, the same of the second ones, and the addresses of the states and of the rows' slots.
_Addresses = tuple[int, int, int, int]
_Projected = tuple[
    int, int, int, int, int, _Addresses, int, _Addresses, int, tuple[int, ...], tuple[int, int, int, int, int, int]
]
_NOTHING: _Projected = (0, 0, 0, 0, 0, (0, 0, 0, 0), 0, (0, 0, 0, 0), 0, (), (0, 0, 0, 0, 0, 0))


class JointRows:
    """The rows of a step, from one joint to the next. The step keeps their tensors."""

    def __init__(
        self,
        native: _native.Joints,
        layers: tuple[AttentionBlock, ...],
        x: torch.Tensor,
        o: torch.Tensor,
        parts: torch.Tensor | None,
        projected: _Projected = _NOTHING,
        gates: torch.Tensor | None = None,
    ):
        assert parts is None or (parts.is_contiguous() and parts.dtype is x.dtype and len(parts) == len(x))
        self._native, self._layers, self._gates = native, layers, gates
        rows = o.data_ptr(), o.stride(0), address_of(parts), 0 if parts is None else parts.stride(0)
        self._step = (x.data_ptr(), *rows, *projected, len(x), pool_threads())

    def run(self, joint: int) -> bool:
        """Finish layer `joint` - 1 and project layer `joint`, as far as there are such layers. False if nothing was
        done, because one of the layers is balanced."""
        if _balanced(self._layers[max(0, joint - 1) : joint + 1]):
            return False
        self._native.run(joint, self._step)
        return True

    @property
    def balanced(self) -> bool:
        """True if a layer is balanced, so that not all joints can run."""
        return _balanced(self._layers)

    def spart_layers(self, prompts: NativePrompts | None) -> object:
        """The capsule with which StepGroup.run_layers runs all joints but the first and attends the step's prompts.
        Only where nothing is `balanced`."""
        return self._native.spart_layers(self._step, prompts)


def _balanced(layers: Sequence[AttentionBlock]) -> bool:
    return any(layer.balance is not None for layer in layers)


def _mlp(block: Block) -> MLP | None:
    """The MLP of a block, which is the shared expert of a mixture."""
    if isinstance(block.mlp, MLP):
        return block.mlp
    return None if block.mlp.shared is None else block.mlp.shared.mlp


def _linears(block: Block) -> tuple[Linear, ...]:
    mlp = _mlp(block)
    return (*block.linears, *(() if mlp is None else (mlp.up, mlp.down)))


def _weight(norm: Norm | None) -> int:
    return 0 if norm is None else address_of(norm.weight)


def _native_feed_forward(config: ModelConfig, block: Block, columns: int) -> tuple[object, ...]:
    """The MLP of a block, which has `columns` columns, and the block's experts, as _native.Joints wants them."""
    mlp, experts, gate, norms = _mlp(block), None, None, block.mixture_norms
    if isinstance(block.mlp, Mixture):
        assert config.experts is not None
        columns, experts = config.experts.shared_size, block.mlp.native
        gate = None if block.mlp.shared is None else block.mlp.shared.gate
    products = None if mlp is None else (columns, mlp.up.native, mlp.down.native)
    of_mixture = (None,) * 4 if norms is None else (norms.router, norms.experts, norms.experts_post, norms.shared_post)
    own = _weight(block.mlp_norm), _weight(block.mlp_post_norm)
    return *own, products, experts, address_of(gate), tuple(map(_weight, of_mixture))


def _native_layer(config: ModelConfig, index: int, layer: AttentionBlock) -> tuple[object, ...]:
    """Layer `index` as _native.Joints wants it, but for the states before it."""
    norms = _weight(layer.attention_norm), _weight(layer.attention_post_norm)
    if isinstance(layer, LatentLayer):
        of_heads, k_as_v, products = (0, 0, 0), False, (layer.latent.inputs.native, layer.latent.o.native)
    else:
        assert isinstance(layer, Layer)
        of_heads = address_of(layer.q_norm), address_of(layer.k_norm), address_of(layer.v_norm)
        k_as_v, products = layer.k_as_v, (layer.qkv.native, layer.o.native)
    columns, own, part = config.intermediate_size, layer.per_layer, None
    if config.mlp_sizes:  # no family has both these and states, so that layers have the numbers of blocks
        columns = config.mlp_sizes[index]
    if own is not None and config.per_layer is not None:
        size = config.per_layer.size
        part = own.block * size, size, own.gate.native, own.out.native, _weight(own.post_norm)
    return (
        (layer.heads.n_q, layer.heads.n_kv, layer.heads.k_size),
        *(*norms, *of_heads, layer.second_rope, k_as_v),
        _native_latent(layer.latent) if isinstance(layer, LatentLayer) else None,
        *products,
        *(_native_feed_forward(config, layer, columns), part, address_of(layer.scale)),
    )


def _native_latent(latent: LatentAttention) -> tuple[object, ...]:
    """Latent attention as _native.Joints wants it."""
    c = latent.config
    sizes = c.k_size, c.rope_size, c.rank, c.v_size, c.q_rank or 0
    q = latent.q.native if latent.q else None
    norms = address_of(latent.q_norm), address_of(latent.kv_norm)
    return *sizes, c.interleaved, c.norm_eps, *norms, q, latent.k.native, latent.v.native


def _native_state(config: ModelConfig, block: StateBlock, rule: DeltaBlock) -> tuple[object, ...]:
    """The block as _native.Joints wants it."""
    products = block.delta.inputs.native, block.delta.out.native
    mlp = _native_feed_forward(config, block, config.intermediate_size)
    return _weight(block.attention_norm), *products, rule.native, mlp


def why_no_joints(
    config: ModelConfig,
    layers: Sequence[AttentionBlock],
    ops: BlockOps,
    reduction: Reduction | None = None,
    between: StatesBetween = (),
) -> str | None:
    """The reason why a model's blocks are computed operation by operation, or None if it has joints.

    A block with an option that kernels/decoder does not know needs a reason: a joint would ignore the option.
    """
    if not isinstance(ops, NativeBlockOps):
        return "kernels/decoder has no row operations for this device"
    if config.norm != "rms" or not config.norm_first or config.rope is None:
        return "a block lacks RMS norms before attention and MLP, or RoPE"
    states = [each for some in between for each in some]
    blocks: list[Block] = [*layers, *(block for block, _ in states)]
    if not ops.gates and any(_mlp(block) is not None for block in blocks):
        return "an MLP has no gated SiLU or GELU"
    if any(isinstance(block.mlp, Mixture) and block.mlp.native is None for block in blocks):
        return f"kernels/decoder does not compute its experts of {ops.act_dtype} rows"
    if any(rule.native is None or block.attention_post_norm is not None for block, rule in states):
        return "kernels/decoder does not have the rule of a state, or its output is normalised"
    if any(heads.native is None for layer in layers for heads in layer.absorbed):
        return f"kernels/linears does not multiply its heads of latent attention in {ops.act_dtype}"
    if config.whole_qk_norm and reduction is not None:
        return "ranks share heads that are normalised as one"
    if any(norm and norm.weight is None for block in blocks for norm in (block.attention_norm, block.mlp_norm)):
        return "a norm has no weights"
    if not all(multiplies(linear.native, ops.vectors.dtype) for block in blocks for linear in _linears(block)):
        return f"kernels/linears does not compute all of its products of {ops.act_dtype} rows"
    return None


def make_joints(
    config: ModelConfig,
    blocks: Sequence[AttentionBlock],
    ops: BlockOps,
    reduction: Reduction | None = None,
    between: StatesBetween = (),
) -> LayerJoints | None:
    """The joints of a model's layers, or None if it has none."""
    reason = why_no_joints(config, blocks, ops, reduction, between)
    if reason is not None:
        log.debug("the decoder runs operation by operation: %s", reason)
        return None
    assert isinstance(ops, NativeBlockOps)
    return LayerJoints(config, blocks, ops.act_dtype, reduction, ops.gelu, between)
