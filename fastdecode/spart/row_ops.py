"""RowOps: the decoder's operations between products. torch computes them on every device, and kernels/decoder on a CPU.

On a CPU a layer's norms, RoPE and gate are some twenty small operations of torch, each of which reads and writes the
rows once and costs microseconds before it begins. The native operations are four.
"""

from __future__ import annotations

import torch

from fastdecode.kernels import _native
from fastdecode.region.contract import ACT_DTYPES
from fastdecode.spart.config import ModelConfig
from fastdecode.spart.layers import make_activation, make_norm, norm_heads
from fastdecode.spart.rope import rotate
from fastdecode.spart.served import TORCH_DTYPES
from fastdecode.spart.weights import Layer, Norm


class Places:
    """Where the heads of a step's rows go: `q` [n, q_heads * head_size], and `kv` [n, 2 * kv_heads * head_size] with
    the K heads before the V heads. Rows may be any number of elements apart."""

    def __init__(self, q: torch.Tensor, kv: torch.Tensor, config: ModelConfig):
        n, kv_heads = len(kv), config.n_kv_heads
        heads = kv.view(n, -1, config.head_size)
        self.q, self.kv = q, kv
        self.q_heads = q.view(n, -1, config.head_size)
        self.k_heads, self.v_heads = heads[:, :kv_heads], heads[:, kv_heads:]


class RowOps:
    """The operations in torch."""

    #: The dtype of RoPE's cos and sin.
    angle_dtype: torch.dtype

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        self.angle_dtype = dtype
        self._config = config
        self._norm, self._activate = make_norm(config), make_activation(config)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """The normalised rows of x [n, hidden_size]."""
        return self._norm(x, norm)

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add a block's output y to the residual stream x, both [n, hidden_size], and return x's normalised rows."""
        x.add_(y, alpha=self._config.residual_scale)
        return self._norm(x, norm)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The input [n, width] of an MLP's `down` from the output of its `up`; `x` may be overwritten."""
        return self._activate(x)

    def place(
        self, qkv: torch.Tensor, layer: Layer, angles: tuple[torch.Tensor, torch.Tensor] | None, places: Places
    ) -> None:
        """Normalise and rotate the heads of qkv [n, (q_heads + 2 * kv_heads) * head_size] as the layer wants, and put
        them into their places. `angles` are cos and sin, [n, 1, pairs] each."""
        c = self._config
        heads = qkv.view(len(qkv), -1, c.head_size)
        q, k, v = torch.split(heads, [c.n_q_heads, c.n_kv_heads, c.n_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = norm_heads(q, layer.q_norm, c.norm_eps), norm_heads(k, layer.k_norm, c.norm_eps)
        if angles is not None:
            rotate(q, *angles, out=places.q_heads)
            rotate(k, *angles, out=places.k_heads)
        else:
            places.q_heads.copy_(q)
            places.k_heads.copy_(k)
        places.v_heads.copy_(v)


class NativeRowOps(RowOps):
    """The operations of models with RMS norms, RoPE or SiLU in kernels/decoder, on a CPU."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        """Raises ValueError if the CPU's ISA has no such operations."""
        super().__init__(config, dtype)
        self._native = _native.RowOps(list(ACT_DTYPES).index(_ACT_NAMES[dtype]))
        self._rms = config.norm == "rms"
        self._silu = config.gated and config.activation == "silu" and not _clamped(config)
        self.angle_dtype = torch.float32

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self._run_norm(x, None, norm) if self._rms and norm.weight is not None else super().norm(x, norm)

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self._rms and norm.weight is not None:
            return self._run_norm(x, y, norm)
        return super().add_norm(x, y, norm)

    def _run_norm(self, x: torch.Tensor, y: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        c = self._config
        out = torch.empty_like(x)
        assert norm.weight is not None
        assert x.is_contiguous() and (y is None or (y.is_contiguous() and y.dtype is x.dtype))
        self._native.norm(
            x.data_ptr(),
            0 if y is None else y.data_ptr(),
            c.residual_scale,
            norm.weight.data_ptr(),
            c.norm_eps,
            out.data_ptr(),
            len(x),
            x.shape[1],
            torch.get_num_threads(),
        )
        return out

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        if not self._silu:
            return super().activate(x)
        assert x.is_contiguous()
        rows, width = x.shape
        out = x.new_empty(rows, width // 2)
        self._native.gate(x.data_ptr(), out.data_ptr(), rows, width // 2, torch.get_num_threads())
        return out

    def place(
        self, qkv: torch.Tensor, layer: Layer, angles: tuple[torch.Tensor, torch.Tensor] | None, places: Places
    ) -> None:
        if angles is None:
            super().place(qkv, layer, angles, places)
            return
        c = self._config
        cos, sin = angles
        assert qkv.is_contiguous() and qkv.dtype is places.q.dtype is places.kv.dtype
        self._native.place(
            qkv.data_ptr(),
            _address(layer.q_norm),
            _address(layer.k_norm),
            c.norm_eps,
            cos.data_ptr(),
            sin.data_ptr(),
            places.q.data_ptr(),
            places.q.stride(0),
            places.kv.data_ptr(),
            places.kv.stride(0),
            len(qkv),
            c.n_q_heads,
            c.n_kv_heads,
            c.head_size,
            cos.shape[-1],
            torch.get_num_threads(),
        )


_ACT_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _clamped(config: ModelConfig) -> bool:
    return config.experts is not None and config.experts.clamped_swiglu is not None


def make_row_ops(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> RowOps:
    """The operations for a model's activations in `dtype` on `device`."""
    if device.type == "cpu":
        try:
            return NativeRowOps(config, dtype)
        except ValueError:  # an ISA without vectors
            pass
    return RowOps(config, dtype)
