"""Streams whose events are stored, so that a client that has lost its connection goes on behind the last event that it
has had: responses in the background, and the streams of requests with Last-Event-ID (last_event.py).

A response in the background is generated whether or not a client reads it, as OpenAI documents it (guide "Background
mode"), and is stored for ten minutes behind its end. Another stream ends once nobody has read it for `resume_seconds`,
and is stored for that long behind its end. They are in the memory of this process alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fastdecode.api.answers import Answer
from fastdecode.api.errors import ApiError
from fastdecode.api.fields import invalid
from fastdecode.api.last_event import LastEvent, event_id
from fastdecode.api.sse import Events, EventStream

#: The most bytes of events that are stored.
STORED_BYTES = 256 * 2**20
_BACKGROUND_SECONDS = 600.0  # for which a response in the background is stored behind its end
_MOST_ENDED = 1000  # streams
_ENTRY_BYTES = 64  # of an entry beside its text
_AT_ONCE = 65536  # bytes that a reader gets before it is waited for


class EventLog(Events):
    """The events of a stream, for readers that come, go and come back. Comments of the stream are entries too."""

    def __init__(self, store: StoredStreams, *, named: bool, id: str | None):
        """`store` bounds the memory of all logs. `id`: events get ids, which begin with it; None: they get none."""
        super().__init__(named=named)
        self.ended = False
        self.counted = False  # the store counts its bytes
        self.n_bytes = 0
        self.last_event = -1  # the number of the last event
        self._store, self._id = store, id
        self._entries: list[bytes] = []
        self._cut = False
        self._grown = asyncio.Event()  # set, and replaced, with every entry

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def full(self) -> bool:
        return self._store.full

    def write(self, events: bytes) -> None:
        self._last = self._time()
        for entry in events.split(b"\n\n"):
            if entry:
                self._append(entry + b"\n\n")
        self._wake()

    def _append(self, entry: bytes) -> None:
        if not entry.startswith(b":"):
            self.last_event += 1
            if self._id is not None:
                entry = b"id: %b\n%b" % (event_id(self._id, self.last_event), entry)
        self._entries.append(entry)
        self.n_bytes += len(entry) + _ENTRY_BYTES
        if self.counted:
            self._store.n_bytes += len(entry) + _ENTRY_BYTES

    def put(self, size: int, before: bytes, text: bytes, behind: bytes) -> bool:
        if self.full:
            return False
        self.write(before + text + behind)
        return True

    async def drain(self) -> None:
        """Nobody has to read the log. Raises ApiError (503) if there is no memory for more."""
        if self.full:
            raise ApiError(503, "the events of stored streams exceed --stored-memory", code="stored_memory")

    def keep_alive(self, *, ids: bool = False) -> None:
        """Each reader's stream has comments of its own."""
        self._last = self._time()

    async def end(self) -> None:
        self.ended = True
        self._wake()

    def cut(self) -> None:
        """Let readers end where they are."""
        self._cut = True
        self._wake()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def copy_to(
        self, events: EventStream, after: int, keep_alive_seconds: float, *, comments_from: int | None = None
    ) -> None:
        """Write the events behind the one with the number `after`, also those to come, and the stream's own comments
        from this entry on; None: no comments. Raises ConnectionError if the reader has gone, or was cut."""
        position, number = 0, -1
        while True:
            grown = self._grown
            ready, size = [], 0
            while position < len(self) and size < _AT_ONCE:
                entry = self._entries[position]
                is_comment = entry.startswith(b":")
                number += not is_comment
                if comments_from is not None and position >= comments_from if is_comment else number > after:
                    ready.append(entry)
                    size += len(entry)
                position += 1
            events.write(b"".join(ready))
            await events.drain()
            if self._cut:
                raise ConnectionResetError("the stream is no longer stored")
            if position < len(self):
                continue
            if self.ended:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(keep_alive_seconds - events.quiet_seconds):
                    await grown.wait()
            if events.quiet_seconds >= keep_alive_seconds:
                events.keep_alive(ids=self._id is not None)


@dataclass(slots=True, eq=False)
class StoredStream:
    """A stream that is stored. Belongs to the client with this digest of its API key."""

    answer: Answer
    client: str
    background: bool
    digest: bytes | None  # of its request, if events have ids
    log: EventLog
    task: asyncio.Task[None] | None = None  # generates it; None: it has not begun
    readers: int = 0
    ended_at: float | None = None
    expiry: asyncio.TimerHandle | None = None

    def start(self, task: asyncio.Task[None]) -> None:
        """Be the stream that a task generates."""
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


class StoredStreams:
    """The stored streams of this process, by their ids."""

    def __init__(self, most_bytes: int, resume_seconds: float):
        """`most_bytes`: of all events. `resume_seconds`: how long a stream that is not in the background waits for its
        client; 0: events get no ids."""
        self.resume_seconds = resume_seconds
        self.n_bytes = 0
        self._most_bytes = most_bytes
        self._streams: dict[str, StoredStream] = {}

    @property
    def full(self) -> bool:
        """Whether events take too much memory even if those of ended streams are dropped."""
        if self.n_bytes > self._most_bytes:
            self._forget_old()
        return self.n_bytes > self._most_bytes

    def new(self, answer: Answer, client: str, *, background: bool, digest: bytes | None) -> StoredStream:
        """A stream to be stored. Raises ApiError (429)."""
        if self.full:
            message = "the events of stored streams take all of --stored-memory"
            raise ApiError(429, message, code="stored_memory", headers={"Retry-After": "1"})
        log = EventLog(self, named=answer.named_events, id=None if digest is None else answer.id)
        return StoredStream(answer, client, background, digest, log)

    def add(self, stream: StoredStream) -> None:
        """Let clients find a stream."""
        if (other := self._streams.get(stream.answer.id)) is not None:
            self.remove(other)
        self._streams[stream.answer.id] = stream
        self.n_bytes += stream.log.n_bytes
        stream.log.counted = True
        self._forget_old()

    def remove(self, stream: StoredStream) -> None:
        """Forget a stream, whose readers end. Idempotent."""
        if self._streams.get(stream.answer.id) is not stream:
            return
        del self._streams[stream.answer.id]
        self.n_bytes -= stream.log.n_bytes
        stream.log.counted = False
        stream.log.cut()

    def find_response(self, id: str, client: str) -> StoredStream:
        """A response in the background. Raises ApiError (404)."""
        found = self._find(id, client)
        if found is None or not found.background:
            message = f"there is no response {id!r}; responses with background: true are kept for 10 minutes"
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return found

    def find(self, event: LastEvent, client: str) -> StoredStream:
        """The stream that has an event. Raises ApiError (400, 404)."""
        found = self._find(event.stream, client)
        if found is None or found.digest is None or event.number > found.log.last_event:
            message = (
                f"there is no event {event.number} of a stream {event.stream!r}; streams are kept for "
                f"{self.resume_seconds:g} s after the loss of their connection (--resume-seconds)"
            )
            raise ApiError(404, message, code="event_not_found")
        if found.digest != event.digest:
            message = "Last-Event-ID belongs to another request; send that request again, or send no Last-Event-ID"
            raise ApiError(400, message, code="event_of_another_request")
        return found

    @contextmanager
    def reading(self, stream: StoredStream) -> Iterator[None]:
        """While a client reads a stream. A stream that is not in the background ends some time after its last
        reader."""
        stream.readers += 1
        if stream.expiry is not None:
            stream.expiry.cancel()
        try:
            yield
        finally:
            stream.readers -= 1
            if not stream.readers and not stream.background:
                loop = asyncio.get_running_loop()
                stream.expiry = loop.call_later(self.resume_seconds, self._expire, stream)

    def _expire(self, stream: StoredStream) -> None:
        self.remove(stream)
        if stream.task is not None:
            stream.task.cancel()

    def _find(self, id: str, client: str) -> StoredStream | None:
        self._forget_old()
        found = self._streams.get(id)
        return found if found is not None and found.client == client else None

    def _forget_old(self) -> None:
        oldest = time.monotonic() - _BACKGROUND_SECONDS
        ended = sorted((s for s in self._streams.values() if s.ended_at is not None), key=lambda s: s.ended_at or 0.0)
        for i, stream in enumerate(ended):
            too_old = stream.background and not stream.readers and (stream.ended_at or 0.0) < oldest
            if too_old or self.n_bytes > self._most_bytes or len(ended) - i > _MOST_ENDED:
                self.remove(stream)


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
