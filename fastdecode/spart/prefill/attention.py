"""Causal attention of a prompt's rows by the fused kernels that torch has for CUDA.

The kernels align the diagonal with the last row and the last key (torch/nn/attention/bias.py), as FlashAttention does
since version 2.1, so a chunk attends to its own rows and to all earlier ones in one call. They know windows too. They
make no mask and no score matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_LOWER_RIGHT = 2  # CausalVariant.LOWER_RIGHT: the memory-efficient kernel's mask
_ALIGNMENT = 8  # the flash kernel takes heads of a multiple of this many elements


def is_fused(device: torch.device) -> bool:
    """True if `attend` has kernels for a device."""
    return device.type == "cuda"


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [batch, n, heads, d] to k [batch, m, heads, d] and v [batch, m, heads, e], whose last n positions
    are those of the rows. A row attends to the positions up to its own, and to at most `window` of them (0: to all).

    Returns O [batch, n, heads, e] and, in fp32 [batch, heads, n], the logarithm of the sum of each row's exponentiated
    scores. K and V may be expanded over heads.
    """
    size = v.shape[3]
    width = -(-max(size, q.shape[3]) // _ALIGNMENT) * _ALIGNMENT
    q, k, v = (x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3])) for x in (q, k, v))
    parameters = torch.backends.cuda.SDPAParams(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, 0.0, False, False
    )
    kernel = attend_flash if torch.backends.cuda.can_use_flash_attention(parameters) else attend_efficient
    out, log_sum = kernel(q, k, v, scale, window)
    return out[..., :size], log_sum


def attend_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` by the flash kernel: fp16 and bf16, heads of at most 256 elements, compute capability 8.0."""
    left, right = (window - 1, 0) if window else (None, None)
    found = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return found[0], found[1]


def attend_efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` by the memory-efficient kernel, for inputs that the flash kernel does not take."""
    found = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, None, None, None, None, 0.0, _LOWER_RIGHT, True, scale=scale, window_size=window or None
    )
    return found[0], found[1][..., : q.shape[1]]  # the kernel pads the rows
