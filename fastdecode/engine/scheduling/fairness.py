"""Fair shares of clients that wait at the same time, by virtual token counters.

Every client has a counter of the tokens that it was served; the client with the lowest one goes first (Sheng et al.,
arXiv 2401.00588). A client that joins gets no credit for the time in which it asked for nothing. Pure arithmetic.
"""

from __future__ import annotations

from collections import Counter

#: A generated token counts as much as this many tokens of a prompt.
OUTPUT_WEIGHT = 2.0


class FairShares:
    """The counters of all clients."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()  # sequences that wait, by client
        self._last = 0.0  # the counter of the client that left the queue last

    @property
    def contended(self) -> bool:
        """True if more than one client waits."""
        return len(self._waiting) > 1

    def served(self, client: str) -> float:
        """The tokens that a client was served, counted as tokens of prompts."""
        return self._served.get(client, 0.0)

    def join(self, client: str) -> None:
        """A sequence of a client begins to wait."""
        if not self._waiting[client]:
            others = [self._served[other] for other in self._waiting if other != client]
            least = min(others, default=self._last)
            self._served[client] = max(self.served(client), least)
        self._waiting[client] += 1

    def leave(self, client: str) -> None:
        """A sequence of a client waits no longer."""
        self._waiting[client] -= 1
        if not self._waiting[client]:
            del self._waiting[client]
            self._last = self.served(client)

    def charge(self, client: str, tokens: float) -> None:
        """Count tokens that a client is served."""
        self._served[client] = self.served(client) + tokens
