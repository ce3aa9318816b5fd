"""Connections whose request has not arrived.

The header of a request has a deadline, and so has the first byte on a new connection. If connections become many, the
oldest of the connections that wait for a request, or for the rest of one, are closed: a client that sends nothing more
takes no descriptor from others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from typing import Any

from aiohttp import web

log = logging.getLogger(__name__)

#: Descriptors that a process keeps for what it opens later.
_SPARE_DESCRIPTORS = 64


def descriptors_for_connections() -> int:
    """How many connections a process can have beside what is open now, if each opens another one, as in a router."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(16, (limit - len(os.listdir("/proc/self/fd")) - _SPARE_DESCRIPTORS) // 2)


class Arrivals:
    """Makes the connections of an application's server, and knows which of them wait for a request."""

    def __init__(self, server: web.Server, header_seconds: float, most: int, **options: Any):
        """`header_seconds`: how long a header may take. `most`: connections at once. `options`: of RequestHandler."""
        self.header_seconds, self._most = header_seconds, most
        self._server, self._options = server, options
        self._waiting: dict[ClientConnection, None] = {}  # in the order in which they began to wait
        self._make_request, self._answer_request = server.request_factory, server.request_handler
        server.request_factory, server.request_handler = self._begin, self._answer

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, self._server, loop=asyncio.get_running_loop(), **self._options)

    def wait(self, connection: ClientConnection) -> None:
        """Record that a connection waits for a request. Closes the oldest connection that waits if there are too many
        connections."""
        self._waiting.setdefault(connection)
        if len(self._server.connections) > self._most:
            oldest = next(iter(self._waiting))
            log.debug("a connection without a request is closed, because there are more than %d", self._most)
            self.stop_waiting(oldest)
            oldest.force_close()

    def stop_waiting(self, connection: ClientConnection) -> None:
        """Record that a connection has its request, or has ended."""
        self._waiting.pop(connection, None)

    def _begin(self, message: Any, payload: Any, connection: Any, *rest: Any) -> web.BaseRequest:
        connection.begin(payload)
        return self._make_request(message, payload, connection, *rest)

    async def _answer(self, request: Any) -> web.StreamResponse:
        try:
            return await self._answer_request(request)
        finally:
            request.protocol.end()


class ClientConnection(web.RequestHandler):
    """A client's connection."""

    def __init__(self, arrivals: Arrivals, server: web.Server, **options: Any):
        super().__init__(server, **options)
        self._arrivals, self._answers = arrivals, False
        self._deadline: asyncio.TimerHandle | None = None  # of a header

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._arrivals.wait(self)
        self._expect_header()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_deadline()
        self._arrivals.stop_waiting(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and not self._answers:
            self._expect_header()
        super().data_received(data)

    def begin(self, payload: Any) -> None:
        """Called with a request's body once its header has arrived."""
        self._stop_deadline()
        self._answers = True
        payload.on_eof(lambda: self._arrivals.stop_waiting(self))

    def end(self) -> None:
        """Called once a request is answered."""
        self._answers = False
        if self.transport is not None:
            self._arrivals.wait(self)

    def _expect_header(self) -> None:
        seconds = self._arrivals.header_seconds
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._close_late)

    def _close_late(self) -> None:
        log.debug("a connection is closed: its header did not arrive in %g s", self._arrivals.header_seconds)
        self._deadline = None
        self.force_close()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
