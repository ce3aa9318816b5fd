"""Sequences that another S-node may adopt, on one R-node: those of links, and those of links that have ended.

An S-node gives the R-node a key for each sequence whose stream another S-node may continue (KEEP). Whoever has the key
may copy the sequence's pages to a link of its own (ADOPT), while the first link serves or after it has ended. A lease
whose link has ended becomes an orphan: the sequences that have keys stay for some seconds, and the others are freed at
once. Orphans give way to living links, a sequence at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fastdecode.kernels._native import REngineLink
from fastdecode.region.contract import Status
from fastdecode.transports.base import CallRefused, Hello

log = logging.getLogger(__name__)

#: Most orphans at a time; one more, and the oldest one goes.
_MOST_ORPHANS = 16
#: Most keys of a lease.
_MOST_KEYS = 1 << 16


def page_format(hello: Hello) -> Hello:
    """What two links must have in common for the pages of one to serve the other."""
    return replace(hello, geometry=replace(hello.geometry, n_slots=1, max_rows=1), kv_bytes=None, max_seqs=1)


@dataclass(eq=False, slots=True)
class KeyedLease:
    """The sequences of one lease that have keys."""

    link: REngineLink
    format: Hello  # see page_format
    keys: dict[int, tuple[int, str]] = field(default_factory=dict)  # tag and key, by sequence index
    timer: asyncio.TimerHandle | None = None  # ends an orphan

    def length(self, seq_index: int) -> int:
        """Tokens of a sequence that has a key; 0 if it is gone."""
        try:
            return self.link.length(seq_index, self.keys[seq_index][0])
        except (ValueError, RuntimeError):  # freed, or the link is closed
            return 0


class Orphans:
    """The sequences of an R-node that have keys. Belongs to the event loop."""

    def __init__(self, seconds: float):
        """`seconds`: how long an orphan stays; 0: a lease goes with its link."""
        self._seconds = seconds
        self._sequences: dict[str, tuple[KeyedLease, int]] = {}  # the lease and sequence index, by key
        self._claimed: set[str] = set()  # keys of sequences that are being adopted
        self._orphans: dict[KeyedLease, None] = {}  # oldest first
        self._closed = False
        self._running: set[asyncio.Future[None]] = set()

    # -- the lease of a link ---------------------------------------------------------------------------------------

    def keep(self, lease: KeyedLease, seq_index: int, tag: int, key: str | None) -> None:
        """Give a sequence a key in place of the one that it has; None: it has none any more. Raises CallRefused."""
        self.forget(lease, seq_index)
        if key is None:
            return
        other, index = self._sequences.get(key, (lease, None))
        if other is not lease:
            raise CallRefused(Status.BAD_CALL, "this key is in use")
        if index is not None:
            self.forget(lease, index)  # the stream's sequence was placed a second time
        if len(lease.keys) >= _MOST_KEYS:
            raise CallRefused(Status.BAD_CALL, f"a lease has at most {_MOST_KEYS} keys")
        lease.keys[seq_index] = tag, key
        self._sequences[key] = lease, seq_index

    def forget(self, lease: KeyedLease, seq_index: int) -> None:
        """The key of a sequence that is freed is void."""
        if found := lease.keys.pop(seq_index, None):
            del self._sequences[found[1]]

    def outlives_link(self, lease: KeyedLease) -> bool:
        """True if a lease whose link is ending is to become an orphan. May be called by any thread."""
        return bool(lease.keys) and self._seconds > 0 and not self._closed

    def add(self, lease: KeyedLease) -> None:
        """Take over a lease whose link is retired."""
        for seq_index in [index for index in lease.keys if not lease.length(index)]:
            self.forget(lease, seq_index)
        if not lease.keys:
            self._run(self._drop(lease))
            return
        while len(self._orphans) >= _MOST_ORPHANS:
            self._run(self._drop(next(iter(self._orphans))))
        self._orphans[lease] = None
        lease.timer = asyncio.get_running_loop().call_later(self._seconds, self._expire, lease)
        log.info("%d sequence(s) of a link that has ended stay for %.0f s", len(lease.keys), self._seconds)

    # -- adoption --------------------------------------------------------------------------------------------------

    def find(self, key: str, length: int, wanted: Hello) -> tuple[REngineLink, tuple[int, int]]:
        """The link and the handle of the sequence that has this key, at least `length` tokens, and the format `wanted`.
        Raises CallRefused."""
        lease, seq_index = self._sequences.get(key, (None, 0))
        if lease is None or key in self._claimed or lease.length(seq_index) < length:
            raise CallRefused(Status.BAD_SEQUENCE, "no sequence of this length has this key")
        if lease.format != wanted:
            raise CallRefused(Status.BAD_CALL, "the sequence that has this key is of another geometry or KV format")
        return lease.link, (seq_index, lease.keys[seq_index][0])

    def claim(self, key: str) -> None:
        """Begin to adopt a sequence, which another link then cannot."""
        self._claimed.add(key)

    def end_claim(self, key: str, length: int, adopted: bool) -> None:
        """End an adoption. The key of an adopted sequence is void, and an orphan has the sequence no more. Raises
        CallRefused if the sequence has gone while it was copied."""
        self._claimed.discard(key)
        if not adopted:
            return
        lease, seq_index = self._sequences.get(key, (None, 0))
        if lease is None or lease.length(seq_index) < length:
            raise CallRefused(Status.BAD_SEQUENCE, "the sequence was freed while it was copied")
        if lease in self._orphans:
            self._run(self._free(lease, seq_index))
        else:
            self.forget(lease, seq_index)

    # -- the memory of orphans -------------------------------------------------------------------------------------

    def make_room(self, enough: Callable[[], bool]) -> None:
        """Free sequences of orphans, those of the oldest first, until `enough()` is true or none is left."""
        n = 1  # more and more at a time, because giving memory back looks at all pages of a lease
        while self._orphans and not enough():
            lease = next(iter(self._orphans))
            for seq_index in list(lease.keys)[:n]:
                give_back = self._free(lease, seq_index)
            give_back()
            n *= 2

    def _free(self, lease: KeyedLease, seq_index: int) -> Callable[[], None]:
        """Free a sequence of an orphan. Returns what gives its memory back, which takes a moment."""
        tag, _ = lease.keys[seq_index]
        self.forget(lease, seq_index)
        if not lease.keys:
            return self._drop(lease)
        with contextlib.suppress(ValueError):  # it is gone
            lease.link.free(seq_index, tag)
        return lease.link.shrink

    def _expire(self, lease: KeyedLease) -> None:
        log.info("nobody has adopted %d sequence(s) of a link that has ended: they are freed", len(lease.keys))
        self._run(self._drop(lease))

    def _drop(self, lease: KeyedLease) -> Callable[[], None]:
        """Forget an orphan. Returns what frees its lease, which takes a moment."""
        self._orphans.pop(lease, None)
        if lease.timer is not None:
            lease.timer.cancel()
        for seq_index in list(lease.keys):
            self.forget(lease, seq_index)
        return lease.link.close

    def _run(self, work: Callable[[], None]) -> None:
        """Give memory back in another thread."""
        running = asyncio.get_running_loop().run_in_executor(None, _unless_closed, work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Free all orphans, and take over none any more."""
        self._closed = True
        for lease in list(self._orphans):
            self._run(self._drop(lease))
        await asyncio.gather(*self._running)


def _unless_closed(work: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the link was closed meanwhile
        work()
