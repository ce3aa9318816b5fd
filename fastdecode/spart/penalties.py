"""What a request asks to be done to its logits before a token is drawn, and the tokens that this depends on.

In this order, for the logit x of a token:

    bias         x + bias                                              OpenAI's `logit_bias`
    repetition   x / r if x > 0, x * r if not, of tokens that the      CTRL (Keskar et al., arXiv 1909.05858, 4.1), as
                 prompt or the output has                              Hugging Face and vLLM have it
    the others   x - frequency * n - presence, of tokens that the      OpenAI's `frequency_penalty` and
                 output has n > 0 times                                `presence_penalty`

Knows no torch: the sampler, which has the logits, applies it (sampling.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class LogitRules:
    """One sequence's rules and counts."""

    def __init__(
        self,
        *,
        bias: Iterable[tuple[int, float]] = (),
        repetition: float = 1.0,
        frequency: float = 0.0,
        presence: float = 0.0,
        prompt: Iterable[int] = (),
    ):
        """`bias` names a token once; token ids are within the vocabulary."""
        self.repetition, self.frequency, self.presence = repetition, frequency, presence
        pairs = tuple(bias)
        self.bias_ids = np.array([token for token, _ in pairs], np.int64)
        self.bias = np.array([value for _, value in pairs], np.float32)
        self._place: dict[int, int] = {}  # of a token in the arrays, which have room to spare
        self._ids, self._counts = np.empty(16, np.int64), np.zeros(16, np.float32)
        if repetition != 1.0:
            for token in prompt:
                self._place_of(token)

    @property
    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that penalties are for, each once, and how often the output has them: int64 and fp32, [n]."""
        n = len(self._place)
        return self._ids[:n], self._counts[:n]

    @property
    def penalises(self) -> bool:
        return self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0

    def generated(self, token: int) -> None:
        """Count a token of the output."""
        if self.penalises:
            place = self._place_of(token)  # first: it may put larger arrays in their place
            self._counts[place] += 1.0

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        return place
