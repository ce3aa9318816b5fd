"""The R side of every transport: accepts connections, shakes hands, answers control requests, cleans up.

A transport adds a listening socket and a `Carrier`, the data path of one link.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from . import handshake
from .base import CallRefused, Hello, LinkDown, LinkGrant, LinkRefused, LinkService, Server, TransportError
from .frames import FrameSocket
from .messages import Attach, Error, Fork, Free, Message, Ok, Ping, ProtocolError, Refused, Stats, Trim
from .region import GeometryError, Region

log = logging.getLogger(__name__)

#: Connections that may be in the middle of their hand-shake. One more, and the oldest of them is dropped: who is slow
#: on purpose cannot keep the others out.
MAX_PENDING = 32

FD_INTERNAL = 6  # fd_status_t


class Carrier(ABC):
    """The data path of one link, R side."""

    #: For LinkService.open_link.
    notify: object | None
    #: Readable once the data path has ended by itself; -1 if it cannot.
    down_fd: int

    @abstractmethod
    def __init__(self, region: Region): ...

    @abstractmethod
    async def attach(self, conn: FrameSocket, wake_fd: int) -> None:
        """Answer OK to ATTACH and start. The connection is taken over. Raises LinkDown, OSError."""

    def detach(self) -> None:  # noqa: B027
        """The link is ending: leave the event loop, on which this runs, alone. `close` follows."""

    @abstractmethod
    def reason(self) -> str:
        """Why the data path has ended."""

    @abstractmethod
    def close(self) -> None:
        """Stop touching the region. May block for a moment. Idempotent."""


class LinkSession:
    """One open link: its control connection, region, carrier and the R-engine's side of it."""

    def __init__(self, name: str, conn: FrameSocket, region: Region, carrier: Carrier, opened: LinkGrant):
        self.name = name
        self.lease = opened.lease
        self._conn = conn
        self._region = region
        self._carrier = carrier
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[str] = self._loop.create_future()
        self._peer_gone = False

    async def attach(self, conn: FrameSocket) -> None:
        await self._carrier.attach(conn, self._opened.wake_fd)

    def end(self, reason: str) -> None:
        """End the link for a reason that the peer is told."""
        if not self._ending.done():
            self._ending.set_result(reason)

    async def run(self) -> None:
        """Answer requests until the link ends; tell the peer why if it is there to hear it."""
        requests = self._loop.create_task(self._answer_requests())
        if self._carrier.down_fd >= 0:
            self._loop.add_reader(self._carrier.down_fd, lambda: self.end(self._carrier.reason()))
        try:
            await asyncio.wait([requests, self._ending], return_when=asyncio.FIRST_COMPLETED)
            if requests.done():
                self._failed(requests.exception())
            reason = self._ending.result()
            requests.cancel()
            if not self._peer_gone:
                await tell(self._conn, Error(id=0, status=FD_INTERNAL, message=reason))
            log.info("link of %s ended: %s", self.name, reason)
        finally:
            requests.cancel()
            await asyncio.gather(requests, return_exceptions=True)
            if self._carrier.down_fd >= 0:
                self._loop.remove_reader(self._carrier.down_fd)

    def _failed(self, error: BaseException | None) -> None:
        self._peer_gone = isinstance(error, LinkDown)
        if not isinstance(error, TransportError):
            log.error("link of %s failed", self.name, exc_info=error)
        self.end(str(error) if isinstance(error, TransportError) else "internal error at the R-node, see its log")

    async def free(self) -> None:
        """Free the lease and everything else, in a thread: the R-engine may have to finish a call first. Once."""
        self._carrier.detach()
        await asyncio.shield(self._loop.run_in_executor(None, self._free))

    def _free(self) -> None:
        self._carrier.close()
        self._opened.close()
        self._region.close()

    async def _answer_requests(self) -> None:
        while True:
            request = await self._conn.read()
            try:
                answer = self._answer(request)
            except CallRefused as error:
                answer = Error(id=request.id, status=error.status, message=str(error))
            await self._conn.write(answer)

    def _answer(self, request: Message) -> Ok:
        stats = None
        match request:
            case Free():
                self._opened.free([(seq_index, tag) for seq_index, tag in request.handles])
            case Trim():
                self._opened.trim(request.seq_index, request.tag, request.length)
            case Fork():
                src, dst = (request.src, request.src_tag), (request.dst, request.dst_tag)
                self._opened.fork(src, dst, request.length)
            case Stats():
                stats = self._opened.stats()
            case Ping():
                pass
            case _:
                raise ProtocolError(f"{request.TYPE} has no place on an open link")
        return Ok(id=request.id, stats=stats)


class ControlServer(Server):
    """Serves links on a listening socket."""

    def __init__(
        self,
        url: str,
        listener: socket.socket,
        service: LinkService,
        secret: bytes | None,
        carrier: Callable[[Region], Carrier],
    ):
        """Takes the listening socket over. `carrier` makes the data path of a link over its region."""
        listener.setblocking(False)
        self.url = url
        self._listener = listener
        self._service = service
        self._secret = secret
        self._carrier = carrier
        self._loop = asyncio.get_running_loop()
        # In the order of their coming, with what ends each; it is given a reason.
        self._pending: dict[asyncio.Task[None], Callable[[str], object]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._links: set[LinkSession] = set()
        self._unattached: dict[str, _Unattached] = {}
        self._accepting = self._loop.create_task(self._accept(), name=f"accept {url}")

    async def close(self) -> None:
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()
        for end in [*self._pending.values(), *(link.end for link in self._links)]:
            end("the R-node is shutting down")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors, or the peer has already gone
                log.warning("%s: cannot accept a connection: %s", self.url, error)
                await asyncio.sleep(0.1)
                continue
            if len(self._pending) >= MAX_PENDING:
                self._pending.pop(next(iter(self._pending)))("too many hand-shakes are under way")
            task = self._loop.create_task(self._connection(sock))
            self._tasks.add(task)
            self._pending[task] = task.cancel
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda t: self._pending.pop(t, None))

    @abstractmethod
    def configure(self, sock: socket.socket) -> None:
        """Set what the transport wants set on an accepted socket."""

    @abstractmethod
    def peer_name(self, sock: socket.socket) -> str:
        """The peer, for the log."""

    async def _connection(self, sock: socket.socket) -> None:
        conn = FrameSocket(sock)
        try:
            self.configure(sock)
            async with asyncio.timeout(handshake.DEADLINE_S):
                caller = await handshake.challenge(conn, self._service.name, self._secret is not None)
                if isinstance(caller.answer, Attach):
                    await self._attach(conn, caller.answer.token)
                    return
                link = self._open(conn, caller.checked_hello(self._secret))
        except (LinkRefused, ProtocolError, TimeoutError) as error:
            reason = str(error) or f"the hand-shake took longer than {handshake.DEADLINE_S:.0f} s"
            log.warning("%s refused %s: %s", self.url, self.peer_name(sock), reason)
            await tell(conn, Refused(reason=reason))
        except LinkDown:
            pass
        except Exception:
            log.exception("%s: a connection failed", self.url)
        else:
            await self._serve(conn, caller, link)
        finally:
            conn.close()

    def _open(self, conn: FrameSocket, hello: Hello) -> LinkSession:
        """Make a link's region and lease. Raises LinkRefused."""
        try:
            region = Region.create(hello.geometry)
        except (GeometryError, OSError) as error:
            raise LinkRefused(f"no region can be had: {error}") from None
        carrier = None
        try:
            carrier = self._carrier(region)
            opened = self._service.open_link(hello, region.view, carrier.notify)
        except BaseException:
            if carrier:
                carrier.close()
            region.close()
            raise
        return LinkSession(self.peer_name(conn.sock), conn, region, carrier, opened)

    async def _serve(self, conn: FrameSocket, caller: handshake.Caller, link: LinkSession) -> None:
        token = secrets.token_hex(32)
        task = asyncio.current_task()
        assert task is not None
        late = f"the data connection did not come within {handshake.DEADLINE_S:.0f} s"
        timer = self._loop.call_later(handshake.DEADLINE_S, link.end, late)
        self._unattached[token] = _Unattached(link, task, timer)
        self._links.add(link)
        if task in self._pending:
            self._pending[task] = link.end
        log.info("link of %s opened: %s", link.name, link.lease)
        try:
            if self._accepting.done():
                link.end("the R-node is shutting down")
            async with asyncio.timeout(handshake.DEADLINE_S):
                await caller.welcome(link.lease, token, self._secret)
            await link.run()
        except (LinkDown, TimeoutError) as error:
            log.info("link of %s ended: %s", link.name, error)
        finally:
            timer.cancel()
            self._unattached.pop(token, None)
            self._links.discard(link)
            await link.free()

    async def _attach(self, conn: FrameSocket, token: str) -> None:
        """Raises LinkRefused, LinkDown."""
        waiting = self._unattached.pop(token, None)
        if waiting is None:
            raise LinkRefused("no link waits for this token")
        waiting.timer.cancel()
        self._pending.pop(waiting.task, None)
        try:
            await waiting.link.attach(conn)
        except (LinkDown, OSError) as error:
            waiting.link.end(f"the data connection broke: {error}")


@dataclass(frozen=True, slots=True)
class _Unattached:
    """A link that has its lease and waits for its data connection."""

    link: LinkSession
    task: asyncio.Task[None]
    timer: asyncio.TimerHandle


async def tell(conn: FrameSocket, message: Message) -> None:
    """Say a last thing; a peer that does not listen is not waited for."""
    try:
        async with asyncio.timeout(1):
            await conn.write(message)
    except (LinkDown, TimeoutError):
        pass
