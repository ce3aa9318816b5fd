"""Slots for the states that layers without attention keep of sequences in the S-Part's memory.

A sequence has a slot from its placement until it must be recomputed or ends, wherever its K and V are meanwhile. For
the time of a step it has one more for each guess.

The prefix cache needs snapshots: a prompt can share the first tokens of another sequence only if there is the state
after exactly these tokens. A snapshot is taken of the state after some whole pages of a prompt, whose hash is then its
key, and of the last state of a sequence that has ended, whose key is its prefix entry. Snapshots have the slots that
are left; the one used longest ago goes first when a sequence needs its slot.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator

#: Share of the slots that snapshots leave free, for newcomers and guesses.
_HEADROOM = 0.25


class StateSlots:
    """The slots of all sequences and snapshots. `n` None: the model's layers keep no states, and need no slots."""

    def __init__(self, n: int | None):
        self.needed = n is not None
        self.total = sys.maxsize if n is None else n  # sequences that can have a state at once
        self.expected: set[Hashable] = set()  # the keys of the snapshots that running prompts are to leave
        self._free = list(range(n or 0))
        self._snapshots: OrderedDict[Hashable, StateSlot] = OrderedDict()  # the one used longest ago first

    @property
    def free(self) -> int:
        """How many more sequences can have a state."""
        return len(self._free) + sum(1 for _ in self._evictable()) if self.needed else self.total

    @property
    def any_free(self) -> bool:
        """True if one more sequence can have a state."""
        return not self.needed or bool(self._free) or next(self._evictable(), None) is not None

    @property
    def unused(self) -> int:
        """How many guesses can have a state. They drop no snapshot."""
        return len(self._free) if self.needed else self.total

    def start(self, snapshot: Hashable = None) -> SequenceState | None:
        """The state of a sequence that begins, from the snapshot with this key if there is one; None if a sequence
        needs none. Raises ValueError unless `any_free`."""
        if not self.needed:
            return None
        source = self._snapshots.get(snapshot)
        if source is None:
            return SequenceState(self, self._take())
        self._snapshots.move_to_end(snapshot)
        source.holders += 1
        if self.any_free:
            return SequenceState(self, self._take(), source)
        self.drop(snapshot)  # the sequence has the slot for itself
        return SequenceState(self, source)

    def take_for_guesses(self, n: int) -> list[StateSlot]:
        """Slots for the states after `n` guesses, at most as many as are unused; empty if a sequence needs none."""
        return [StateSlot(self._free.pop(), self._free) for _ in range(n)] if self.needed else []

    def take_for_snapshot(self) -> StateSlot | None:
        """A slot for one more snapshot, if need be that of the snapshot used longest ago. None: there is none."""
        if len(self._free) <= _HEADROOM * self.total:
            oldest = next(self._evictable(), None)
            if oldest is None:
                return None
            self.drop(oldest)
        return StateSlot(self._free.pop(), self._free)

    def has(self, key: Hashable) -> bool:
        """True if there is a snapshot with this key."""
        return key in self._snapshots

    def add_snapshot(self, key: Hashable, slot: StateSlot) -> None:
        """Make a slot a snapshot, the one used last. Older ones go until the headroom is free."""
        self.drop(key)
        self.expected.discard(key)
        self._snapshots[key] = slot
        while len(self._free) < _HEADROOM * self.total and (oldest := next(self._evictable(), key)) != key:
            self.drop(oldest)

    def rename(self, key: Hashable, new: Hashable) -> None:
        """Give the snapshot with this key, if there is one, a new key."""
        if (slot := self._snapshots.pop(key, None)) is not None:
            self._snapshots[new] = slot

    def drop(self, key: Hashable) -> None:
        """Drop the snapshot with this key, if there is one."""
        if (slot := self._snapshots.pop(key, None)) is not None:
            slot.give_back()

    def _take(self) -> StateSlot:
        if not self._free and (key := next(self._evictable(), None)) is not None:
            self.drop(key)
        if not self._free:
            raise ValueError("no slot is free for the state of a sequence")
        return StateSlot(self._free.pop(), self._free)

    def _evictable(self) -> Iterator[Hashable]:
        """The keys of snapshots that no sequence is about to begin from."""
        return (key for key, slot in self._snapshots.items() if slot.holders == 1)


class SequenceState:
    """The slots of a placed sequence. Numbers of tokens count from its first one."""

    __slots__ = ("_borders", "_guesses", "_own", "_slots", "_snapshots", "_source")

    def __init__(self, slots: StateSlots, own: StateSlot, source: StateSlot | None = None):
        """`source`: the snapshot that the sequence begins from; None: it begins from nothing, or from `own`."""
        self._slots, self._own, self._source = slots, own, source
        self._guesses: list[StateSlot] = []  # for the states after the guesses of a step in flight
        self._borders: list[tuple[int, Hashable]] = []  # tokens after which a snapshot is wanted, and its key
        self._snapshots: list[tuple[int, Hashable, StateSlot]] = []  # of a step in flight

    @property
    def index(self) -> int:
        """The slot that has the state of the cached tokens; see Chunk.state."""
        return (self._source or self._own).index

    def want_snapshots(self, borders: Iterable[tuple[int, Hashable]]) -> None:
        """Let the next steps leave a snapshot with a key after each of these numbers of tokens, in ascending order."""
        self._borders = [(n, key) for n, key in borders if not self._slots.has(key)]
        self._slots.expected.update(key for _, key in self._borders)

    def begin_prompt(self, cached: int, n_tokens: int) -> None:
        """Take slots for the snapshots that the next `n_tokens` tokens of a prompt leave."""
        while self._borders and self._borders[0][0] <= cached + n_tokens:
            n, key = self._borders.pop(0)
            slot = self._slots.take_for_snapshot() if n > cached else None
            if slot is None:
                self._slots.expected.discard(key)
            else:
                self._snapshots.append((n, key, slot))

    def begin_guesses(self, n: int) -> None:
        """Take slots for the states after `n` guesses, at most as many as are unused."""
        self._guesses = self._slots.take_for_guesses(n)

    def after(self, cached: int, n_tokens: int) -> tuple[tuple[int, int], ...]:
        """Where the states go that the step in flight leaves of the next `n_tokens` tokens; see Chunk.states_after."""
        if not (self._source or self._snapshots or self._guesses):
            return ()
        own = enumerate((self._own, *self._guesses), n_tokens - len(self._guesses))
        return tuple((n - cached, slot.index) for n, _, slot in self._snapshots) + tuple((n, s.index) for n, s in own)

    def end_step(self) -> None:
        """Record that the step in flight has left its states."""
        for _, key, slot in self._snapshots:
            self._slots.add_snapshot(key, slot)
        self._snapshots = []
        self.forget_source()

    def end_guesses(self, right: int) -> None:
        """Go on with the state after the `right` right guesses of a step that has ended."""
        slots = [self._own, *self._guesses]
        self._own, self._guesses = slots.pop(right), []
        for slot in slots:
            slot.give_back()

    def forget_source(self) -> None:
        """Do not begin from a snapshot, or do not any more."""
        if self._source is not None:
            self._source.give_back()
            self._source = None

    def become_snapshot(self, key: Hashable) -> None:
        """Make the last state of a sequence that has ended a snapshot, and give the other slots back."""
        self._slots.add_snapshot(key, self._own)
        self._give_back_others()

    def give_back(self) -> None:
        """Let other states have the slots. The sequence is in no step."""
        self._own.give_back()
        self._give_back_others()

    def _give_back_others(self) -> None:
        self.forget_source()
        for slot in (*self._guesses, *(slot for _, _, slot in self._snapshots)):
            slot.give_back()
        self._slots.expected.difference_update(key for _, key, *_ in (*self._borders, *self._snapshots))


class StateSlot:
    """The slot of one state. `index` is its number in the S-Part."""

    __slots__ = ("_free", "holders", "index")

    def __init__(self, index: int, free: list[int]):
        self.index, self._free = index, free
        self.holders = 1  # sequences that have it or begin from it, and 1 for a snapshot

    def give_back(self) -> None:
        """Count one holder less. Without one, another state can have the slot."""
        self.holders -= 1
        if not self.holders:
            self._free.append(self.index)
