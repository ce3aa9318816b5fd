"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Cuts a stream of text before the first stop string.

    Text that could be the beginning of a stop string is held back until it is known not to be, so no part of one is
    ever released, however the text is cut into tokens. Of several, the one that is complete first counts. Time is
    linear in the text, whatever the strings (Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977).
    """

    def __init__(self, stops: Sequence[str]):
        self._patterns = [(stop, _failures(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string that the text ends in
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text released by `text`, and whether a stop string was met (nothing may be pushed after that)."""
        if not self._patterns:
            return text, False
        before = len(self._held)
        self._held += text
        for end, character in enumerate(text, before + 1):
            if complete := self._advance(character):
                return self._held[: end - complete], True
        released = self._held[: len(self._held) - max(self._matched)]
        self._held = self._held[len(released) :]
        return released, False

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _advance(self, character: str) -> int:
        """Take one character; the length of the longest stop string that it completes, else 0."""
        complete = 0
        for i, (stop, failures) in enumerate(self._patterns):
            n = self._matched[i]
            while n and stop[n] != character:
                n = failures[n - 1]
            if stop[n] == character:
                n += 1
            self._matched[i] = n
            if n == len(stop):
                complete = max(complete, n)
        return complete


@lru_cache(maxsize=256)
def _failures(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`, the length of its longest proper end that is also a beginning."""
    failures = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = failures[n - 1]
        if stop[i] == stop[n]:
            n += 1
        failures[i] = n
    return tuple(failures)
