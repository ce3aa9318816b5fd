"""Attention of some rows to some keys by torch's fused kernels, and the sums that merge it with that to other keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [batch, heads, n, d] to k [batch, heads, m, d] and v [batch, heads, m, e]; `causal` only with
    n = m.

    Returns O [batch, heads, n, e] and, in fp32 [batch, heads, n], the logarithm of the sum of each row's exponentiated
    scores. These logarithms merge attention over two sets of keys exactly: the second set's share of O is
    sigmoid(second - first) (FlashAttention, arXiv 2205.14135, section 3.1). torch's public function does not return
    them, so `attend` calls the kernels behind that function. K and V may be expanded over heads; no mask and no score
    matrix is made.
    """
    size = v.shape[3]
    if size != q.shape[3]:  # the fused kernels want heads of one size
        q, k, v = (F.pad(x, (0, max(size, q.shape[3]) - x.shape[3])) for x in (q, k, v))
    if q.device.type == "cpu":
        kernel = _attend_cpu
    elif q.device.type == "cuda":
        parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, False)
        kernel = attend_flash if torch.backends.cuda.can_use_flash_attention(parameters) else attend_efficient
    else:
        kernel = attend_matmul
    out, log_sum = kernel(q, k, v, causal, scale)
    return out[..., :size], log_sum


def _attend_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1]


def attend_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` by CUDA's flash kernel: fp16 and bf16, heads of at most 256 elements, compute capability 8.0."""
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def attend_efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` by CUDA's memory-efficient kernel, for inputs that the flash kernel does not take."""
    found = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return found[0], found[1][..., : q.shape[2]]  # the kernel pads the rows


def attend_matmul(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` by products of matrices, for devices without a kernel of their own; the score matrix is made."""
    scores = (q @ k.transpose(-1, -2)).to(torch.float32) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    total = scores.logsumexp(dim=-1)
    return (scores - total[..., None]).exp_().to(q.dtype) @ v, total
