"""Kind: what the sampling of a captured step can do for its rows.

A graph runs the same operations on arrays of the same sizes every time. So a captured step has a graph for each Kind,
and `kind_of` finds the Kind that covers all rows of a step. Some requests need arrays whose sizes nobody knows before,
or come too late for the step's one upload; their steps draw behind the graph, by the sampler of all other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.spart.step.batch import SampleSpec

#: A temperature below this one is greedy, because a division by it would overflow.
MIN_TEMPERATURE = 1e-5
#: Top-p looks at this many of the likeliest tokens. Rows for which they are not enough are drawn a second time.
TOP_P_PREFIX = 1024
#: Rows are sampled in blocks whose weights take at most this much memory, in bytes.
BLOCK_BYTES = 32 << 20
#: The most entries of biases, and of penalties, that the blocks of a captured step have together.
MOST_RULES = 1 << 16
_LEAST_RULES = 1 << 10

GREEDY = SampleSpec(temperature=0.0)

_NOT_FINITE = "the model's logits are not finite: an activation overflowed its dtype"
_NOTHING_ALLOWED = "the request's grammar or lists of tokens allow no next token"


def why_none(spec: SampleSpec, empty: bool) -> str:
    """The reason why a row has no token. `empty`: all of its logits are -inf."""
    return _NOTHING_ALLOWED if spec.mask is not None and empty else _NOT_FINITE


@dataclass(frozen=True, slots=True)
class Kind:
    """What the rows of a captured step may ask for, beside the likeliest token."""

    draws: bool = False  # a temperature
    filters: bool = False  # top-k, top-p, min-p
    rules: int = 0  # biases, and penalised tokens, of a block of rows; 0: none


def rows_of_block(vocab_size: int) -> int:
    """How many rows are sampled at once."""
    return max(1, BLOCK_BYTES // (4 * vocab_size))


def kind_of(specs: Sequence[SampleSpec], rows: int, vocab_size: int) -> Kind | str:
    """The least Kind that covers `specs`, the first of the `rows` rows of a captured step; or the name of what no
    Kind covers."""
    draws = filters = False
    for spec in specs:
        if spec.mask is not None:
            return "masks of tokens, which are made while the model runs"
        if spec.logprobs is not None:
            return "log-probabilities"
        if spec.temperature < MIN_TEMPERATURE:
            continue
        draws = True
        if TOP_P_PREFIX < spec.top_k < vocab_size:
            return f"a top-k of more than {TOP_P_PREFIX}"
        filters = filters or spec.top_p < 1.0 or spec.min_p > 0.0 or 0 < spec.top_k < vocab_size
    needed, n = 0, rows_of_block(vocab_size)
    for start in range(0, len(specs), n):
        rules = [spec.rules for spec in specs[start : start + n] if spec.rules is not None]
        needed = max(
            needed,
            sum(len(rule.bias_ids) for rule in rules),
            sum(len(rule.seen[0]) for rule in rules if rule.penalises),
        )
    if not needed:
        return Kind(draws, filters)
    size = _LEAST_RULES
    while size < needed:
        size *= 4
    if size * -(-rows // n) > MOST_RULES:
        return f"biases and penalties of more than {MOST_RULES} tokens"
    return Kind(draws, filters, size)
