"""Sampler: draws the next token of every row of a step, on the logits' device.

The filters are those of Hugging Face's logits processors, in their order: masks (masks.py), bias and penalties
(penalties.py), temperature, top-k, top-p over the tokens that top-k has left, min-p over the tokens that top-p has
left. Each filter is a threshold, so tokens of equal probability are kept or dropped together, and the result does not
depend on how a sort orders equal values.

A row's token is drawn with one uniform random number, a hash of (seed, index) alone, from a cumulative distribution
that is computed from that row alone. So a sequence draws the same tokens in any batch and after any preemption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fastdecode.spart.batch import Sampled, SampleSpec
from fastdecode.spart.masks import masked
from fastdecode.spart.penalties import LogitRules

#: A temperature below this one is greedy, because a division by it would overflow.
MIN_TEMPERATURE = 1e-5
#: Top-p first looks at this many of the likeliest tokens; a whole row is sorted only if they are not enough.
_TOP_P_PREFIX = 1024
_NOT_FINITE = "the model's logits are not finite: an activation overflowed its dtype"
_NOTHING_ALLOWED = "the request's grammar or lists of tokens allow no next token"
_MASK = (1 << 64) - 1


def uniforms(seeds: list[int], indices: list[int]) -> np.ndarray:
    """A uniform number in [0, 1) for each pair of seed and index, fp64 [n].

    It is splitmix64 (Steele, Lea, Flood, OOPSLA 2014) of the seed, then of the index.
    """
    seed = np.array([s & _MASK for s in seeds], np.uint64)
    index = np.array([i & _MASK for i in indices], np.uint64)
    return (_mix(_mix(seed) ^ index) >> np.uint64(11)) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Sampler:
    """Draws a token for each row of logits."""

    def __call__(self, logits: torch.Tensor, specs: list[SampleSpec]) -> list[Sampled]:
        """Draw one token a row. `logits` is [rows, vocab_size] fp32; `specs` has one entry for each row.

        A row with a logit that is NaN or +inf, or whose mask allows no token, gets an error and no token.
        """
        unmasked, logits = logits, masked(logits, [spec.mask for spec in specs])
        best, tokens = logits.max(dim=1)  # the maximum of a row with a NaN is NaN
        highest = best.tolist()
        finite = [math.isfinite(x) for x in highest]
        ruled = {i: _ruled(logits[i], spec.rules) for i, spec in enumerate(specs) if finite[i] and spec.rules}
        for i, changed in ruled.items():
            tokens[i] = changed.argmax()
        drawn = [i for i, spec in enumerate(specs) if finite[i] and spec.temperature >= MIN_TEMPERATURE]
        if drawn:
            chosen = [specs[i] for i in drawn]
            rows = torch.tensor(drawn, device=logits.device)
            picked = logits.index_select(0, rows)
            for row, i in enumerate(drawn):
                if i in ruled:
                    picked[row] = ruled[i]
            scaled = filtered(picked, chosen)
            tokens[rows] = _draw(scaled, uniforms([s.seed for s in chosen], [s.index for s in chosen]))
        sampled = [
            Sampled(token) if sound else Sampled(-1, error=_why_none(specs[i], highest[i]))
            for i, (token, sound) in enumerate(zip(tokens.tolist(), finite, strict=True))
        ]
        asked = [i for i, spec in enumerate(specs) if finite[i] and spec.logprobs is not None]
        if asked:
            _report(sampled, asked, unmasked, specs)
        return sampled


def _why_none(spec: SampleSpec, highest: float) -> str:
    """Why a row whose highest logit is not finite has no token."""
    return _NOTHING_ALLOWED if spec.mask is not None and highest == -math.inf else _NOT_FINITE


def _ruled(logits: torch.Tensor, rules: LogitRules) -> torch.Tensor:
    """A copy of a row of logits, [vocab_size], to which the rules have been applied."""
    row = logits.clone()

    def on_device(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(row.device)

    if len(rules.bias):
        row[on_device(rules.bias_ids)] += on_device(rules.bias)
    ids, counts = map(on_device, rules.seen)
    if len(ids) and rules.penalises:
        x = row[ids]
        x = torch.where(x > 0, x / rules.repetition, x * rules.repetition)
        row[ids] = x - rules.frequency * counts - rules.presence * (counts > 0)
    return row


def filtered(logits: torch.Tensor, specs: list[SampleSpec]) -> torch.Tensor:
    """Scaled and filtered logits: (x - the row's maximum) / temperature, or -inf where a filter drops the token.

    `logits` is [rows, vocab_size] fp32 and so is the result. All temperatures must be positive.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    vocab = logits.shape[1]
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / column([spec.temperature for spec in specs])
    ks = [spec.top_k if 0 < spec.top_k < vocab else vocab for spec in specs]
    if (largest := max((k for k in ks if k < vocab), default=0)) > 0:
        values = scaled.topk(largest, dim=1).values
        kth = torch.tensor([min(k, largest) - 1 for k in ks], device=logits.device)[:, None]
        floor = values.gather(1, kth).where(column(ks) < vocab, -math.inf)
        scaled.masked_fill_(scaled < floor, -math.inf)
    nucleus = [i for i, spec in enumerate(specs) if spec.top_p < 1.0]
    if nucleus:
        rows = torch.tensor(nucleus, device=logits.device)
        scaled[rows] = _top_p(scaled.index_select(0, rows), column([specs[i].top_p for i in nucleus]))
    if any(spec.min_p > 0.0 for spec in specs):
        floor = column([math.log(spec.min_p) if spec.min_p > 0.0 else -math.inf for spec in specs])
        scaled.masked_fill_(scaled < floor, -math.inf)
    return scaled


def _top_p(scaled: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the likeliest tokens up to and including the one with which their sum reaches top_p [rows, 1]."""
    probabilities = scaled.softmax(dim=1)
    floor, reached = _nucleus_floor(probabilities, top_p, min(_TOP_P_PREFIX, scaled.shape[1]))
    if not reached.all():
        rows = (~reached).nonzero().flatten()
        floor[rows], _ = _nucleus_floor(probabilities[rows], top_p[rows], scaled.shape[1])
    return scaled.masked_fill(probabilities < floor, -math.inf)


def _nucleus_floor(probabilities: torch.Tensor, top_p: torch.Tensor, prefix: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest probability in each row's nucleus, [rows, 1], found among the `prefix` likeliest tokens.

    The second result, [rows], is False where these tokens do not reach top_p, so the first result is not valid.
    """
    best = probabilities.topk(prefix, dim=1).values
    sums = best.cumsum(dim=1, dtype=torch.float64)
    size = ((sums - best) < top_p).sum(dim=1, keepdim=True).clamp_(min=1)
    return best.gather(1, size - 1), (sums[:, -1:] >= top_p).flatten()


def _draw(scaled: torch.Tensor, u: np.ndarray) -> torch.Tensor:
    """Draw a token a row: the inverse of the cumulative distribution of its softmax, in order of token ids, at u
    [rows]."""
    sums = scaled.softmax(dim=1).cumsum(dim=1, dtype=torch.float64)
    target = torch.from_numpy(u).to(scaled.device)[:, None] * sums[:, -1:]
    # The first sum above the target. It is never a dropped token's, because the sum does not grow there.
    return torch.searchsorted(sums, target, right=True).flatten()


def _report(sampled: list[Sampled], asked: list[int], logits: torch.Tensor, specs: list[SampleSpec]) -> None:
    """Add log-probabilities to the rows `asked`, of the distribution before rules, temperature and filters."""
    rows = torch.tensor(asked, device=logits.device)
    logprobs = logits.index_select(0, rows).log_softmax(dim=1)
    tokens = torch.tensor([sampled[i].token for i in asked], device=logits.device)
    own = logprobs.gather(1, tokens[:, None]).flatten().tolist()
    counts = [specs[i].logprobs or 0 for i in asked]
    most = min(max(counts), logits.shape[1])
    top = logprobs.topk(most, dim=1)
    tables = top.values.tolist(), top.indices.tolist()
    for i, n, logprob, values, ids in zip(asked, counts, own, *tables, strict=True):
        sampled[i].logprob = logprob
        sampled[i].top = list(zip(ids[:n], values[:n], strict=True))
