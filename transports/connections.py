"""Connections on a listening stream socket, up to the end of their hand-shake. A flood of silent peers does not keep
others out."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Hashable, Mapping
from typing import TypeVar

from . import handshake
from .base import LinkDown, LinkRefused
from .frames import FrameSocket
from .messages import Message, ProtocolError, RefusedMessage

log = logging.getLogger(__name__)

_Key = TypeVar("_Key", bound=Hashable)

#: Largest number of connections that have not yet proved anything. One more, and the server drops the oldest of the
#: source that has most of them, so that peers that are silent or slow on purpose cannot keep others out.
MAX_UNPROVED = 256


class ConnectionServer(ABC):
    """Accepts connections on a listening stream socket."""

    def __init__(
        self, url: str, listener: socket.socket, max_unproved: int | None = None, max_connections: int | None = None
    ):
        """Takes ownership of the listening socket. The limits: of connections that have not proved anything, which is
        MAX_UNPROVED if None, and of all connections, which have none if None."""
        listener.setblocking(False)
        self.url = url
        self._listener, self._max_unproved, self._max_connections = listener, max_unproved, max_connections
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection
        self._unproved: dict[asyncio.Task[None], str] = {}  # with their sources, oldest first
        self._accepting = self._loop.create_task(self._accept(), name=f"accept {url}")

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # this process is out of descriptors, or the peer has already gone
                log.warning("%s: cannot accept a connection: %s", self.url, error)
                await asyncio.sleep(0.1)
                continue
            if self._max_connections is not None and len(self._tasks) >= self._max_connections:
                sock.close()
                continue
            if len(self._unproved) >= (self._max_unproved or MAX_UNPROVED):
                oldest = oldest_of_most(self._unproved)
                del self._unproved[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._connection(sock))
            self._tasks.add(task)
            self._unproved[task] = self.source(sock)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda t: self._unproved.pop(t, None))

    @abstractmethod
    def configure(self, sock: socket.socket) -> None:
        """Set the transport's options on an accepted socket. Raises LinkRefused if the peer may not connect at all."""

    @abstractmethod
    def peer_name(self, sock: socket.socket) -> str:
        """A name for the peer in the log."""

    def source(self, sock: socket.socket) -> str:
        """The host or network that the peer is at, as far as floods are concerned. Here: all peers are at one."""
        return ""

    async def _connection(self, sock: socket.socket) -> None:
        conn = FrameSocket(sock)
        try:
            self.configure(sock)
            async with asyncio.timeout(handshake.DEADLINE_S):
                work = await self.begin(conn)
        except (LinkRefused, ProtocolError, TimeoutError) as error:
            reason = str(error) or f"the hand-shake took longer than {handshake.DEADLINE_S:.0f} s"
            log.warning("%s refused %s: %s", self.url, self.peer_name(sock), reason)
            await send_last(conn, RefusedMessage(reason=reason))
        except LinkDown:
            pass
        except Exception:
            log.exception("%s: a connection failed", self.url)
        else:
            if work is not None:
                await work
        finally:
            conn.close()

    @abstractmethod
    async def begin(self, conn: FrameSocket) -> Coroutine[None, None, None] | None:
        """Do the hand-shake of a connection. Returns the work that follows it, if there is any. Raises LinkRefused,
        LinkDown, ProtocolError."""

    def note_proof(self) -> asyncio.Task[None]:
        """The peer of this task's connection has proved who it is: a flood no longer ends the connection."""
        task = asyncio.current_task()
        assert task is not None
        self._unproved.pop(task, None)
        return task

    async def stop_accepting(self) -> None:
        """Close the listening socket. The connections go on."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._listener.close()


def oldest_of_most(sources: Mapping[_Key, str]) -> _Key:
    """The first key of the source that has most keys. `sources` is not empty, and in order of age."""
    counts = Counter(sources.values())
    most = max(counts.values())
    return next(key for key, source in sources.items() if counts[source] == most)


async def send_last(conn: FrameSocket, message: Message) -> None:
    """Send a last message. Gives up after a second, and if the connection has ended."""
    try:
        async with asyncio.timeout(1):
            await conn.write(message)
    except (LinkDown, TimeoutError):
        pass
