"""PromptAttention: attention of a prompt's rows by kernels/decoder, on a CPU.

torch's kernel for CPUs multiplies small blocks by a library for large ones, and takes 2.5 to 4 times as long.
"""

from __future__ import annotations

import torch

from fastdecode.kernels import _native
from fastdecode.region.contract import ACT_DTYPES
from fastdecode.spart.served import TORCH_DTYPES

_ACT_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class PromptAttention:
    """Attention of rows of one dtype to the K and V of their prompt, on a CPU.

    A row's result depends neither on the other rows nor on how the prompt is cut into chunks.
    """

    def __init__(self, dtype: torch.dtype):
        """Raises ValueError if the CPU's ISA has no such function."""
        self.dtype = dtype
        self._native = _native.PromptAttention(list(ACT_DTYPES).index(_ACT_NAMES[dtype]))

    @property
    def isa(self) -> str:
        """The ISA of the function."""
        return self._native.isa

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int = 0,
        segment: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write the attention of q [n, query heads, k_size], the last n rows of a prompt, to `out` [n, query heads,
        v_size].

        k [KV heads, m, k_size] and v [KV heads, m, v_size] are those of all m tokens so far. A row attends to the
        positions up to its own, to at most `window` of them and to those of its own segment (0: no such limit).
        `sinks`, an fp32 number for each query head, adds a score that weighs no V.
        """
        n, m, n_q, n_kv = len(q), k.shape[1], q.shape[1], len(k)
        assert q.dtype is k.dtype is v.dtype is out.dtype is self.dtype and n <= m and n_q % n_kv == 0
        assert k.shape == (n_kv, m, q.shape[2]) and v.shape == (n_kv, m, out.shape[2]) and out.shape[:2] == (n, n_q)
        for rows in (q, out):  # a row's heads stand side by side
            assert rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
        assert k.stride(2) == v.stride(2) == 1
        assert sinks is None or (sinks.dtype is torch.float32 and sinks.is_contiguous() and sinks.numel() == n_q)
        self._native.attend(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            (q.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1), out.stride(0)),
            (n, m - n, n_kv, n_q // n_kv, k.shape[2], v.shape[2]),
            window,
            segment,
            scale,
            torch.get_num_threads(),
        )


def make_prompt_attention(device: torch.device, dtype: torch.dtype) -> PromptAttention | None:
    """The native attention for rows in `dtype` on `device`, or None where torch computes it."""
    if device.type != "cpu" or dtype not in _ACT_NAMES:
        return None
    try:
        return PromptAttention(dtype)
    except ValueError:  # an ISA without vectors, or one that torch uses better
        return None
