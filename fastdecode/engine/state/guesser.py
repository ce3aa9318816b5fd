"""Guesser: the guesses of one sequence's next tokens, and how many of them were right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

#: Tokens that must occur twice before a guess is made.
_MATCH = 3

#: Tokens that one call indexes: the event loop must not wait for the whole of a long prompt.
_INDEXED_AT_ONCE = 4096

#: The probability that a guess is right before there have been any, and its weight after each guess.
_FIRST_RATE, _RATE_MEMORY = 0.6, 0.85


@dataclass(slots=True)
class Guesser:
    """One sequence's guesses."""

    rate: float = _FIRST_RATE  # the share of right guesses; the last guesses weigh most
    idle: int = 0  # tokens since the last guess
    #: What the model's MTP head expects after the sequence's first tokens, whose number comes first.
    drafts: tuple[int, Sequence[int]] = (0, ())
    _followers: dict[tuple[int, ...], int] = field(default_factory=dict)  # tokens -> index of the token after them
    _indexed: int = _MATCH

    def guess(self, tokens: list[int], n: int) -> list[int]:
        """At most `n` tokens that may follow `tokens`, which only grow from call to call."""
        stop = min(len(tokens), self._indexed + _INDEXED_AT_ONCE)
        for end in range(self._indexed, stop):  # the last tokens are left out: no token follows them yet
            self._followers[tuple(tokens[end - _MATCH : end])] = end
        self._indexed = max(self._indexed, stop)
        start = self._followers.get(tuple(tokens[-_MATCH:]))
        if start is None:
            return []
        period = len(tokens) - start  # a guess beyond the last token repeats the tokens from `start` on
        return [tokens[start + i % period] for i in range(n)]

    def drafted(self, n_tokens: int, n: int) -> list[int]:
        """At most `n` tokens that the MTP head expects after the sequence's `n_tokens` tokens."""
        after, drafts = self.drafts
        return list(drafts[:n]) if after == n_tokens else []

    def judged(self, n_right: int, n: int) -> None:
        """Record that the first `n_right` of `n` guesses were right."""
        outcomes = [1.0] * n_right
        if n_right < n:
            outcomes.append(0.0)
        for right in outcomes:
            self.rate = _RATE_MEMORY * self.rate + (1 - _RATE_MEMORY) * right
