"""quantise_compensated: rounding to 4 bits that keeps the products of typical inputs, not the weights (GPTQ, Frantar et
al., arXiv 2210.17323)."""

from __future__ import annotations

import logging

import torch

from fastdecode.spart.linears.quantised import ACTIVATION_BITS, GROUP, Quantised, fit_4_bits, quantise, rotate

log = logging.getLogger(__name__)

_DAMPING = (0.01, 0.1, 1.0)  # added to the moments' diagonal, relative to its mean: the first that can be inverted


def quantise_compensated(weight: torch.Tensor, moments: torch.Tensor) -> Quantised:
    """Round a matrix [out, in] of any float dtype to 4 bits for inputs with the second moments [in, in].

    Inputs are rounded one after another, and the columns that follow take up the error of a column, as far as their
    inputs go along with its input. A group's scale and minimum are fitted once all earlier groups are rounded.
    Without whole groups of inputs, or with moments that are not finite, this is `quantise`.
    """
    outs, ins = weight.shape
    factor = _inverse_factor(moments) if ins % GROUP == 0 else None
    if factor is None:
        return quantise(weight, 4, ACTIVATION_BITS)
    left = rotate(weight.float()) / GROUP  # columns that are not rounded hold what they have taken up
    numbers = torch.empty(ins, outs, dtype=torch.uint8, device=weight.device)
    scales, mins = (left.new_empty(ins // GROUP, outs) for _ in range(2))
    for start in range(0, ins, GROUP):
        columns = left[:, start : start + GROUP]
        scale, minimum = (part.flatten() for part in fit_4_bits(columns[:, None])[1:])
        scales[start // GROUP], mins[start // GROUP] = scale, minimum
        own = factor[start : start + GROUP, start : start + GROUP]
        group = columns.mT.contiguous()
        errors = torch.empty_like(group)
        for i, column in enumerate(group):
            q = ((column - minimum) / scale.clamp_min(1e-30)).round_().clamp_(0, 15)
            numbers[start + i] = q.to(torch.uint8)
            errors[i] = (column - (q * scale + minimum)) / own[i, i]
            group[i + 1 :] -= own[i, i + 1 :, None] * errors[i]
        left[:, start + GROUP :].addmm_(errors.mT, factor[start : start + GROUP, start + GROUP :], alpha=-1)
    scales, mins, numbers = (part.mT.contiguous() for part in (scales, mins, numbers))
    return Quantised(numbers, scales, mins, 0, 4, GROUP, activation_bits=ACTIVATION_BITS, rotated=True)


def _inverse_factor(moments: torch.Tensor) -> torch.Tensor | None:
    """The upper Cholesky factor, fp32, of the inverse of the rotated inputs' second moments; None if there is none."""
    rotated = rotate(rotate(moments.double()).mT.contiguous())
    rotated = (rotated + rotated.mT) / 2
    if not rotated.isfinite().all():
        log.warning("a matrix is rounded without calibration: its inputs are not finite")
        return None
    mean = rotated.diagonal().mean().clamp_min(1e-30)
    for damping in _DAMPING:
        damped = rotated.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                result: torch.Tensor = factor.float()
                return result
    return None
