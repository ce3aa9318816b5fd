"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text before the first stop string.

    Text that could be the beginning of a stop string is held back until it is known not to be, so no part of one is
    ever released, however the text is cut into tokens. Of several, the one that is complete first counts.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text released by `text`, and whether a stop string was met (nothing may be pushed after that)."""
        if not self._stops:
            return text, False
        start = max(0, len(self._held) + 1 - max(map(len, self._stops)))  # what is held is no whole stop string
        self._held += text
        found = [(i + len(stop), i) for stop in self._stops if (i := self._held.find(stop, start)) >= 0]
        if found:
            _, begin = min(found)
            released, self._held = self._held[:begin], ""
            return released, True
        keep = max(self._overlap(stop) for stop in self._stops)
        released = self._held[: len(self._held) - keep]
        self._held = self._held[len(released) :]
        return released, False

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that is a beginning of `stop`."""
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:n]):
                return n
        return 0
