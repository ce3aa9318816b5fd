"""The S side of an open link, for every transport.

A transport opens the connections and the region, and makes a `_native.Port` over them. RegionLink does the rest.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

from fastdecode.region.region import Region

from ._native import Port
from .base import CallRefused, Lease, Link, LinkDown
from .frames import FrameSocket
from .messages import (
    LEAVING,
    MAX_HANDLES,
    MAX_KEYS,
    Adopt,
    ErrorMessage,
    Find,
    Fork,
    Free,
    Keep,
    Offer,
    Ok,
    PingMessage,
    ProtocolError,
    Push,
    Receive,
    Request,
    Resize,
    Stats,
    Trim,
)

log = logging.getLogger(__name__)

#: The S-node sends a PING at this interval. After this many PINGs in a row without any message from the R-node, the
#: link is down, within 5 seconds of the R-node's last message. The S-node counts PINGs instead of measuring time, so
#: that it does not blame the R-node for a stall of its own event loop.
PING_INTERVAL_S = 0.8
PINGS_UNANSWERED = 5

#: Seconds to wait, once the data path has ended, for the R-node's reason to arrive on the control connection.
REASON_WAIT_S = 0.1

#: Seconds that `close` waits for the R-node to free the lease.
CLOSE_S = 5.0


class RegionLink(Link):
    """A Link over a mapped region, a port into the region, and a control connection. It owns all three."""

    def __init__(
        self,
        url: str,
        conn: FrameSocket,
        lease: Lease,
        region: Region,
        port: Port,
        release: Callable[[], Awaitable[object]] | None = None,
    ):
        """Takes ownership of `conn`, `region` and `port`; starts on the running event loop.

        `release` is awaited once `port` is closed, and frees what `port` has borrowed from the transport.
        """
        super().__init__(url, region, port)
        self.lease = lease
        self._n_pages = lease.n_pages  # what the R-node has granted last
        self._region_map = region
        self._conn = conn
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._unanswered: dict[int, asyncio.Future[Ok]] = {}
        self._unanswered_pings = 0
        self._leaving = asyncio.Event()
        self._error: LinkDown | None = None
        self._ending: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()  # this process uses the region no more
        self._freed: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(port.down_fd, self._on_port_down)
        self._task = self._loop.create_task(self._run(), name=f"link {url}")

    def _ended_error(self) -> LinkDown:
        """The exception to raise once the link has ended.

        It is a copy of `_error`: an exception that is raised holds a traceback, which holds this object, and the cycle
        would keep the region mapped until the garbage collector runs.
        """
        return LinkDown(str(self._error)) if self._error else self._link_down("it was closed")

    def _link_down(self, reason: object) -> LinkDown:
        return LinkDown(f"link {self.url} is down: {reason}")

    # ---- control path ----

    async def free(self, handles: Sequence[tuple[int, int]]) -> None:
        for i in range(0, len(handles), MAX_HANDLES):
            await self._request(Free(id=next(self._ids), handles=list(handles[i : i + MAX_HANDLES])))

    async def trim(self, seq_index: int, tag: int, length: int) -> None:
        await self._request(Trim(id=next(self._ids), seq_index=seq_index, tag=tag, length=length))

    async def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None:
        request = Fork(id=next(self._ids), src=src[0], src_tag=src[1], dst=dst[0], dst_tag=dst[1], length=length)
        await self._request(request)

    async def admit_migration(self, seq: tuple[int, int], length: int, token: str) -> None:
        await self._request(Receive(id=next(self._ids), seq_index=seq[0], tag=seq[1], length=length, token=token))

    async def migrate(self, seq: tuple[int, int], pages: range, length: int, url: str, token: str) -> None:
        await self._request(
            Push(
                id=next(self._ids),
                seq_index=seq[0],
                tag=seq[1],
                first=pages.start,
                n_pages=len(pages),
                length=length,
                url=url,
                token=token,
            )
        )

    async def offer(self, seq: tuple[int, int], token: str) -> None:
        await self._request(Offer(id=next(self._ids), seq_index=seq[0], tag=seq[1], token=token))

    async def keep(self, sequences: Sequence[tuple[int, int, str | None]]) -> None:
        for i in range(0, len(sequences), MAX_KEYS):
            await self._request(Keep(id=next(self._ids), sequences=list(sequences[i : i + MAX_KEYS])))

    async def find(self, key: str, length: int) -> bool:
        try:
            await self._request(Find(id=next(self._ids), key=key, length=length))
        except CallRefused:
            return False
        return True

    async def adopt(self, seq: tuple[int, int], length: int, key: str) -> None:
        await self._request(Adopt(id=next(self._ids), seq_index=seq[0], tag=seq[1], length=length, key=key))

    async def resize(self, n_pages: int) -> dict[str, int]:
        stats = (await self._request(Resize(id=next(self._ids), n_pages=n_pages))).stats or {}
        granted = stats.get("pages_total", 0)
        if not 1 <= granted <= max(n_pages, self._n_pages):  # the S-node counts by this number
            self._end(ProtocolError(f"asked for a lease of {n_pages} pages, the R-node speaks of {granted}"))
            raise self._ended_error()
        self._n_pages = granted
        return stats

    async def stats(self) -> dict[str, int]:
        return (await self._request(Stats(id=next(self._ids)))).stats or {}

    async def _request(self, request: Request) -> Ok:
        if self._ending.done():
            raise self._ended_error()
        answer: asyncio.Future[Ok] = self._loop.create_future()
        self._unanswered[request.id] = answer
        try:
            await self._conn.write(request)
            return await answer
        except LinkDown as error:
            self._end(error)
            raise self._ended_error() from None
        finally:
            del self._unanswered[request.id]
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # marks it as retrieved, so that asyncio does not log it
            del answer  # the traceback of its exception holds this frame: a cycle that would keep the region mapped

    async def _read_answers(self) -> None:
        """Hand each answer to its request until the connection ends. Raises LinkDown, ProtocolError."""
        while True:
            message = await self._conn.read()
            self._unanswered_pings = 0
            if isinstance(message, ErrorMessage) and message.id == 0:
                raise LinkDown(message.message)
            if not isinstance(message, Ok | ErrorMessage):
                raise ProtocolError(f"the R-node sent {message.TYPE} on an open link")
            if isinstance(message, Ok) and message.stats is not None and message.stats.get(LEAVING):
                self._leaving.set()
            answer = self._unanswered.get(message.id)
            if answer is None or answer.done():  # an answer to a PING, or to a request that was cancelled
                continue
            if isinstance(message, Ok):
                answer.set_result(message)
            else:
                answer.set_exception(CallRefused(message.status, message.message))

    async def _ping(self) -> None:
        writing: asyncio.Task[None] | None = None
        try:
            while self._unanswered_pings < PINGS_UNANSWERED:
                if self._unanswered_pings:  # RDMA's device knows sooner whether the R-node's host is alive
                    self.port.probe()
                self._unanswered_pings += 1
                # A peer that reads nothing blocks the write, and the counting must go on meanwhile.
                if writing is None or writing.done():
                    if writing is not None:
                        writing.result()
                    writing = self._loop.create_task(self._conn.write(PingMessage(id=next(self._ids))))
                await asyncio.sleep(PING_INTERVAL_S)
        finally:
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
        raise LinkDown(f"the R-node has not answered for {PINGS_UNANSWERED * PING_INTERVAL_S:.0f} s")

    # ---- start and end ----

    def _on_port_down(self) -> None:
        # An R-node that ends a link sends the reason on the control connection, where it may not have been read yet.
        self._loop.remove_reader(self.port.down_fd)
        self._loop.call_later(REASON_WAIT_S, self._end, LinkDown(self.port.reason or "the data path ended"))

    def _end(self, error: BaseException | None) -> None:
        """Start to end the link with `error` (None: `close` was called). Only the first call counts."""
        if self._ending.done():
            return
        self._ending.set_result(None)
        if error is not None:
            self._error = self._link_down(error)
            log.warning("%s", self._error)
        self._loop.remove_reader(self.port.down_fd)
        self.port.kill(str(error or "it was closed"))
        for answer in self._unanswered.values():
            if not answer.done():
                answer.set_exception(self._ended_error())

    async def _run(self) -> None:
        reading, pinging = tasks = [self._loop.create_task(work) for work in (self._read_answers(), self._ping())]
        try:
            await asyncio.wait([*tasks, self._ending], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    self._end(task.exception())
        finally:
            self._end(LinkDown("its event loop was stopped"))
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
            self._conn.end_writing()
            if self._error is None:
                # The R-node closes the control connection after it has freed the lease. The task that already reads
                # waits for that end: a second reader could start in the middle of a frame.
                await asyncio.wait([reading], timeout=CLOSE_S)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._conn.close()
            await self._loop.run_in_executor(None, self.port.close)
            self._ended.set_result(None)
            if self._release:  # RDMA's may take a minute if the R-node's host is lost
                await self._release()
            self._region_map.close()
            self._freed.set_result(None)

    async def leaving(self) -> None:
        await self._leaving.wait()

    async def closed(self) -> LinkDown | None:
        await asyncio.shield(self._ended)
        return self._error

    async def close(self) -> None:
        self._end(None)
        await asyncio.shield(self._freed)
