"""LayerJoints: what a CPU computes between the attention of two layers, in one call of kernels/decoder.

The call does what BlockOps and the linears do one by one, in the same order and with the same results. A model has
joints if its blocks are Llama's or Gemma's (RMS norms, RoPE, and a gated SiLU or GELU or experts) and kernels/ computes
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
from fastdecode.spart.decoder.rope import Angles
from fastdecode.spart.decoder.weights import AttentionBlock, Layer
from fastdecode.spart.linears.base import Linear, multiplies
from fastdecode.spart.prefill.prompt_attention import NativePrompts
from fastdecode.spart.ranks.reduction import Reduction
from fastdecode.spart.served import address_of
from fastdecode.spart.threads import pool_threads

log = logging.getLogger(__name__)


class LayerJoints:
    """The joints of a model's layers: joint i is between the attention of layers i - 1 and i."""

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        act_dtype: str,
        reduction: Reduction | None = None,
        gelu: bool = False,
    ):
        """The layers of a model for which why_no_joints returned None, and the dtype of its activations. `gelu`: they
        have GELU in place of SiLU. Where a `reduction` sums over ranks, `config` counts the heads and the MLP's columns
        of this rank.

        Raises ValueError if the sizes of its linears are not those of `config`.
        """
        self._layers = tuple(layers)
        self._native = _native.Joints(
            ACT_DTYPES.index(act_dtype),
            config.hidden_size,
            config.n_q_heads,
            config.n_kv_heads,
            config.head_size,
            config.norm_eps,
            config.residual_scale,
            gelu,
            config.whole_qk_norm,
            tuple(_native_layer(config, layer) for layer in layers),
            None if reduction is None else reduction.native,
        )

    def rows(
        self,
        x: torch.Tensor,
        o: torch.Tensor,
        angles: Angles,
        out: RowHeads,
        second_angles: Angles | None = None,
    ) -> JointRows | None:
        """The rows of a step: x [n, hidden_size] is the residual stream, o [n, q_heads * head_size] the O rows, and
        `angles` are in fp32; `second_angles` are those of layers with the second RoPE. Returns None if they do not lie
        as the joints need them."""
        second = angles if second_angles is None else second_angles
        dense = (x, o, *angles, *second)
        if not all(tensor.is_contiguous() for tensor in dense) or len(o) != len(x) or len(out.q) != len(x):
            return None
        if second.cos.shape != angles.cos.shape:
            return None
        assert x.dtype is o.dtype is out.q.dtype is out.kv.dtype
        assert all(tensor.dtype is torch.float32 for tensor in dense[2:])
        projected = (
            out.q.data_ptr(),
            out.q.stride(0),
            out.kv.data_ptr(),
            out.kv.stride(0),
            angles.addresses,
            second.addresses,
            angles.cos.shape[-1],
        )
        return JointRows(self._native, self._layers, x, o, projected)

    def last_rows(self, x: torch.Tensor, o: torch.Tensor) -> JointRows:
        """Rows that are only to be finished in the last layer; x and o as for `rows`, contiguous."""
        return JointRows(self._native, self._layers, x, o)


#: The addresses and the distances of the rows of Q and of K and V, the addresses of the angles and of the second
#: ones, and their pairs.
_Projected = tuple[int, int, int, int, tuple[int, int, int, int], tuple[int, int, int, int], int]
_NOTHING: _Projected = (0, 0, 0, 0, (0, 0, 0, 0), (0, 0, 0, 0), 0)


class JointRows:
    """The rows of a step, from one joint to the next. The step keeps their tensors."""

    def __init__(
        self,
        native: _native.Joints,
        layers: tuple[Layer, ...],
        x: torch.Tensor,
        o: torch.Tensor,
        projected: _Projected = _NOTHING,
    ):
        self._native, self._layers = native, layers
        self._step = (x.data_ptr(), o.data_ptr(), *projected, len(x), pool_threads())

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


def _balanced(layers: Sequence[Layer]) -> bool:
    return any(layer.balance is not None for layer in layers)


def _mlp(layer: Layer) -> MLP | None:
    """The MLP of a layer, which is the shared expert of a mixture."""
    if isinstance(layer.mlp, MLP):
        return layer.mlp
    return None if layer.mlp.shared is None else layer.mlp.shared.mlp


def _linears(layer: Layer) -> tuple[Linear, ...]:
    mlp = _mlp(layer)
    return (layer.qkv, layer.o) if mlp is None else (layer.qkv, layer.o, mlp.up, mlp.down)


def _native_layer(config: ModelConfig, layer: Layer) -> tuple[object, ...]:
    """The layer as _native.Joints wants it."""
    mlp, columns, experts = _mlp(layer), config.intermediate_size, None
    if isinstance(layer.mlp, Mixture):
        assert config.experts is not None
        columns, experts = config.experts.shared_size, layer.mlp.native
    products = None if mlp is None else (columns, mlp.up.native, mlp.down.native)
    norms = layer.attention_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm
    of_attention, of_mlp, *post = (None if norm is None else norm.weight for norm in norms)
    weights = of_attention, of_mlp, layer.q_norm, layer.k_norm, *post
    return *map(address_of, weights), layer.second_rope, layer.qkv.native, layer.o.native, products, experts


def why_no_joints(
    config: ModelConfig, layers: Sequence[Layer], ops: BlockOps, reduction: Reduction | None = None
) -> str | None:
    """The reason why a model's blocks are computed operation by operation, or None if it has joints.

    A block with an option that kernels/decoder does not know needs a reason: a joint would ignore the option.
    """
    if not isinstance(ops, NativeBlockOps):
        return "kernels/decoder has no row operations for this device"
    if config.norm != "rms" or not config.norm_first or config.rope is None:
        return "a block lacks RMS norms before attention and MLP, or RoPE"
    mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, Mixture)]
    if not ops.gates and any(_mlp(layer) is not None for layer in layers):
        return "an MLP has no gated SiLU or GELU"
    if any(mixture.native is None for mixture in mixtures):
        return f"kernels/decoder does not compute its experts of {ops.act_dtype} rows"
    if any(mixture.shared is not None and mixture.shared.gate is not None for mixture in mixtures):
        return "a shared expert has a gate"
    if config.delta is not None or config.output_gate:
        return "a block keeps a state, or its heads have gates"
    if config.latent is not None:
        return "attention is latent"
    if config.options.heads or config.v_norm or config.names.block_scale or config.per_layer or config.mlp_sizes:
        return "layers have heads, norms of V, scales, embeddings or MLPs of their own"
    if config.whole_qk_norm and reduction is not None:
        return "ranks share heads that are normalised as one"
    if any(norm and norm.weight is None for layer in layers for norm in (layer.attention_norm, layer.mlp_norm)):
        return "a norm has no weights"
    if not all(multiplies(linear.native, ops.vectors.dtype) for layer in layers for linear in _linears(layer)):
        return f"kernels/linears does not compute all of its products of {ops.act_dtype} rows"
    return None


def make_joints(
    config: ModelConfig, blocks: Sequence[AttentionBlock], ops: BlockOps, reduction: Reduction | None = None
) -> LayerJoints | None:
    """The joints of a model's layers, or None if it has none."""
    layers = [block for block in blocks if isinstance(block, Layer)]
    reason = why_no_joints(config, layers, ops, reduction)
    if reason is not None:
        log.debug("the decoder runs operation by operation: %s", reason)
        return None
    assert isinstance(ops, NativeBlockOps)
    return LayerJoints(config, layers, ops.act_dtype, reduction, ops.gelu)
