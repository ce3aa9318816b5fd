"""The R side of every transport: accept connections, do the hand-shake, answer control requests, free everything.

A transport adds a listening socket and a Carrier, the data path of one link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastdecode.region.contract import Status
from fastdecode.region.geometry import GeometryError
from fastdecode.region.region import Region

from . import handshake, migration
from .base import (
    CallRefused,
    Hello,
    LinkDown,
    LinkGrant,
    LinkRefused,
    LinkService,
    MigrationTarget,
    Server,
    TransportError,
)
from .connections import ConnectionServer, oldest_of_most, send_last
from .frames import FrameSocket
from .messages import (
    LEAVING,
    Adopt,
    Attach,
    Deliver,
    ErrorMessage,
    Find,
    Fork,
    Free,
    HelloMessage,
    Keep,
    Offer,
    Ok,
    PingMessage,
    Probe,
    ProtocolError,
    Push,
    Receive,
    Request,
    Resize,
    Stats,
    Trim,
)
from .session import Session

log = logging.getLogger(__name__)

#: Largest number of links that wait for their data connection: without a secret, any HELLO opens such a link. One more,
#: and the server drops the oldest of the source that has most of them.
MAX_UNATTACHED = 64
#: Most PUSHes and ADOPTs of a link that are under way.
MAX_PUSHES = 16


class Carrier(ABC):
    """The data path of one link at the R side. All methods but `close` run on the event loop."""

    #: The capsule to pass to LinkService.open_link, or None.
    carrier: object | None
    #: An eventfd that is readable once the data path has ended by itself; -1 if it cannot end by itself.
    down_fd: int

    @abstractmethod
    def __init__(self, region: Region):
        """`region` stays mapped until `close` returns."""

    @abstractmethod
    async def attach(self, conn: FrameSocket, grant: LinkGrant) -> None:
        """Start the data path. The server calls this at most once, after it has sent ATTACHED.

        `conn` is the link's second connection. The server closes it when this returns, so a carrier that goes on using
        the socket detaches it. `grant` says how to wake the R-engine. Raises LinkRefused, LinkDown, ProtocolError,
        OSError.
        """

    def detach(self) -> None:  # noqa: B027
        """Remove all callbacks from the event loop, because the link is ending. `close` follows, in another thread."""

    @abstractmethod
    def reason(self) -> str:
        """A phrase that says why the data path has ended."""

    @abstractmethod
    def close(self) -> None:
        """Stop all access to the region. May block for a moment; runs in a thread of its own. Idempotent."""


class LinkSession:
    """One connected S-node: its control connection, region, carrier and grant. The session owns them."""

    def __init__(
        self,
        name: str,
        source: str,
        conn: FrameSocket,
        region: Region,
        carrier: Carrier,
        grant: LinkGrant,
        log: logging.Logger,
    ):
        self.name = name
        self.source = source
        self.lease = grant.lease
        self.leaving = False  # the R-node is about to end
        self._conn = conn
        self._region = region
        self._carrier = carrier
        self._grant = grant
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[str] = self._loop.create_future()
        self._peer_gone = False
        self._migrations: set[asyncio.Task[None]] = set()

    async def attach(self, conn: FrameSocket) -> None:
        """Start the data path on the link's second connection. Raises like Carrier.attach."""
        await self._carrier.attach(conn, self._grant)

    def end(self, reason: str) -> None:
        """End the link, for a reason that the session sends to the peer. Only the first reason counts."""
        if not self._ending.done():
            self._ending.set_result(reason)

    async def run(self) -> None:
        """Answer requests until the link ends, and send the reason to the peer unless the peer has gone."""
        requests = self._loop.create_task(self._answer_requests())
        if self._carrier.down_fd >= 0:
            self._loop.add_reader(self._carrier.down_fd, lambda: self.end(self._carrier.reason()))
        try:
            waited: list[asyncio.Future[Any]] = [requests, self._ending]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if requests.done():
                self._end_for(requests.exception())
            reason = self._ending.result()
            requests.cancel()
            if not self._peer_gone:
                await send_last(self._conn, ErrorMessage(id=0, status=Status.INTERNAL, message=reason))
            self._log.info("link of %s ended: %s", self.name, reason)
        finally:
            requests.cancel()
            await asyncio.gather(requests, return_exceptions=True)
            if self._carrier.down_fd >= 0:
                self._loop.remove_reader(self._carrier.down_fd)

    def _end_for(self, error: BaseException | None) -> None:
        self._peer_gone = isinstance(error, LinkDown)
        if not isinstance(error, TransportError):
            log.error("link of %s failed", self.name, exc_info=error)
        self.end(_told(error))

    async def release(self) -> None:
        """Free the lease, the data path and the region. To be called once.

        This runs in a thread, because the R-engine may have to finish a call first.
        """
        self._carrier.detach()
        for task in self._migrations:
            task.cancel()
        await asyncio.gather(*self._migrations, return_exceptions=True)
        self._grant.detach()
        await asyncio.shield(self._loop.run_in_executor(None, self._release))

    def _release(self) -> None:
        self._carrier.close()
        self._grant.close()
        self._region.close()

    async def _answer_requests(self) -> None:
        while True:
            request = await self._conn.read()
            if not isinstance(request, Request):
                raise ProtocolError(f"{request.TYPE} has no place on an open link")
            if isinstance(request, Push | Adopt) and len(self._migrations) < MAX_PUSHES:
                task = self._loop.create_task(self._migrate(request))
                self._migrations.add(task)
                task.add_done_callback(self._migrations.discard)
                continue
            answer: Ok | ErrorMessage
            try:
                answer = self._answer(request)
            except CallRefused as error:
                answer = ErrorMessage(id=request.id, status=error.status, message=str(error))
            await self._conn.write(answer)

    async def _migrate(self, request: Push | Adopt) -> None:
        """Send pages to another R-node, or copy them from another link, and answer the request."""
        answer: Ok | ErrorMessage = Ok(id=request.id, stats=None)
        seq = (request.seq_index, request.tag)
        try:
            if isinstance(request, Push):
                pages = range(request.first, request.first + request.n_pages)
                await self._grant.migrate(seq, pages, request.length, request.url, request.token)
            else:
                await self._grant.adopt(seq, request.length, request.key)
        except Exception as error:
            if not isinstance(error, TransportError):
                log.exception("link of %s: a %s failed", self.name, request.TYPE)
            status = error.status if isinstance(error, CallRefused) else Status.INTERNAL
            answer = ErrorMessage(id=request.id, status=status, message=_told(error))
        with contextlib.suppress(LinkDown):
            await self._conn.write(answer)

    def _answer(self, request: Request) -> Ok:
        stats = None
        match request:
            case Free():
                self._grant.free(request.handles)
            case Trim():
                self._grant.trim(request.seq_index, request.tag, request.length)
            case Fork():
                src, dst = (request.src, request.src_tag), (request.dst, request.dst_tag)
                self._grant.fork(src, dst, request.length)
            case Receive():
                self._grant.admit_migration((request.seq_index, request.tag), request.length, request.token)
            case Offer():
                self._grant.offer((request.seq_index, request.tag), request.token)
            case Push() | Adopt():
                raise CallRefused(Status.BAD_CALL, f"{MAX_PUSHES} PUSHes and ADOPTs of this link are under way")
            case Keep():
                self._grant.keep(request.sequences)
            case Find():
                self._grant.find(request.key, request.length)
            case Resize():
                self._grant.resize(request.n_pages)
                stats = self._grant.stats()
            case Stats():
                stats = self._grant.stats()
            case PingMessage():
                stats = {LEAVING: 1} if self.leaving else None
        return Ok(id=request.id, stats=stats)


def _told(error: BaseException | None) -> str:
    """What the peer is told of an error."""
    return str(error) if isinstance(error, TransportError) else "internal error at the R-node, see its log"


class ControlServer(ConnectionServer, Server):
    """Serves links on a listening stream socket."""

    def __init__(
        self,
        url: str,
        listener: socket.socket,
        service: LinkService,
        secret: bytes | None,
        carrier: Callable[[Region], Carrier],
    ):
        """Takes ownership of the listening socket. `carrier(region)` makes the data path of a link."""
        super().__init__(url, listener)
        self._service = service
        self._secret = secret
        self._carrier = carrier
        self._links: dict[asyncio.Task[None], LinkSession] = {}
        self._unattached: dict[str, _Unattached] = {}  # by token, oldest first
        self._leaving = False

    def leave(self) -> None:
        self._leaving = True
        for link in self._links.values():
            link.leaving = True

    async def close(self) -> None:
        await self.stop_accepting()
        for task in self._tasks:
            if task in self._links:
                self._links[task].end("the R-node is shutting down")
            else:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begin(self, conn: FrameSocket) -> Coroutine[None, None, None] | None:
        opening = await handshake.challenge(conn, self._service.name, HelloMessage, Attach, Probe, Deliver)
        if isinstance(opening.answer, Attach):
            await self._attach(opening, opening.answer.token)
            return None
        if isinstance(opening.answer, Probe):
            opening.verify(Probe, self._secret)
            await opening.accept()
            return None
        return await (self._admit(opening) if isinstance(opening.answer, Deliver) else self._link(opening))

    async def _link(self, opening: handshake.Handshake) -> Coroutine[None, None, None]:
        """Open a link; returns what serves it. Raises LinkRefused."""
        hello = opening.verify_hello(self._secret)
        await self._service.prepare(hello)
        return self._serve(opening, self._open(opening.conn, hello))

    async def _admit(self, opening: handshake.Handshake) -> Coroutine[None, None, None]:
        """Accept a migration connection; returns what receives its pages. Raises LinkRefused, LinkDown."""
        message = opening.verify(Deliver, self._secret)
        target = self._service.migration_target(message.token, message.page_bytes)
        self.note_proof()
        await opening.accept()
        return self._receive(opening.conn, target)

    async def _receive(self, conn: FrameSocket, target: MigrationTarget | None) -> None:
        try:
            while target is not None:
                await target.run(conn)
                target = await self._next_sequence(conn)
        except (TransportError, OSError) as error:
            log.info("%s: %s has not sent a whole sequence: %s", self.url, self.peer_name(conn.sock), error)

    async def _next_sequence(self, conn: FrameSocket) -> MigrationTarget | None:
        """The target of the next sequence of a migration connection; None if there is none. Raises TransportError."""
        if (message := await migration.next_sequence(conn)) is None:
            return None
        try:
            target = self._service.migration_target(message.token, message.page_bytes)
        except LinkRefused as error:
            await conn.write(ErrorMessage(id=0, status=Status.BAD_CALL, message=str(error)))
            raise
        await conn.write(Ok(id=0, stats=None))
        return target

    def _open(self, conn: FrameSocket, hello: Hello) -> LinkSession:
        """Create a link's region, carrier and lease. Raises LinkRefused."""
        if self._leaving:
            raise LinkRefused("the R-node is about to end")
        try:
            region = Region.create(hello.geometry)
        except (GeometryError, OSError) as error:
            raise LinkRefused(f"the R-node cannot create a region: {error}") from None
        carrier = None
        try:
            carrier = self._carrier(region)
            grant = self._service.open_link(hello, region.view, carrier.carrier)
        except BaseException:
            if carrier:
                carrier.close()
            region.close()
            raise
        return LinkSession(
            self.peer_name(conn.sock), self.source(conn.sock), conn, region, carrier, grant, self._service.log
        )

    async def _serve(self, opening: handshake.Handshake, link: LinkSession) -> None:
        token = secrets.token_hex(32)
        task = self.note_proof()
        if len(self._unattached) >= MAX_UNATTACHED:
            oldest = oldest_of_most({token: waiting.link.source for token, waiting in self._unattached.items()})
            self._unattached.pop(oldest).link.end("too many links wait for their data connection")
        late = f"the data connection did not come within {handshake.DEADLINE_S:.0f} s"
        timer = self._loop.call_later(handshake.DEADLINE_S, link.end, late)
        self._unattached[token] = _Unattached(link, timer, opening.session)
        self._links[task] = link
        task.add_done_callback(lambda t: self._links.pop(t, None))
        self._service.log.info("link of %s opened: %s", link.name, link.lease.summary)
        try:
            if self._accepting.done():
                link.end("the R-node is shutting down")
            async with asyncio.timeout(handshake.DEADLINE_S):
                await opening.welcome(link.lease, token)
            await link.run()
        except (LinkDown, TimeoutError) as error:
            self._service.log.info("link of %s ended: %s", link.name, error)
        finally:
            timer.cancel()
            self._unattached.pop(token, None)
            await link.release()

    async def _attach(self, opening: handshake.Handshake, token: str) -> None:
        """Attach the connection to the link that waits for `token`. Raises LinkRefused.

        A connection that is refused costs the link nothing: the link goes on waiting for its own.
        """
        waiting = self._unattached.get(token)
        if waiting is None:
            raise LinkRefused("no link waits for this token")
        opening.verify_attach(waiting.session)
        del self._unattached[token]
        waiting.timer.cancel()
        self.note_proof()
        try:
            await opening.confirm_attach()
            await waiting.link.attach(opening.conn)
        except (LinkDown, OSError) as error:
            waiting.link.end(f"the data connection broke: {error}")


@dataclass(frozen=True, slots=True)
class _Unattached:
    """A link that has a lease and waits for its data connection."""

    link: LinkSession
    timer: asyncio.TimerHandle
    session: Session | None
