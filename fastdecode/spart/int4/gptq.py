"""quantise_compensated: rounding to 4 bits that keeps the products of typical inputs, not the weights (GPTQ, Frantar et
al., arXiv 2210.17323)."""

from __future__ import annotations

import logging

import torch

from fastdecode.spart.linears.quantised import ACTIVATION_BITS, GROUP, Quantised, concatenate, hadamard_blocks
from fastdecode.spart.linears.rounding import MOST_COLUMNS, Rounding, quantise

log = logging.getLogger(__name__)

#: An LM head in 4 bits keeps its first rows in 8 bits, one of this many. Tokenizers number frequent pieces first, and
#: errors of their logits count most.
HEAD_SHARE_IN_8_BITS = 8

#: The numbers that are added to the moments' diagonal, relative to its mean, until the moments can be inverted. A
#: smaller number costs other texts more.
_DAMPING = (0.05, 1.0)
_ROWS = 4096  # rounded at a time


def quantise_compensated(
    weight: torch.Tensor, moments: torch.Tensor, activation_bits: int = ACTIVATION_BITS
) -> Quantised:
    """Round a matrix [out, in] of any float dtype to 4 bits for inputs with the second moments [in, in].

    Inputs are rounded one after another, and the columns that follow take up the error of a column, as far as their
    inputs go along with its input. Groups of large inputs come first, because more columns are left to take up their
    errors. A group's scale and minimum are fitted once all earlier groups are rounded. Without whole groups of inputs,
    or with moments that are not finite, this is `quantise`.
    """
    ins, transformed = weight.shape[1], activation_bits == ACTIVATION_BITS
    known = _moments(moments, transformed) if ins % GROUP == 0 else None
    if known is None:
        return quantise(weight, 4, activation_bits)
    order = known.diagonal().view(-1, GROUP).sum(1).argsort(descending=True, stable=True)
    columns_of = _columns(order)
    factor = _inverse_factor(known[columns_of][:, columns_of])
    if factor is None:
        return quantise(weight, 4, activation_bits)
    return concatenate([_round_rows(rows.float(), factor, order, activation_bits) for rows in weight.split(_ROWS)])


def _round_rows(weight: torch.Tensor, factor: torch.Tensor, order: torch.Tensor, activation_bits: int) -> Quantised:
    """Round rows [out, in] of a matrix, group after group in `order` [in / GROUP]. `factor` is that of the inputs in
    this order."""
    outs, ins = weight.shape
    transformed = activation_bits == ACTIVATION_BITS
    # Columns that are not rounded yet hold what they have taken up.
    left = (hadamard_blocks(weight) / GROUP if transformed else weight)[:, _columns(order)]
    groups = order.cpu()
    matrix = Rounding(outs, ins, 4, transformed)
    for start in range(0, ins, MOST_COLUMNS):
        stop = min(start + MOST_COLUMNS, ins)
        now = slice(start, stop)
        errors = matrix.round_compensated(
            left[:, now].cpu(), factor[now, now].cpu(), groups[start // GROUP : stop // GROUP]
        )
        left[:, stop:].addmm_(errors.to(left.device), factor[now, stop:], alpha=-1)
    return matrix.quantised(activation_bits, weight.device)


def _columns(order: torch.Tensor) -> torch.Tensor:
    """The inputs of the groups `order`."""
    return (order[:, None] * GROUP + torch.arange(GROUP, device=order.device)).flatten()


def second_moments(x: torch.Tensor) -> torch.Tensor:
    """The second moments [in, in] of the rows x [n, in]. The products below the diagonal are copied from above it."""
    size = x.shape[1]
    moments = x.new_empty(size, size)
    step = -(-size // 4)
    for start in range(0, size, step):
        stop = start + step
        moments[start:stop, start:] = x[:, start:stop].mT @ x[:, start:]
        moments[stop:, start:stop] = moments[start:stop, stop:].mT
    return moments


def quantise_head(
    weight: torch.Tensor, bits: int, moments: torch.Tensor | None = None, activation_bits: int = ACTIVATION_BITS
) -> list[Quantised]:
    """Round an LM head [vocabulary, in]: the matrices of its first rows and, with 4 bits, of the others. `moments` are
    those of its inputs; without them each weight is rounded to the nearest number."""
    if bits == 8:
        return [quantise(weight, 8, activation_bits)]
    first = -(-len(weight) // HEAD_SHARE_IN_8_BITS)
    rest = weight[first:]
    fine = quantise(weight[:first], 8, activation_bits)
    if moments is None:
        return [fine, quantise(rest, 4, activation_bits)]
    return [fine, quantise_compensated(rest, moments, activation_bits)]


def _moments(moments: torch.Tensor, transformed: bool) -> torch.Tensor | None:
    """The second moments, fp32, of inputs or of their transform; None if they are not finite."""
    if transformed:
        moments = hadamard_blocks(hadamard_blocks(moments).mT.contiguous())
        moments = (moments + moments.mT) / 2
    if not moments.isfinite().all():
        log.warning("a matrix is rounded without calibration: its inputs are not finite")
        return None
    return moments


def _inverse_factor(moments: torch.Tensor) -> torch.Tensor | None:
    """The upper Cholesky factor, fp32, of the inverse of second moments; None if there is none."""
    mean = moments.diagonal().mean().clamp_min(1e-30)
    for damping in _DAMPING:
        damped = moments.clone()
        damped.diagonal().add_(damping * mean)
        # The factor of inputs in reverse order is lower triangular; its inverse, turned round again, is the result.
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            identity = torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
            result: torch.Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            return result
    return None
