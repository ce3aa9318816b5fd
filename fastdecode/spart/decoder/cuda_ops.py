"""CudaBlockOps: the decoder's operations between products by kernels of ours (block_kernels/block.cu), on a GPU.

A layer's norms, residuals, RoPE and gate are some twenty small operations of torch, each of which is a launch and goes
through the rows. The kernels do them in four launches of three kinds.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fastdecode.kernels.gpu.cupy_kernels import KernelError, load_kernels
from fastdecode.spart.block_kernels import BLOCK_THREADS, MOST_HEAD, SOURCE
from fastdecode.spart.checkpoints.config import ModelConfig
from fastdecode.spart.decoder.block_ops import (
    BlockOps,
    NativeBlockOps,
    RowHeads,
    VectorOps,
    gates_by,
    norm_whole,
)
from fastdecode.spart.decoder.rope import Angles
from fastdecode.spart.decoder.weights import Layer, Norm
from fastdecode.spart.served import ACT_NAMES, act_code, address_of

log = logging.getLogger(__name__)

#: Launches the kernel of a name in torch's current stream: a grid, addresses, and then 32-bit numbers.
Launch = Callable[[str, tuple[int, int], Sequence[int], Sequence[int]], None]
_KERNELS = ("fd_add_norm", "fd_write_heads", "fd_silu_gate")


@functools.cache
def open_launch(device: torch.device) -> Launch | None:
    """Load the kernels, which a process keeps. None: CuPy is missing, or has refused; the log says why."""
    try:
        loaded = load_kernels([SOURCE], {"FD_BLOCK_THREADS": BLOCK_THREADS}, _KERNELS, device.index or 0)
    except KernelError as error:
        log.info("norms, RoPE and gates by torch: %s", error)
        return None
    kernels = dict(zip(_KERNELS, loaded, strict=True))

    def launch(name: str, grid: tuple[int, int], pointers: Sequence[int], numbers: Sequence[int]) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        kernels[name](grid, BLOCK_THREADS, stream, pointers, numbers)

    return launch


class CudaBlockOps(BlockOps):
    """The operations of models with RMS norms, RoPE or SiLU by our kernels; the others are torch's."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, launch: Launch):
        super().__init__(config, dtype)
        self._launch, self._dtype, self._code = launch, dtype, act_code(dtype)
        self._rms, self._silu = config.norm == "rms", gates_by(config, "silu")
        self._eps, self._scale = (_bits(x) for x in (config.norm_eps, config.residual_scale))
        self.angle_dtype = torch.float32

    @staticmethod
    def supports(config: ModelConfig, dtype: torch.dtype) -> bool:
        """Whether the kernels take such rows and heads."""
        return dtype in ACT_NAMES and config.most_heads.k_size <= MOST_HEAD

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self._rms and norm.weight is not None:
            return self._add_norm(x, None, norm.weight)
        return super().norm(x, norm)

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self._rms and norm.weight is not None:
            return self._add_norm(x, y, norm.weight)
        return super().add_norm(x, y, norm)

    def _add_norm(self, x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        n, width = x.shape
        y = None if y is None else y.contiguous()
        assert x.is_contiguous() and x.dtype is weight.dtype is self._dtype and len(weight) == width
        assert y is None or (y.dtype is self._dtype and y.shape == x.shape)
        out = torch.empty_like(x)
        if n:
            pointers = x.data_ptr(), address_of(y), weight.data_ptr(), out.data_ptr()
            self._launch("fd_add_norm", (n, 1), pointers, (width, self._code, self._scale, self._eps))
        return out

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        if not self._silu:
            return super().activate(x)
        n, width = len(x), x.shape[1] // 2
        assert x.is_contiguous() and x.dtype is self._dtype
        out = x.new_empty(n, width)
        if n:
            grid = n, -(-width // BLOCK_THREADS)
            self._launch("fd_silu_gate", grid, (x.data_ptr(), out.data_ptr()), (width, self._code))
        return out

    def write_heads(self, qkv: torch.Tensor, layer: Layer, angles: Angles | None, out: RowHeads) -> None:
        n_q, n_kv, size, *_ = layer.heads
        assert qkv.is_contiguous() and qkv.dtype is out.q.dtype is out.kv.dtype is self._dtype
        assert all(x.dtype is torch.float32 and x.is_contiguous() for x in angles or ())
        if self._config.whole_qk_norm and layer.q_norm is not None:
            layer = norm_whole(qkv, layer, self._config)
        tensors = qkv, layer.q_norm, layer.k_norm, layer.v_norm, *(angles or [None] * 4), out.q, out.kv
        sizes = n_q, n_kv, size, angles.cos.shape[-1] if angles else 0
        numbers = *sizes, out.q.stride(0), out.kv.stride(0), self._code, self._eps
        self._launch("fd_write_heads", (len(qkv), n_q + 2 * n_kv), [*map(address_of, tensors)], numbers)


def _bits(x: float) -> int:
    """The bits of an fp32 number."""
    return int(np.float32(x).view(np.uint32))


def make_block_ops(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> BlockOps:
    """The operations for a model's activations in `dtype` on `device`."""
    if device.type == "cuda" and CudaBlockOps.supports(config, dtype) and (launch := open_launch(device)):
        return CudaBlockOps(config, dtype, launch)
    native = device.type == "cpu" and VectorOps.supports(dtype)
    return NativeBlockOps(config, dtype) if native else BlockOps(config, dtype)
