"""Server-sent events (WHATWG HTML, section 9.2) as OpenAI's streams use them: data lines only, `[DONE]` last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # without this, nginx buffers the events
}


class EventStream:
    """One stream to one client. A write waits while the socket's buffers are full, until the client has read on."""

    def __init__(self, request: web.Request, headers: dict[str, str], *, named: bool = False):
        """`named`: every event has a line with its `type`, and none is `[DONE]`, as in OpenAI's Responses API."""
        self._request, self._named = request, named
        self.response = web.StreamResponse(headers=_HEADERS | headers)

    async def open(self) -> None:
        """Send the headers."""
        await self.response.prepare(self._request)

    async def send(self, events: Iterable[Any]) -> None:
        """Write each event's JSON. Raises ConnectionError if the client has gone."""
        await self.response.write(b"".join(map(self._event, events)))

    def _event(self, event: Any) -> bytes:
        name = b"event: " + event["type"].encode() + b"\n" if self._named else b""
        return name + b"data: " + orjson.dumps(event) + b"\n\n"

    async def keep_alive(self) -> None:
        """Send a comment, which clients skip and which keeps proxies from closing the connection."""
        await self.response.write(b": keep-alive\n\n")

    async def done(self) -> None:
        """End the stream."""
        if not self._named:
            await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def fail(self, error: dict[str, Any]) -> None:
        """End the stream with an error object instead of `[DONE]`."""
        await self.send([error])
        await self.response.write_eof()
