"""The messages between a RemoteEngine (in an API process) and an EngineHost (in the engine's), as MessagePack.

Before each message stand 4 bytes of little-endian length. The two ends are of one version and trust each other, because
the engine's process starts the API's.
"""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Generic, Literal, TypeVar

import msgspec
from msgspec.msgpack import Decoder, Encoder

from fastdecode.engine.state import request as engine_errors
from fastdecode.engine.state.request import EngineError, Outlet, TokenEvent
from fastdecode.service.client import Request

_BUFFER = 1 << 20  # bytes that a reader takes ahead
Method = Literal["status", "metrics", "report"]  # of an EngineClient, which asks for something
_Message = TypeVar("_Message")


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An EngineError."""

    kind: str  # name of its class
    message: str
    attributes: dict[str, str | int | bool]

    @classmethod
    def from_error(cls, error: EngineError) -> Failure:
        return cls(type(error).__name__, str(error), vars(error))

    @property
    def error(self) -> EngineError:
        """The error that `from_error` got."""
        kind: type[EngineError] = getattr(engine_errors, self.kind)
        error = kind.__new__(kind, self.message)
        vars(error).update(self.attributes)
        return error


# ---- from an API process ----


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Queue a request. Its choices have the numbers first, first + 1, ... in the engine's messages."""

    first: int
    request: Request


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the request that was submitted as `first`, whether it is queued or not."""

    first: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End a choice of the request that was submitted as `first`; it counts from 0 (client.Cancel)."""

    first: int
    choice: int
    keep_seconds: float


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A choice has ended (EngineClient.choice_ended)."""

    reason: str
    seconds: float


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Call a method of the EngineClient. The AskResult has the same number."""

    question: int
    method: Method
    arguments: list[int]


class Serving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The API listens."""


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """No request is left after a Drain."""


class HeartbeatAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a Heartbeat."""


FromApi = Submit | Withdraw | End | Ended | Ask | Serving | Drained | HeartbeatAnswer
FROM_API: Decoder[FromApi] = Decoder(FromApi)


# ---- from the engine's process ----


class EngineLimits(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine's first message."""

    max_model_len: int
    max_queued: int


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request submitted as `first` is queued, or why not."""

    first: int
    failure: Failure | None


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The tokens of a step, and the errors that ended choices in it, with the numbers of their choices. The tokens that
    have nothing but their id to say come first; their numbers and ids are two arrays of int64."""

    numbers: bytes
    tokens: bytes
    events: list[tuple[int, TokenEvent]]
    failures: list[tuple[int, Failure]]

    @classmethod
    def from_calls(
        cls, numbers: Sequence[int], tokens: Sequence[int], events: list[tuple[int, TokenEvent | EngineError]]
    ) -> Step:
        """The message of an Outlet's calls: `tokens(numbers, tokens)`, then `event(*event)` for each of `events`."""
        return cls(
            array("q", numbers).tobytes(),
            array("q", tokens).tobytes(),
            [(number, event) for number, event in events if isinstance(event, TokenEvent)],
            [(number, Failure.from_error(event)) for number, event in events if isinstance(event, EngineError)],
        )

    @property
    def ended(self) -> list[int]:
        """The numbers of the choices that end with this step."""
        ends = [number for number, event in self.events if event.finish_reason is not None]
        return ends + [number for number, _ in self.failures]

    def deliver(self, outlet: Outlet) -> None:
        """Make the calls of `from_calls` on an outlet."""
        if self.numbers:
            outlet.tokens(array("q", self.numbers).tolist(), array("q", self.tokens).tolist())
        for number, event in self.events:
            outlet.event(number, event)
        for number, failure in self.failures:
            outlet.event(number, failure.error)


class AskResult(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to an Ask."""

    question: int
    result: msgspec.Raw  # of the method


class AskFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to an Ask whose method has failed."""

    question: int
    failure: Failure


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Refuse new requests, let the running ones go on for `seconds`, and answer Drained."""

    seconds: float


class Close(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the process."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To be answered with a HeartbeatAnswer. An API process whose event loop hangs does not answer."""


FromEngine = EngineLimits | Submitted | Step | AskResult | AskFailed | Drain | Close | Heartbeat
FROM_ENGINE: Decoder[FromEngine] = Decoder(FromEngine)


class Connection(Generic[_Message]):
    """One end of a connection, at which messages of the type `_Message` arrive."""

    def __init__(self, decoder: Decoder[_Message], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._decoder, self._reader, self._writer = decoder, reader, writer
        self._encoder = Encoder()

    @classmethod
    async def open(cls, sock: socket.socket, decoder: Decoder[_Message]) -> Connection[_Message]:
        """The connection of a connected socket, which it then owns; `decoder` decodes the messages that arrive."""
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=_BUFFER)
        return cls(decoder, reader, writer)

    def send(self, message: FromApi | FromEngine) -> None:
        """Send a message. Never waits: what the other end has not read yet stays in memory. Once the connection has
        ended, this does nothing."""
        body = self._encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(4, "little") + body)

    async def messages(self) -> AsyncIterator[_Message]:
        """The messages that arrive, until the connection ends."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "little")
                yield self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def abort(self) -> None:
        """End the connection at once, for an end that does not read any more. Idempotent."""
        self._writer.transport.abort()

    def close(self) -> None:
        """Close the connection, after the messages that were sent have left. Idempotent."""
        self._writer.close()
