"""Slots for the states that layers without attention keep of sequences in the S-Part's memory.

A sequence has a slot from its placement until it must be recomputed or ends, wherever its K and V are meanwhile. For
the time of a step it has one more for each guess.
"""

from __future__ import annotations

import sys


class StateSlots:
    """All slots. `n` None: the model's layers keep no states, so a sequence needs no slot."""

    def __init__(self, n: int | None):
        self._needed = n is not None
        self.total = sys.maxsize if n is None else n  # sequences that can have a state at once
        self._free = list(range(n or 0))

    @property
    def free(self) -> int:
        """How many more sequences can have a state."""
        return len(self._free) if self._needed else self.total

    def take(self) -> StateSlot | None:
        """A free slot; None if a sequence needs none."""
        return StateSlot(self._free.pop(), self._free) if self._needed else None

    def take_for_guesses(self, n: int) -> list[StateSlot]:
        """Slots for the states after `n` guesses, at most as many as are free; empty if a sequence needs none."""
        return [StateSlot(self._free.pop(), self._free) for _ in range(n)] if self._needed else []


class StateSlot:
    """The slot of one state. `index` is its number in the S-Part; see Chunk.state."""

    __slots__ = ("_free", "index")

    def __init__(self, index: int, free: list[int]):
        self.index, self._free = index, free

    def give_back(self) -> None:
        """Let another state have the slot. No step reads or writes it."""
        self._free.append(self.index)
