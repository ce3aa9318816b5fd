"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Cuts a stream of text before the first stop string.

    Text that could be the beginning of a stop string is held back until more text decides. So no part of a stop string
    is ever released, however the text is cut into tokens. The stop string that is complete first counts. The time is
    linear in the length of the text (Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977).
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        """With `include`, the text is cut behind the stop string and not before it."""
        self._include = include
        self._patterns = [(stop, _failures(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # for each stop string, how many of its characters the text ends with
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text. Returns the text that is released now, and whether a stop string is complete.

        After a complete stop string, `push` must not be called again.
        """
        if not self._patterns:
            return text, False
        before = len(self._held)
        self._held += text
        for end, character in enumerate(text, before + 1):
            if complete := self._advance(character):
                return self._held[: end if self._include else end - complete], True
        released = self._held[: len(self._held) - max(self._matched)]
        self._held = self._held[len(released) :]
        return released, False

    def flush(self) -> str:
        """At the end of the text, return the text that is held back."""
        text, self._held = self._held, ""
        return text

    def _advance(self, character: str) -> int:
        """Take one character. Returns the length of the longest stop string that it completes, else 0."""
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
    """For each non-empty prefix of `stop`, the length of its longest proper suffix that is also a prefix of `stop`."""
    failures = [0] * len(stop)
    n = 0
    for i in range(1, len(stop)):
        while n and stop[i] != stop[n]:
            n = failures[n - 1]
        if stop[i] == stop[n]:
            n += 1
        failures[i] = n
    return tuple(failures)
