"""TokenConstraints: the tokens that a sequence may draw next, by the parameters of its request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fastdecode.engine.state.request import SamplingParams


class TokenConstraints:
    """The constraints of one sequence; a TokenMask of the S-Part (spart/step/masks.py)."""

    def __init__(self, params: SamplingParams, end_tokens: Iterable[int], vocab_size: int, past: Sequence[int] = ()):
        """`end_tokens` end the sequence; they are forbidden until it has `params.min_tokens` tokens. All token ids of
        `params` must be within the vocabulary. `past`: the tokens that the output has already."""
        self._generated = len(past)
        self._min_tokens = params.min_tokens
        self._early_ends = _clearing_bits(end_tokens, vocab_size) if params.min_tokens else None
        self._allowed = _bits(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else None
        self._never, self._bad_words = _sorted_words(params.bad_words, vocab_size)
        self._longest = max((len(word) - 1 for word in params.bad_words), default=0)
        #: The last tokens, as many as the longest bad word has before its last one.
        self._recent = list(past[-self._longest :]) if self._longest else []
        self._grammar = params.grammar.start(past) if params.grammar is not None else None
        self.allow_nothing = False  # the request itself allows no next token

    @property
    def active(self) -> bool:
        """Whether the next token is constrained."""
        return bool(
            self._grammar is not None
            or self._allowed is not None
            or self._never is not None
            or self._bad_words
            or self._generated < self._min_tokens
        )

    def generated(self, token: int) -> None:
        """Count a token of the output."""
        self._generated += 1
        if self._longest:
            self._recent = [*self._recent, token][-self._longest :]
        if self._grammar is not None:
            self._grammar.advance(token)

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Clear the bits of tokens that may not come next."""
        if self._grammar is not None:
            self._grammar.fill(row)
        if self._allowed is not None:
            row &= self._allowed
        if self._early_ends is not None and self._generated < self._min_tokens:
            later = row & self._early_ends
            if later.any():  # else a grammar allows nothing but the end, and min_tokens cannot lengthen its text
                row[:] = later
        if self._never is not None:
            row &= self._never
        for beginning, last in self._bad_words.get(self._recent[-1], ()) if self._recent else ():
            if self._recent[-len(beginning) :] == beginning:
                row.view(np.uint32)[last // 32] &= np.uint32(~(1 << last % 32) & 0xFFFFFFFF)
        self.allow_nothing = not row.any() and not (self._grammar is not None and self._grammar.broken)

    @property
    def fault(self) -> str | None:
        """Why the grammar cannot be followed any more; None: it can be, or there is none."""
        return self._grammar.fault if self._grammar is not None else None


def constraints(
    params: SamplingParams, end_tokens: Iterable[int], vocab_size: int, past: Sequence[int] = ()
) -> TokenConstraints | None:
    """The constraints of `params` behind the tokens `past` of the output; None if there are none."""
    found = TokenConstraints(params, end_tokens, vocab_size, past)
    return found if found.active else None


@lru_cache(16)  # the choices of a request have the same words
def _sorted_words(
    words: tuple[tuple[int, ...], ...], vocab_size: int
) -> tuple[npt.NDArray[np.int32] | None, dict[int, list[tuple[list[int], int]]]]:
    """Bad words, such that a step looks at few of a thousand: those of one token as a row in which their bits are
    cleared, or None; of the others the beginnings and the last tokens, by the token before the last one."""
    single = [word[0] for word in words if len(word) == 1]
    longer: dict[int, list[tuple[list[int], int]]] = {}
    for *beginning, last in words:
        if beginning:
            longer.setdefault(beginning[-1], []).append((beginning, last))
    return _clearing_bits(single, vocab_size) if single else None, longer


def _bits(tokens: Iterable[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """A row with the bits of `tokens` set."""
    flags = np.zeros(-(-vocab_size // 32) * 32, bool)
    flags[[token for token in tokens if 0 <= token < vocab_size]] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def _clearing_bits(tokens: Iterable[int], vocab_size: int) -> npt.NDArray[np.int32]:
    """A row with all bits set except the bits of `tokens`."""
    return ~_bits(tokens, vocab_size)
