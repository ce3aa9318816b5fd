"""Migration connections: an R-node sends pages of a sequence straight to another R-node.

An S-node migrates a sequence by two requests. RECEIVE lets the target R-node hold the sequence, which is empty, for the
R-node that presents a token. PUSH lets the source open a migration connection to the target, present the token
(handshake.py) and send pages. Several PUSHes with one token use one connection: whole pages first, while the sequence
goes on, then the rest. The connection then waits for the next sequence, because a connection and a hand-shake for each
sequence would cost more than its bytes. The source's pages stay as they are: if a migration breaks, the sequence goes
on at the source.

An S-node fetches pages of a sequence to the device of its S-Part. OFFER lets it present a token over a migration
connection that it opens itself, and each FETCH brings pages.

C copies the bytes between the socket and the pages (kernels/engine/migration.c), at most 1 MiB at a time, on the event
loop. So a sequence that is freed, or a link that ends, stops its migration at once. Another thread faults in memory
that was never touched, from the RECEIVE on, because that may take the OS tens of milliseconds for a huge page.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Self

from . import handshake
from .base import CallRefused, IncomingPages, LinkDown, OfferedPages, TransportError
from .frames import FrameSocket
from .messages import ErrorMessage, Fetch, Message, Next, Ok, Pages, ProtocolError
from .registry import dial

#: Seconds in which at least one byte must be copied.
STALLED_S = 10.0

#: Seconds that a connection waits for the next sequence. The receiving end waits longer, so that it is the sending end
#: that closes the connection.
IDLE_S = 5.0
_RECEIVER_IDLE_S = 2 * IDLE_S

#: Bytes that C copies at a time.
PIECE_BYTES = 1 << 20


async def receive_sequence(conn: FrameSocket, target: IncomingPages) -> None:
    """Receive pages until the sequence is complete. Raises TransportError, OSError."""
    length = 0
    while not length:
        message = await conn.read()
        if not isinstance(message, Pages):
            raise ProtocolError(f"{message.TYPE} has no place on a migration connection")
        first, n_pages, length = message.first, message.n_pages, message.length
        try:
            target.check(first, n_pages, length)
            copy = partial(target.receive, conn.sock.fileno(), first, n_pages)
            await _copy(n_pages * target.page_bytes, copy, conn.readable, partial(target.memory, first))
            if length:
                target.finish(length)
        except CallRefused as error:
            await conn.write(ErrorMessage(id=0, status=error.status, message=str(error)))
            raise
        await conn.write(Ok(id=0, stats=None))


async def send_fetched(conn: FrameSocket, offered: OfferedPages) -> None:
    """Send the pages that the other end fetches, until it closes the connection or is silent for too long. Raises
    TransportError, OSError."""
    while True:
        try:
            async with asyncio.timeout(_RECEIVER_IDLE_S):
                message = await conn.read()
        except (LinkDown, TimeoutError):
            return
        if not isinstance(message, Fetch):
            raise ProtocolError(f"{message.TYPE} has no place on a connection that fetches pages")
        first, n_pages = message.first, message.n_pages
        try:
            offered.check(first, n_pages)
        except CallRefused as error:
            await conn.write(ErrorMessage(id=0, status=error.status, message=str(error)))
            raise
        await conn.write(Pages(first=first, n_pages=n_pages, length=0))
        copy = partial(offered.send, conn.sock.fileno(), first, n_pages)
        await _copy(n_pages * offered.page_bytes, copy, conn.writable)


async def next_sequence(conn: FrameSocket) -> Next | None:
    """Wait for the next sequence behind a whole one. None if the source has closed the connection, or has not used it
    for too long. Raises ProtocolError."""
    try:
        async with asyncio.timeout(_RECEIVER_IDLE_S):
            message = await conn.read()
    except (LinkDown, TimeoutError):
        return None
    if not isinstance(message, Next):
        raise ProtocolError(f"{message.TYPE} has no place behind a whole sequence")
    return message


async def _copy(
    total: int,
    copy: Callable[[int], int],
    ready: Callable[[], Awaitable[None]],
    memory: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    """Call `copy` with the offset of the next byte until `total` bytes have been copied. `ready` waits for the socket,
    and `memory` for memory up to an offset."""
    offset = 0
    while offset < total:
        if memory is not None:
            await memory(offset + PIECE_BYTES)
        if n := copy(offset):
            offset += n
            await asyncio.sleep(0)  # PINGs and other requests are answered between two pieces
            continue
        try:
            async with asyncio.timeout(STALLED_S):
                await ready()
        except TimeoutError:
            raise LinkDown(f"the other R-node has moved no byte for {STALLED_S:.0f} s") from None


def send_bytes(data: memoryview, fd: int, offset: int) -> int:
    """Send bytes from `offset` on over a non-blocking socket; their number. Raises OSError."""
    try:
        return os.write(fd, data[offset : offset + PIECE_BYTES])
    except BlockingIOError:
        return 0


def receive_bytes(data: memoryview, fd: int, offset: int) -> int:
    """Receive bytes from `offset` on over a non-blocking socket; their number. Raises OSError."""
    try:
        n = os.readv(fd, [data[offset : offset + PIECE_BYTES]])
    except BlockingIOError:
        return 0
    if not n:
        raise ConnectionResetError("the stream has ended")
    return n


class _OpeningEnd:
    """The end of a migration connection that opens it."""

    def __init__(self, conn: FrameSocket, page_bytes: int):
        self._conn, self._page_bytes = conn, page_bytes

    @classmethod
    async def open(cls, url: str, token: str, page_bytes: int, secret: bytes | None) -> Self:
        """Connect to the R-node at `url`, which has granted `token`. Raises TransportError."""
        try:
            async with asyncio.timeout(handshake.DEADLINE_S):
                conn = await dial(url)
                try:
                    await handshake.open_migration(conn, token, page_bytes, secret)
                except BaseException:
                    conn.close()
                    raise
        except TimeoutError:
            raise LinkDown(f"{url} did not finish the hand-shake within {handshake.DEADLINE_S:.0f} s") from None
        return cls(conn, page_bytes)

    def close(self) -> None:
        """Close the connection; no pages may be under way. Idempotent."""
        self._conn.close()

    @staticmethod
    def _check(answer: Message, asked: str, wanted: type[Ok | Pages]) -> None:
        """Raises CallRefused, ProtocolError."""
        if isinstance(answer, ErrorMessage):
            raise CallRefused(answer.status, answer.message)
        if not isinstance(answer, wanted):
            raise ProtocolError(f"the R-node answered {asked} with {answer.TYPE}")


class MigrationSender(_OpeningEnd):
    """The sending end of a migration connection."""

    async def next(self, token: str) -> None:
        """Go on with the sequence that `token` admits, behind a whole one. Raises TransportError."""
        try:
            async with asyncio.timeout(STALLED_S):
                await self._conn.write(Next(token=token, page_bytes=self._page_bytes))
                self._check(await self._conn.read(), Next.TYPE, Ok)
        except TimeoutError:
            raise LinkDown(f"the other R-node has not answered NEXT within {STALLED_S:.0f} s") from None

    async def send(self, first: int, n_pages: int, length: int, copy: Callable[[int, int], int]) -> None:
        """Send pages, and wait until the other R-node has them. `copy(fd, offset)` sends bytes from `offset` on and
        returns how many. Raises TransportError."""
        await self._conn.write(Pages(first=first, n_pages=n_pages, length=length))
        fd, broken = self._conn.sock.fileno(), None
        try:
            await _copy(n_pages * self._page_bytes, partial(copy, fd), self._conn.writable)
        except OSError as error:
            broken = error  # the other R-node may have said why
        try:
            answer = await self._conn.read()
        except TransportError:
            if broken is not None:
                raise LinkDown(f"the migration connection broke: {broken.strerror}") from None
            raise
        self._check(answer, Pages.TYPE, Ok)
        if broken is not None:
            raise ProtocolError("the R-node answered PAGES with OK before it had them")


class PageFetcher(_OpeningEnd):
    """The fetching end of a migration connection."""

    async def fetch(self, first: int, n_pages: int, receive: Callable[[int, int], int]) -> None:
        """Fetch pages. `receive(fd, offset)` receives bytes from `offset` on and returns how many; 0: there are none
        yet. Raises TransportError, OSError."""
        await self._conn.write(Fetch(first=first, n_pages=n_pages))
        self._check(await self._conn.read(), Fetch.TYPE, Pages)
        copy = partial(receive, self._conn.sock.fileno())
        await _copy(n_pages * self._page_bytes, copy, self._conn.readable)
