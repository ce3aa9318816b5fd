"""Responses that are generated in the background, whether or not a client reads them, and the events of their streams.

As OpenAI documents them (guide "Background mode"): a client that has lost its connection goes on behind the last event
that it has had. They are kept for ten minutes behind their end, in this process alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from fastdecode.api.errors import ApiError
from fastdecode.api.fields import invalid
from fastdecode.api.response_answer import ResponseAnswer
from fastdecode.api.sse import Events, EventStream

_KEPT_SECONDS = 600.0
#: Of all responses that have ended.
_MOST_RESPONSES, _MOST_BYTES = 1000, 64 << 20


class EventLog(Events):
    """The events of a stream, for readers that come, go and come back. Comments of the stream are entries too."""

    def __init__(self) -> None:
        super().__init__(named=True)
        self.ended = False
        self.n_bytes = 0
        self._entries: list[bytes] = []
        self._grown = asyncio.Event()  # set, and replaced, with every entry

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return False

    def write(self, events: bytes) -> None:
        self._last = self._time()
        self._entries += [entry + b"\n\n" for entry in events.split(b"\n\n") if entry]
        self.n_bytes += len(events)
        self._wake()

    def put(self, size: int, before: bytes, text: bytes, behind: bytes) -> bool:
        self.write(before + text + behind)
        return True

    async def drain(self) -> None:
        """Nobody has to read the log."""

    def keep_alive(self) -> None:
        """Each reader's stream has comments of its own."""
        self._last = self._time()

    async def end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    def behind(self, event: int) -> int:
        """The position of the entry behind an event, by the event's number; -1: behind none."""
        numbers = (i for i, entry in enumerate(self._entries) if not entry.startswith(b":"))
        return next((i + 1 for number, i in enumerate(numbers) if number == event), 0 if event < 0 else len(self))

    async def copy_to(self, events: EventStream, position: int, keep_alive_seconds: float, *, comments: bool) -> None:
        """Write the entries from `position` on, also those to come, with or without the stream's own comments. Raises
        ConnectionError if the reader has gone."""
        while True:
            grown = self._grown
            entries, position = self._entries[position:], len(self)
            events.write(b"".join([entry for entry in entries if comments or not entry.startswith(b":")]))
            await events.drain()
            if self.ended and position == len(self):
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(keep_alive_seconds - events.quiet_seconds):
                    await grown.wait()
            if events.quiet_seconds >= keep_alive_seconds:
                events.keep_alive()


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response in the background. Belongs to the client with this digest of its API key."""

    answer: ResponseAnswer
    client: str
    log: EventLog = field(default_factory=EventLog)
    task: asyncio.Task[None] | None = None  # generates it; None: it has not begun
    ended_at: float | None = None

    def start(self, task: asyncio.Task[None]) -> None:
        """Be the response that a task generates."""
        self.task = task
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self.ended_at = time.monotonic()
        if not task.cancelled():
            task.exception()  # it is in the log of events

    async def cancel(self) -> None:
        """End it now, if it has not ended."""
        if self.task is None or self.task.done():
            return
        self.task.cancel()
        await asyncio.wait([self.task])
        self.answer.cancel()
        await self.log.end()


class StoredResponses:
    """The responses in the background of this process, by their ids."""

    def __init__(self) -> None:
        self._responses: dict[str, StoredResponse] = {}

    def add(self, response: StoredResponse) -> None:
        self._responses[response.answer.id] = response
        self._forget_old()

    def find(self, id: str, client: str) -> StoredResponse:
        """Raises ApiError (404)."""
        self._forget_old()
        found = self._responses.get(id)
        if found is None or found.client != client:
            message = f"there is no response {id!r}; responses with background: true are kept for 10 minutes"
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return found

    def remove(self, response: StoredResponse) -> None:
        self._responses.pop(response.answer.id, None)

    def _ended(self) -> Iterator[tuple[float, StoredResponse]]:
        for response in self._responses.values():
            if response.ended_at is not None:
                yield response.ended_at, response

    def _forget_old(self) -> None:
        ended = sorted(self._ended(), key=lambda pair: pair[0])
        n_bytes = sum(response.log.n_bytes for _, response in ended)
        oldest = time.monotonic() - _KEPT_SECONDS
        for i, (at, response) in enumerate(ended):
            if at > oldest and n_bytes <= _MOST_BYTES and len(ended) - i <= _MOST_RESPONSES:
                return
            n_bytes -= response.log.n_bytes
            self.remove(response)


@dataclass(frozen=True, slots=True)
class Retrieval:
    """The query of GET /v1/responses/{id}: `after` is the number of the last event that the client has."""

    stream: bool = False
    after: int = -1

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Retrieval:
        """Raises ApiError (400)."""
        values = dict(query)
        for ignored in ("include", "include[]", "include_obfuscation"):
            values.pop(ignored, None)
        stream, after = values.pop("stream", "false"), values.pop("starting_after", None)
        for name in values:
            raise invalid(name, "unknown parameter", code="unknown_field")
        if stream not in ("true", "false"):
            raise invalid("stream", f"{stream!r} is not true or false")
        if after is None:
            return cls(stream == "true")
        if stream == "false":
            raise invalid("starting_after", "only a stream has events")
        if not (after.isascii() and after.isdigit() and len(after) < 16):
            raise invalid("starting_after", f"{after!r} is not the number of an event")
        return cls(True, int(after))
