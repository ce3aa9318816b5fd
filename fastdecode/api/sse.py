"""Server-sent events (WHATWG HTML, section 9.2) as OpenAI's streams use them: data lines only, `[DONE]` last."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import orjson
from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # without this, nginx buffers the events
}
#: A connection that holds more bytes than this is full: asyncio's own limit, above which `drain` waits.
_MAX_UNSENT = 65536


def event(data: Any) -> bytes:
    """An event without a name."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """An event that has a line with its `type`."""
    name: str = data["type"]
    return b"event: %b\n" % name.encode() + event(data)


class Events(ABC):
    """What the events of a stream are written to."""

    def __init__(self, *, named: bool):
        """`named`: every event has a line with its `type`, and none is `[DONE]`, as in OpenAI's Responses API."""
        self._named = named
        self.encode = named_event if named else event
        self._time = asyncio.get_running_loop().time
        self._last = self._time()  # when something was last sent

    @property
    def quiet_seconds(self) -> float:
        """Seconds since something was last sent."""
        return self._time() - self._last

    @property
    @abstractmethod
    def full(self) -> bool:
        """Whether so much is unread that a writer should wait in `drain`."""

    @abstractmethod
    def write(self, events: bytes) -> None:
        """Write whole events. Never waits."""

    @abstractmethod
    def put(self, size: int, before: bytes, text: bytes, behind: bytes) -> bool:
        """Write an event of `size` bytes that consists of three parts, unless what is unread is too much, or the reader
        has gone: then this returns False."""

    @abstractmethod
    async def drain(self) -> None:
        """Wait until the reader has read enough. Raises ConnectionError if it has gone."""

    def send(self, events: Iterable[Any]) -> None:
        """Write each event's JSON."""
        self.write(b"".join(map(self.encode, events)))

    def keep_alive(self, *, ids: bool = False) -> None:
        """Send a comment, which clients skip and which keeps proxies from closing the connection. `ids`: events have
        ids. In such a stream OpenAI's client takes an empty line behind a comment for an event."""
        self.write(b": keep-alive\n" if ids else b": keep-alive\n\n")

    @abstractmethod
    async def end(self) -> None:
        """Nothing follows."""

    async def done(self) -> None:
        """End the stream."""
        if not self._named:
            self.write(b"data: [DONE]\n\n")
        await self.end()

    async def fail(self, error: dict[str, Any]) -> None:
        """End the stream with an error object instead of `[DONE]`."""
        self.send([error])
        await self.end()


class EventStream(Events):
    """One stream to one client.

    aiohttp sends the headers and the end. The events go straight to the connection's transport, so that a token costs
    neither a coroutine nor a turn of a task. Nothing is sent to a client that has gone: aiohttp then cancels the
    request's task.
    """

    def __init__(self, request: web.Request, headers: dict[str, str], *, named: bool = False):
        super().__init__(named=named)
        self._request = request
        self._chunked = request.version >= HttpVersion11  # RFC 9112, section 7.1; HTTP/1.0 ends with the connection
        self._transport: asyncio.Transport | None = None
        self._writer: AbstractStreamWriter | None = None
        self.response = web.StreamResponse(headers=_HEADERS | headers)

    async def open(self) -> None:
        """Send the headers."""
        if self._chunked:
            self.response.enable_chunked_encoding()
        self._writer = await self.response.prepare(self._request)
        self._transport = self._request.transport

    @property
    def full(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() > _MAX_UNSENT

    def write(self, events: bytes) -> None:
        """Send whole events. What the client does not read stays in memory."""
        # A chunk of no bytes would end the body.
        if not events or self._transport is None or self._transport.is_closing():
            return
        self._last = self._time()
        self._transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    def put(self, size: int, before: bytes, text: bytes, behind: bytes) -> bool:
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > _MAX_UNSENT:
            return False
        self._last = self._time()
        transport.write(b"%x\r\n%b%b%b\r\n" % (size, before, text, behind) if self._chunked else before + text + behind)
        return True

    async def drain(self) -> None:
        assert self._writer is not None, "the stream is open"
        await self._writer.drain()

    async def end(self) -> None:
        await self.response.write_eof()
