"""ServedModel: the properties of a loaded model that links need; the base class of both backends' models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fastdecode.region.contract import ACT_DTYPES
from fastdecode.spart.shape import AttentionShape
from fastdecode.transports.base import HadamardHeads, Hello, LayerOptions

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: The activation dtypes by those of torch.
ACT_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def act_code(dtype: torch.dtype) -> int:
    """The number by which C knows an activation dtype."""
    return ACT_DTYPES.index(ACT_NAMES[dtype])


def address_of(tensor: torch.Tensor | None) -> int:
    """The address of a tensor's elements; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def with_sinks(options: LayerOptions, sinks: Sequence[torch.Tensor | None]) -> LayerOptions:
    """`options` with the values of the model's attention sinks [n_q_heads], one tensor for each layer, or None."""
    values = [layer.float().cpu() for layer in sinks if layer is not None]
    return replace(options, sinks=torch.stack(values).numpy().astype("<f4").tobytes()) if values else options


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """A loaded model."""

    config: AttentionShape
    device: torch.device
    dtype: torch.dtype  # of activations, and of weights that are not quantised
    parameters: int  # how many numbers the checkpoint has; a tied head counts once
    weight_bytes: int  # memory that the parameters take
    adapters: tuple[str, ...] = ()  # the names of its LoRA adapters, in the order of a chunk's `adapter`

    @property
    def widths(self) -> tuple[int, int]:
        """The hidden size, and the width of the widest row within a block, the MLP's; in elements."""
        raise NotImplementedError

    @property
    def kept_width(self) -> int:
        """Elements of each row that a step keeps between layers, beside its residual stream and the links' rows."""
        return 0

    def state_step_bytes(self, rows: int, single: int) -> int:
        """An upper bound of the memory, in bytes, that a layer with states takes at once in a step of `rows` rows,
        `single` of which are chunks of one row."""
        return 0

    @property
    def pooled(self) -> bool:
        """Whether kernels/ computes the products of all linears, so that torch needs no threads (threads.py)."""
        return False

    @property
    def all_logits(self) -> bool:
        """True if a step may compute the logits of all of its rows at once."""
        return False

    @property
    def act_dtype(self) -> str:
        """The links' activation dtype, one of ACT_DTYPES. It is the S-Part's dtype, so that no row is converted."""
        return ACT_NAMES[self.dtype]

    @property
    def hadamard(self) -> HadamardHeads:
        """The heads whose Hadamard transform the S-Part computes in place of the R-nodes."""
        return HadamardHeads(0)

    def hello(self, n_slots: int, max_rows: int, kv_dtype: str, kv_bytes: int | None, max_seqs: int) -> Hello:
        """The message by which an S-node with this model asks an R-node for a lease. The arguments are those fields
        of Geometry and Hello that the model does not fix."""
        return Hello(
            geometry=self.config.hello_geometry(n_slots, max_rows, self.act_dtype),
            kv_dtype=kv_dtype,
            windows=self.config.windows,
            softmax_scale=self.config.softmax_scale,
            kv_bytes=kv_bytes,
            max_seqs=max_seqs,
            layers=replace(self.config.options, hadamard=self.hadamard),
        )
