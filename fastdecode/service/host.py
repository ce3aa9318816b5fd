"""EngineHost: serves an EngineClient to the RemoteEngine at the other end of a socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from fastdecode.engine.state.request import EngineError, GenerationFailed, NotReady, TokenEvent
from fastdecode.service import messages
from fastdecode.service.client import Cancel, EngineClient, Request
from fastdecode.service.messages import FROM_API, Connection, Failure, FromApi

log = logging.getLogger(__name__)

_HEARTBEAT_SECONDS = 1.0
_ABANDONED_SECONDS = 10.0  # for which the K and V of streams stay that have lost their API process
_MOST_UNANSWERED = 8  # intervals without an answer, after which an API process counts as hung


@dataclass(slots=True)
class _Hosted:
    """A request that is being queued or runs."""

    first: int  # number of its first choice
    running: set[int]  # the numbers of its choices that have not ended
    may_leave: bool  # a router may continue its stream at another S-node
    cancel: Cancel | None = None  # None: it is not queued yet
    queueing: asyncio.Task[None] | None = None


class EngineHost:
    """An Outlet: one API process as the engine's process sees it. When the connection ends, so do its requests. The K
    and V of streams that a router may continue stay for a while, because other S-nodes adopt them.

    Choices have the numbers that the API process gave them. The tokens of a step leave in one message, after the engine
    has handed over its next step.
    """

    def __init__(self, engine: EngineClient, connection: Connection[FromApi]):
        self._engine, self._connection = engine, connection
        self._requests: dict[int, _Hosted] = {}  # by the number of the first choice
        self._choices: dict[int, _Hosted] = {}  # the request of each choice that has not ended
        # The calls of an outlet that are to be sent: one `tokens` with all tokens, and the `event`s behind it.
        self._numbers: list[int] = []
        self._tokens: list[int] = []
        self._events: list[tuple[int, TokenEvent | EngineError]] = []
        self._sending = False  # the event loop is going to call `_send_last`
        self._tasks: set[asyncio.Task[None]] = set()
        self._drained = asyncio.Event()  # also set when the connection has ended
        self._unanswered = 0  # intervals since the last Heartbeat that was answered
        #: True if the connection was ended because the API process did not answer.
        self.hung = False
        #: True once the API listens; False if the connection has ended before.
        self.serving: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, sock: socket.socket, engine: EngineClient) -> EngineHost:
        """The host of a connected socket, which it then owns."""
        return cls(engine, await Connection.open(sock, FROM_API))

    async def run(self) -> None:
        """Serve until the connection ends."""
        self._connection.send(messages.EngineLimits(self._engine.max_model_len, self._engine.max_queued))
        self._spawn(self._watch())
        try:
            async for message in self._connection.messages():
                self._take(message)
        except Exception:
            log.exception("the connection to an API process broke")
        finally:
            for first, hosted in list(self._requests.items()):
                self._withdraw(first, _ABANDONED_SECONDS if hosted.may_leave else 0.0)
            for task in self._tasks:
                task.cancel()
            if not self.serving.done():
                self.serving.set_result(False)
            self._drained.set()
            self._connection.close()

    async def _watch(self) -> None:
        """End the connection if the API hangs. Intervals are counted, because a whole machine may be paused."""
        if not await asyncio.shield(self.serving):
            return
        while self._unanswered < _MOST_UNANSWERED:
            if not self._unanswered:
                self._connection.send(messages.Heartbeat())
            self._unanswered += 1
            await asyncio.sleep(_HEARTBEAT_SECONDS)
        self.hung = True
        self._connection.abort()

    async def drain(self, seconds: float) -> None:
        """Let the API refuse new requests, and wait until it has none left, or has ended them after `seconds`."""
        self._connection.send(messages.Drain(seconds))
        await self._drained.wait()

    def close(self) -> None:
        """Let the API's process end."""
        self._connection.send(messages.Close())

    def _take(self, message: FromApi) -> None:
        match message:
            case messages.Submit():
                numbers = range(message.first, message.first + message.request.n_choices)
                hosted = self._requests[message.first] = _Hosted(
                    message.first, set(numbers), may_leave=message.request.stream_key is not None
                )
                self._choices.update(dict.fromkeys(numbers, hosted))
                hosted.queueing = self._spawn(self._submit(message.request, hosted))
            case messages.Withdraw(first):
                self._withdraw(first)
            case messages.End(first, choice, keep_seconds):
                if (found := self._requests.get(first)) and found.cancel:
                    found.cancel(choice, keep_seconds)
                    self._end(first + choice)
            case messages.Ended(reason, seconds):
                self._engine.choice_ended(reason, seconds)
            case messages.Ask():
                self._spawn(self._answer(message))
            case messages.Serving():
                self.serving.set_result(True)
            case messages.Drained():
                self._drained.set()
            case messages.HeartbeatAnswer():
                self._unanswered = 0

    async def _submit(self, request: Request, hosted: _Hosted) -> None:
        try:
            hosted.cancel = await self._engine.submit(request, self, hosted.first)
        except Exception as error:
            self._forget(hosted)
            failure = _failure(error, "a request could not be queued", GenerationFailed)
            self._connection.send(messages.Submitted(hosted.first, failure))
        else:
            self._connection.send(messages.Submitted(hosted.first, None))

    # -- Outlet -----------------------------------------------------------------------------------------------------

    def tokens(self, numbers: list[int], tokens: list[int]) -> None:
        if self._events:  # which come before these tokens
            self._send_step()
        self._numbers += numbers
        self._tokens += tokens
        self._send_soon()

    def event(self, number: int, event: TokenEvent | EngineError) -> None:
        self._events.append((number, event))
        if isinstance(event, EngineError) or event.finish_reason is not None:
            self._end(number)
        self._send_soon()

    def _send_soon(self) -> None:
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send_last)

    def _send_last(self) -> None:
        self._sending = False
        self._send_step()

    def _send_step(self) -> None:
        step = messages.Step.from_calls(self._numbers, self._tokens, self._events)
        self._numbers, self._tokens, self._events = [], [], []
        self._connection.send(step)

    # -- the end of choices -----------------------------------------------------------------------------------------

    def _end(self, number: int) -> None:
        """Forget a choice that has ended."""
        if hosted := self._choices.pop(number, None):
            hosted.running.discard(number)
            if not hosted.running:
                self._requests.pop(hosted.first, None)

    def _forget(self, hosted: _Hosted) -> None:
        """Forget a request."""
        self._requests.pop(hosted.first, None)
        for number in hosted.running:
            self._choices.pop(number, None)

    def _withdraw(self, first: int, keep_seconds: float = 0.0) -> None:
        """End a request, see Cancel. Does nothing to one that has ended."""
        if (hosted := self._requests.get(first)) is None:
            return
        self._forget(hosted)
        if hosted.cancel is None:
            assert hosted.queueing is not None, "a request without a Cancel is being queued"
            hosted.queueing.cancel()
            return
        for number in hosted.running:
            hosted.cancel(number - first, keep_seconds)

    async def _answer(self, ask: messages.Ask) -> None:
        try:
            result = msgspec.msgpack.encode(await getattr(self._engine, ask.method)(*ask.arguments))
        except Exception as error:
            failure = _failure(error, f"the engine could not tell its {ask.method}", NotReady)
            self._connection.send(messages.AskFailed(ask.question, failure))
        else:
            self._connection.send(messages.AskResult(ask.question, msgspec.Raw(result)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _failure(error: Exception, what: str, kind: type[EngineError]) -> Failure:
    """What the API process gets for an error. One that is no EngineError is a bug, which must not leave the client
    waiting: it is logged as `what`, and told as an error of class `kind`."""
    if not isinstance(error, EngineError):
        log.error("%s", what, exc_info=error)
        error = kind("internal error; the server's log says more")
    return Failure.from_error(error)
