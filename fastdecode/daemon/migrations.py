"""Migration of one link's sequences from and to other R-nodes (transports/migration.py), and from and to other links of
this R-node, whose pages are copied in memory. Adoption copies likewise (orphans.py)."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fastdecode.daemon.orphans import KeyedLease, Orphans
from fastdecode.kernels._native import REngineLink
from fastdecode.region.contract import PAGE_TOKENS, Status, blocks_for
from fastdecode.transports import migration
from fastdecode.transports.base import CallRefused, LinkRefused, TransportError, refusals
from fastdecode.transports.frames import FrameSocket
from fastdecode.transports.migration import MigrationSender

#: The kernel gives the thread a third of the time of a thread that attends. With less, migrations starve on a busy
#: machine.
_NICE = 5


def _give_way() -> None:
    """Let threads that attend run before this thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


#: The thread that faults in memory for all links: the OS clears pages, in a virtual machine for tens of milliseconds.
fault_thread = ThreadPoolExecutor(1, "fault-in", _give_way)


class _MigratingSequence(ABC):
    """A sequence whose pages go over a migration connection."""

    def __init__(self, link: REngineLink, seq: tuple[int, int], page_bytes: int):
        self.page_bytes = page_bytes
        self.claimed = False  # a migration connection has presented its token
        self._link, self._seq = link, seq
        self._task: asyncio.Task[None] | None = None

    async def run(self, conn: FrameSocket) -> None:
        """Serve the connection until it ends, or `end` is called."""
        self._task = asyncio.current_task()
        try:
            await self._run(conn)
        finally:
            self._task = None

    @abstractmethod
    async def _run(self, conn: FrameSocket) -> None: ...

    def end(self) -> None:
        """Move no more pages: the sequence is about to be freed."""
        if self._task is not None:
            self._task.cancel()


class IncomingSequence(_MigratingSequence):
    """A sequence that may migrate here (a transports.base.IncomingPages)."""

    def __init__(self, link: REngineLink, seq: tuple[int, int], length: int, page_bytes: int):
        super().__init__(link, seq, page_bytes)
        self._n_pages = blocks_for(length)
        self._faulted = 0  # bytes from the first page on that have memory
        self._more = asyncio.Event()
        self._faulting = asyncio.create_task(self._fault_in())

    def check(self, first: int, n_pages: int, length: int) -> None:
        if first + n_pages > self._n_pages or length > self._n_pages * PAGE_TOKENS:
            raise CallRefused(Status.BAD_SEQUENCE, f"the sequence has room for {self._n_pages} pages")

    async def _fault_in(self) -> None:
        """Let the OS find memory for the pages, in another thread, so that the event loop does not wait."""
        loop, total = asyncio.get_running_loop(), self._n_pages * self.page_bytes
        try:
            while self._faulted < total:
                fault_in = partial(self._link.fault_in, *self._seq, 0, self._n_pages, self._faulted)
                n = await loop.run_in_executor(fault_thread, fault_in)
                self._have_memory(self._faulted + n)
        except (ValueError, RuntimeError):  # the sequence or the link has gone; the sending R-node gets an error
            self._have_memory(total)

    def _have_memory(self, n_bytes: int) -> None:
        self._faulted = n_bytes
        self._more.set()

    async def memory(self, first: int, end: int) -> None:
        """Wait until the first `end` bytes from page `first` on have memory."""
        while self._faulted < min(first * self.page_bytes + end, self._n_pages * self.page_bytes):
            self._more.clear()
            await self._more.wait()

    def receive(self, fd: int, first: int, n_pages: int, offset: int) -> int:
        with refusals():
            return self._link.receive_pages(fd, *self._seq, first, n_pages, offset)

    async def copy(self, source: REngineLink, seq: tuple[int, int], pages: range, waits: Callable[[], bool]) -> None:
        """Copy pages of a sequence of a link of this R-node, while `waits()` is true. Raises CallRefused."""
        offset, total = 0, len(pages) * self.page_bytes
        while offset < total:
            await self.memory(pages.start, offset + migration.PIECE_BYTES)
            if not waits():
                raise CallRefused(Status.BAD_SEQUENCE, "the sequence does not wait for pages any more")
            with refusals():
                offset += source.copy_pages(self._link, *seq, *self._seq, pages.start, len(pages), offset)
            await asyncio.sleep(0)  # PINGs and other requests are answered between two pieces

    def finish(self, length: int) -> None:
        with refusals():
            self._link.trim(*self._seq, length)

    async def _run(self, conn: FrameSocket) -> None:
        await migration.receive_sequence(conn, self)

    def end(self) -> None:
        """Receive no more: nothing is written to the sequence's pages after this."""
        self._faulting.cancel()
        self._have_memory(self._n_pages * self.page_bytes)  # a caller that waits for it continues, and is refused
        super().end()


class OfferedSequence(_MigratingSequence):
    """A sequence whose pages may be fetched (a transports.base.OfferedPages)."""

    def check(self, first: int, n_pages: int) -> None:
        with refusals():
            n_blocks = blocks_for(self._link.length(*self._seq))
        if not n_pages or first + n_pages > n_blocks:
            raise CallRefused(Status.BAD_SEQUENCE, f"the sequence has {n_blocks} pages")

    def send(self, fd: int, first: int, n_pages: int, offset: int) -> int:
        with refusals():
            return self._link.send_pages(fd, *self._seq, first, n_pages, offset)

    async def _run(self, conn: FrameSocket) -> None:
        await migration.send_fetched(conn, self)


class Inbox:
    """The sequences that may migrate to an R-node or be fetched from it, by token."""

    def __init__(self) -> None:
        self.waiting: dict[str, IncomingSequence | OfferedSequence] = {}

    def take(self, token: str, page_bytes: int) -> IncomingSequence | OfferedSequence:
        """The sequence that `token` admits. Raises LinkRefused."""
        incoming = self.waiting.get(token)
        if incoming is None or incoming.claimed:
            raise LinkRefused("no sequence waits for this token")
        if page_bytes != incoming.page_bytes:
            raise LinkRefused(f"a page has {page_bytes} bytes there and {incoming.page_bytes} here")
        incoming.claimed = True
        return incoming


class Migrations:
    """The migrations of one link. All methods run on the event loop."""

    def __init__(self, lease: KeyedLease, page_bytes: int, inbox: Inbox, orphans: Orphans, secret: bytes | None):
        self._link, self._page_bytes, self._inbox, self._secret = lease.link, page_bytes, inbox, secret
        self._format, self._orphans = lease.format, orphans
        self._adopting: dict[int, IncomingSequence] = {}  # by sequence index
        #: Of the sequences that may migrate here or are offered, by sequence index.
        self._tokens: dict[int, str] = {}
        #: Migration connections that wait for the rest of a sequence, by sequence index, each with its token.
        self._deliveries: dict[int, tuple[str, MigrationSender]] = {}
        #: Migration connections that wait for another sequence, by the R-node's URL, each with the timer that closes
        #: it.
        self._idle: dict[str, tuple[asyncio.TimerHandle, MigrationSender]] = {}
        #: The sequences of other links of this R-node that sequences of this link migrate to, by sequence index.
        self._local: dict[int, IncomingSequence] = {}

    def receive(self, seq: tuple[int, int], length: int, token: str) -> None:
        """Let an empty sequence wait for its pages. Raises CallRefused."""
        if token in self._inbox.waiting:
            raise CallRefused(Status.BAD_CALL, "this token is in use")
        with refusals():
            self._link.receive(*seq, length)
        self._forget(seq[0])
        self._tokens[seq[0]] = token
        self._inbox.waiting[token] = IncomingSequence(self._link, seq, length, self._page_bytes)

    def offer(self, seq: tuple[int, int], token: str) -> None:
        """Let pages of a sequence be fetched with `token`. Raises CallRefused."""
        if token in self._inbox.waiting:
            raise CallRefused(Status.BAD_CALL, "this token is in use")
        with refusals():
            if not self._link.length(*seq):
                raise ValueError(f"sequence {seq[0]} is empty")
        self._forget(seq[0])
        self._tokens[seq[0]] = token
        self._inbox.waiting[token] = OfferedSequence(self._link, seq, self._page_bytes)

    def freed(self, handles: Sequence[tuple[int, int]]) -> None:
        """Stop receiving and sending sequences that are about to be freed."""
        for seq_index, _ in handles:
            self._forget(seq_index)
            self._close_delivery(seq_index)

    def _forget(self, seq_index: int) -> None:
        if incoming := self._adopting.pop(seq_index, None):
            incoming.end()
        if token := self._tokens.pop(seq_index, None):
            self._inbox.waiting.pop(token).end()

    async def push(self, seq: tuple[int, int], pages: range, length: int, url: str, token: str) -> None:
        """Send pages to the R-node at `url`, or copy them if that is this R-node. Raises TransportError."""
        if token in self._inbox.waiting:
            await self._copy(seq, pages, length, token)
            return
        begun, delivery = self._deliveries.pop(seq[0], (token, None))
        if delivery is not None and begun != token:
            delivery.close()
            delivery = None
        if delivery is None:
            delivery = await self._delivery(url, token)

        def move(fd: int, offset: int) -> int:
            with refusals():
                return self._link.send_pages(fd, *seq, pages.start, len(pages), offset)

        try:
            await delivery.send(pages.start, len(pages), length, move)
        except BaseException:
            delivery.close()
            raise
        if length:
            self._keep_idle(url, delivery)
        else:
            self._close_delivery(seq[0])
            self._deliveries[seq[0]] = token, delivery

    async def _delivery(self, url: str, token: str) -> MigrationSender:
        """A migration connection to the R-node at `url`, idle or new, for the sequence that `token` admits. Raises
        TransportError."""
        if idle := self._idle.pop(url, None):
            timer, delivery = idle
            timer.cancel()
            try:
                await delivery.next(token)
            except TransportError:  # the R-node may have closed it meanwhile; a new connection tells
                delivery.close()
            except BaseException:
                delivery.close()
                raise
            else:
                return delivery
        return await MigrationSender.open(url, token, self._page_bytes, self._secret)

    def _keep_idle(self, url: str, delivery: MigrationSender) -> None:
        self._close_idle(url)
        self._idle[url] = asyncio.get_running_loop().call_later(migration.IDLE_S, self._close_idle, url), delivery

    def _close_idle(self, url: str) -> None:
        if idle := self._idle.pop(url, None):
            idle[0].cancel()
            idle[1].close()

    async def _copy(self, seq: tuple[int, int], pages: range, length: int, token: str) -> None:
        """Copy pages to the sequence that waits for `token` on this R-node. Raises LinkRefused, CallRefused."""
        incoming = self._local.get(seq[0])
        if incoming is None or self._inbox.waiting[token] is not incoming:
            taken = self._inbox.take(token, self._page_bytes)
            if not isinstance(taken, IncomingSequence):
                raise LinkRefused("the sequence of this token receives no pages")
            incoming = self._local[seq[0]] = taken
        incoming.check(pages.start, len(pages), length)
        await incoming.copy(self._link, seq, pages, lambda: self._inbox.waiting.get(token) is incoming)
        if length:
            incoming.finish(length)
            self._local.pop(seq[0], None)  # another PUSH of the same pages may have ended before

    async def adopt(self, seq: tuple[int, int], length: int, key: str) -> None:
        """Let an empty sequence have the first `length` tokens of the sequence that has a key. Raises CallRefused."""
        source, handle = self._orphans.find(key, length, self._format)
        with refusals():
            self._link.receive(*seq, length)
        self._forget(seq[0])
        self._orphans.claim(key)
        incoming = self._adopting[seq[0]] = IncomingSequence(self._link, seq, length, self._page_bytes)
        copied = False
        try:
            pages = range(blocks_for(length))
            await incoming.copy(source, handle, pages, lambda: self._adopting.get(seq[0]) is incoming)
            copied = True
        finally:
            self._orphans.end_claim(key, length, copied)
            if self._adopting.get(seq[0]) is incoming:
                del self._adopting[seq[0]]
            incoming.end()

    def _close_delivery(self, seq_index: int) -> None:
        self._local.pop(seq_index, None)
        if found := self._deliveries.pop(seq_index, None):
            found[1].close()

    def close(self) -> None:
        """End all migrations. No PUSH may be under way."""
        self.freed([(seq_index, 0) for seq_index in [*self._tokens, *self._deliveries, *self._adopting]])
        for url in list(self._idle):
            self._close_idle(url)
