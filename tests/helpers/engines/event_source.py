"""A client of event streams that comes back, after WHATWG HTML, sections 9.2.4 and 9.2.6."""

from __future__ import annotations

import contextlib
from typing import Any

import aiohttp


class EventSource:
    """The events of one request, over all connections that it took."""

    def __init__(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None):
        self.path, self.body, self.headers = path, body, headers or {}
        self.last_id = ""
        self.ids: list[str] = []
        self.data: list[str] = []
        self.status = 0  # of the last answer
        self.error = ""  # the body of an answer that is no stream

    async def read(self, http: aiohttp.ClientSession, most: int | None = None) -> None:
        """Read until the stream ends or breaks, or there are `most` events of all connections."""
        headers = self.headers | {"Last-Event-ID": self.last_id}
        data, id = [], self.last_id
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            async with http.post(self.path, json=self.body, headers=headers) as answer:
                self.status = answer.status
                if answer.content_type != "text/event-stream":
                    self.error = await answer.text()
                    return
                async for line in answer.content:
                    field, _, value = line.decode().removesuffix("\n").partition(":")
                    value = value.removeprefix(" ")
                    match field:
                        case "id":
                            id = value
                        case "data":
                            data.append(value)
                        case "" if line == b"\n":
                            self.last_id = id
                            if data:
                                self.ids.append(id)
                                self.data.append("\n".join(data))
                            data = []
                            if len(self.data) == most:
                                return
