"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache


class StopStrings:
    """Cuts a stream of text before the first stop string.

    Text that could be the beginning of a stop string is held back until more text decides. So no part of a stop string
    is ever released, however the text is cut into tokens. The stop string that is complete first counts. The time is
    linear in the length of the text (Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977).

    Special tokens that are no text can be part of a stop string all the same: they are hidden parts of the text.
    """

    def __init__(
        self, stops: Sequence[str], *, include: bool = False, is_special: Callable[[str], bool] = lambda stop: False
    ):
        """With `include`, the text is cut behind the stop string and not before it.

        Stop strings for which `is_special` is true are looked for in the text with its hidden parts, all others in the
        text without them.
        """
        self._include = include
        self._patterns = [(stop, _failures(stop), is_special(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # for each stop string, how many of its characters the text ends with
        self._held = ""
        self.complete: str | None = None  # the stop string at which the text was cut
        # The last characters, as many as a special stop string has: 1 stands for a shown character, 0 for a hidden one.
        self._shown = bytearray()
        self._longest = max((len(stop) for stop, _, special in self._patterns if special), default=0)

    def push(self, text: str, *, hidden: bool = False) -> tuple[str, bool]:
        """Take more text, which is never released if it is `hidden`. Returns the text that is released now, and whether
        a stop string is complete.

        After a complete stop string, `push` must not be called again.
        """
        if not self._patterns:
            return "" if hidden else text, False
        before = len(self._held)
        self._held += "" if hidden else text
        for n, character in enumerate(text, 1):
            if (i := self._advance(character, hidden)) is not None:
                stop = self.complete = self._patterns[i][0]
                end = before + (0 if hidden else n)
                released = self._held[: end - self._n_shown(i, len(stop))]
                return released + (stop if self._include else ""), True
        kept = max(self._n_shown(i, n) for i, n in enumerate(self._matched))
        released, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return released, False

    def flush(self) -> str:
        """At the end of the text, return the text that is held back."""
        text, self._held = self._held, ""
        return text

    def _n_shown(self, i: int, n: int) -> int:
        """How many of the last `n` characters that stop string `i` has matched are shown."""
        return sum(self._shown[len(self._shown) - n :]) if self._patterns[i][2] else n

    def _advance(self, character: str, hidden: bool) -> int | None:
        """Take one character. Returns the number of the longest stop string that it completes, else None."""
        if self._longest:
            self._shown.append(not hidden)
            del self._shown[: -self._longest]
        complete: int | None = None
        for i, (stop, failures, special) in enumerate(self._patterns):
            if hidden and not special:
                continue
            n = self._matched[i]
            while n and stop[n] != character:
                n = failures[n - 1]
            if stop[n] == character:
                n += 1
            self._matched[i] = n
            if n == len(stop) and (complete is None or n > len(self._patterns[complete][0])):
                complete = i
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
