"""What all samplers share: their limits, and how they report a row's token."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.spart.step.batch import Sampled, SampleSpec

#: A temperature below this one is greedy, because a division by it would overflow.
MIN_TEMPERATURE = 1e-5
#: Rows are sampled in blocks whose weights take at most this much memory, in bytes.
BLOCK_BYTES = 32 << 20
#: Flag of a row: its logits are finite, so it has a token.
FINITE = 1

_NOT_FINITE = "the model's logits are not finite: an activation overflowed its dtype"
_NOTHING_ALLOWED = "the request's grammar or lists of tokens allow no next token"


def rows_of_block(vocab_size: int) -> int:
    """How many rows are sampled at once."""
    return max(1, BLOCK_BYTES // (4 * vocab_size))


def sampled_rows(
    specs: Sequence[SampleSpec], tokens: Sequence[int], flags: Sequence[int], nothing: int
) -> list[Sampled]:
    """The token of each row, or the reason why it has none: without FINITE among its flags its logits are not finite,
    and with `nothing` all of them are -inf."""
    return [
        Sampled(token)
        if flag & FINITE
        else Sampled(-1, error=_NOTHING_ALLOWED if spec.mask is not None and flag & nothing else _NOT_FINITE)
        for spec, token, flag in zip(specs, tokens, flags, strict=True)
    ]


def add_logprobs(
    sampled: Sequence[Sampled],
    specs: Sequence[SampleSpec],
    rows: Sequence[int],
    own: Sequence[float],
    top: tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]],
) -> None:
    """Give `rows` the log-probabilities of their tokens, `own`, and of as many alternatives as each asks for; `top` has
    the likeliest tokens of each row and their log-probabilities. A row without a token gets none."""
    for row, token, ids, logprobs in zip(rows, own, *top, strict=True):
        if sampled[row].error is None:
            wanted = specs[row].logprobs
            sampled[row].logprob = token
            sampled[row].top = list(zip(ids[:wanted], logprobs[:wanted], strict=True))
