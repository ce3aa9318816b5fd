"""LogitRules: the bias and the penalties that a request puts on its logits, and the token counts they depend on.

The rules apply in this order to the logit x of a token:

    bias         x + bias                                              OpenAI's `logit_bias`
    repetition   x / r if x > 0, else x * r, for tokens that occur     CTRL (Keskar et al., arXiv 1909.05858, 4.1), in
                 in the prompt or the output                           the form of Hugging Face and vLLM
    the others   x - frequency * n - presence, for tokens that         OpenAI's `frequency_penalty` and
                 occur n > 0 times in the output                       `presence_penalty`

This module imports no torch; the sampler applies the rules (sampling.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class LogitRules:
    """One sequence's rules, and how often each token occurs in it."""

    def __init__(
        self,
        *,
        bias: Iterable[tuple[int, float]] = (),
        repetition: float = 1.0,
        frequency: float = 0.0,
        presence: float = 0.0,
        prompt: Iterable[int] = (),
    ):
        """`bias` has each token at most once. All token ids must be within the vocabulary. The defaults change
        nothing."""
        self.repetition, self.frequency, self.presence = repetition, frequency, presence
        pairs = tuple(bias)
        self.bias_ids = np.array([token for token, _ in pairs], np.int64)
        self.bias = np.array([value for _, value in pairs], np.float32)
        self._indexes: dict[int, int] = {}  # token -> index into the two arrays below, which have spare room
        self._ids, self._counts = np.empty(16, np.int64), np.zeros(16, np.float32)
        if repetition != 1.0:
            self._indexes = {token: index for index, token in enumerate(dict.fromkeys(prompt))}
            self._ids = np.array([*self._indexes, *[0] * 16], np.int64)
            self._counts = np.zeros(len(self._ids), np.float32)

    def copy(self) -> LogitRules:
        """The same rules for another sequence, with the counts so far."""
        twin = copy.copy(self)
        twin._indexes, twin._ids, twin._counts = self._indexes.copy(), self._ids.copy(), self._counts.copy()
        return twin

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that penalties apply to, int64 [n], and how often each occurs in the output, fp32 [n]."""
        n = len(self._indexes)
        return self._ids[:n], self._counts[:n]

    @property
    def penalises(self) -> bool:
        """True if the rules have a penalty, and not a bias alone."""
        return self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0

    @property
    def n_penalised(self) -> int:
        """How many tokens the penalties apply to."""
        return len(self._indexes) if self.penalises else 0

    def generated(self, token: int) -> None:
        """Count a token of the output."""
        if self.penalises:
            index = self._index_of(token)  # before self._counts is read: this call may replace it by a larger array
            self._counts[index] += 1.0

    def _index_of(self, token: int) -> int:
        index = self._indexes.setdefault(token, len(self._indexes))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        return index


class RowRules(NamedTuple):
    """The rules of several rows, one row's behind the other's.

    The logits of the tokens `biased` get `bias` added. Those of `seen` are then penalised: x becomes x / r - p if
    x > 0, else x * r - p, with the row's repetition penalty r and p from `penalty`. `stops` says where the biases and
    the penalties of each row end.
    """

    biased: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    seen: npt.NDArray[np.int64]
    penalty: npt.NDArray[np.float32]
    stops: list[tuple[int, int]]


def row_rules(rules: Sequence[LogitRules]) -> RowRules:
    """The rules of several rows, one entry for each."""
    penalising = [rule for rule in rules if rule.penalises]
    counts = [rule.seen[1] for rule in penalising]
    penalties = [
        rule.frequency * n + rule.presence * (n > 0) if rule.frequency or rule.presence else np.zeros_like(n)
        for rule, n in zip(penalising, counts, strict=True)
    ]
    bias_stops = np.cumsum([len(rule.bias_ids) for rule in rules], dtype=np.int64).tolist()
    seen_stops = np.cumsum([rule.n_penalised for rule in rules], dtype=np.int64).tolist()
    return RowRules(
        _joined([rule.bias_ids for rule in rules], np.int64),
        _joined([rule.bias for rule in rules], np.float32),
        _joined([rule.seen[0] for rule in penalising], np.int64),
        _joined(penalties, np.float32).astype(np.float32, copy=False),
        list(zip(bias_stops, seen_stops, strict=True)),
    )


def flat_rules(rules: Sequence[tuple[int, LogitRules]], vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """The rules of several rows of one matrix [rows, vocab_size], each with the number of its row.

    The logits at the flat indices "biased" (int64) get "bias" (fp32) added. Those at "seen" (int64) are then penalised:
    x becomes x / r - p if x > 0, else x * r - p, with r and p from "repetition" and "penalty" (fp32).
    """
    found = row_rules([rule for _, rule in rules])
    starts = np.array([row * vocab_size for row, _ in rules], np.int64)
    n_seen = [rule.n_penalised for _, rule in rules]
    repetitions = np.array([rule.repetition for _, rule in rules], np.float32)
    return {
        "biased": found.biased + starts.repeat([len(rule.bias_ids) for _, rule in rules]),
        "bias": found.bias,
        "seen": found.seen + starts.repeat(n_seen),
        "repetition": repetitions.repeat(n_seen),
        "penalty": found.penalty,
    }


def _joined(arrays: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])
