"""Random draws that depend on a sequence's seed and the token's index alone, whatever batch the sequence is in.

A token is drawn by an exponential race: if E_i are independent exponential variables, the i with the greatest w_i / E_i
is a draw from the distribution that is proportional to the weights w (Efraimidis and Spirakis, Information Processing
Letters 97, 2006; in logarithms this is the Gumbel-max trick). Nothing is sorted or summed up along the vocabulary.

A vocabulary has 10^5 tokens, so a variable for each of them would cost more than the softmax. The race has two legs
instead: one between spans of 256 tokens by their total weights, one between the tokens of the span that won. The
product of the two probabilities is the token's own, so the distribution is the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

#: Tokens of a span. With about 10^5 tokens, both legs of the race then have a few hundred variables.
SPAN = 256
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def stream_keys(seeds: list[int], indices: list[int]) -> npt.NDArray[np.int64]:
    """The start of the random numbers of each pair of seed and index, any integers: int64 [n].

    A key is splitmix64 (Steele, Lea, Flood, OOPSLA 2014) of the seed, then of the index.
    """
    seed = np.array([s & _MASK for s in seeds], np.uint64)
    index = np.array([i & _MASK for i in indices], np.uint64)
    return _splitmix(_splitmix(seed) ^ index).view(np.int64)


def _splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(_GOLDEN)
    for shift, factor in _MIX:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def uniforms(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """The random numbers `counters` of the streams `keys`, in (0, 1): fp64 of the shape to which the two broadcast.

    Number c of a stream is the c-th output of splitmix64 with the key as its state. torch has no unsigned 64-bit
    arithmetic on every device; products of int64 wrap around to the same bits.
    """
    x = keys + (counters + 1) * _signed(_GOLDEN)
    for shift, factor in _MIX:
        x.bitwise_xor_(_shifted(x, shift)).mul_(_signed(factor))
    x.bitwise_xor_(_shifted(x, 31))
    # With half a unit added, 52 bits are never 0 or 1.
    return _shifted(x, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """The logical right shift; that of int64 tensors repeats the sign."""
    return x.bitwise_right_shift(by).bitwise_and_((1 << (64 - by)) - 1)


def span_count(vocab_size: int) -> int:
    return -(-vocab_size // SPAN)


def draw(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw a column of each row with a probability in proportion to its weight: int64 [rows].

    `weights` is fp32 [rows, a multiple of SPAN], with a positive number in each row; `keys` is int64 [rows, 1]. A
    column of weight 0 is never drawn.
    """
    spans = weights.view(len(weights), -1, SPAN)
    n = spans.shape[1]
    # Exponential variables, precise where they are small: one for each span, then one for each column of a span.
    arrivals = torch.log1p(uniforms(keys, torch.arange(n + SPAN, device=weights.device)).neg_()).neg_()
    span = (spans.sum(dim=2).to(torch.float64) / arrivals[:, :n]).argmax(dim=1)
    inside = spans.gather(1, span[:, None, None].expand(-1, 1, SPAN))[:, 0]
    column = (inside.to(torch.float64) / arrivals[:, n:]).argmax(dim=1)
    return span * SPAN + column
