"""Server-sent events (WHATWG HTML, section 9.2) as OpenAI's streams use them: data lines only, `[DONE]` last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}


class EventStream:
    """One stream to one client. Every write waits until the client has taken what came before (beyond the socket's
    buffers).
    """

    def __init__(self, request: web.Request, headers: dict[str, str]):
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS | headers)

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, events: Iterable[Any]) -> None:
        """Write each event's JSON. Raises ConnectionError if the client has gone."""
        await self.response.write(b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events))

    async def keep_alive(self) -> None:
        """A comment, which clients skip and proxies count as life."""
        await self.response.write(b": keep-alive\n\n")

    async def done(self) -> None:
        await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def fail(self, error: dict[str, Any]) -> None:
        """End with an error object in place of `[DONE]`."""
        await self.send([error])
        await self.response.write_eof()
