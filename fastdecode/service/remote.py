"""RemoteEngine: an engine at the other end of a socket."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from typing import Any, TypeVar

import msgspec

from fastdecode.engine.state.request import EngineError, GenerationFailed, NotReady, Outlet, check_length
from fastdecode.service import messages
from fastdecode.service.client import Cancel, EngineStatus, Report, Request
from fastdecode.service.messages import FROM_ENGINE, Connection, FromEngine, Method

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 10.0  # an engine whose event loop is free answers at once
_T = TypeVar("_T")
_LOST = "the engine's process has ended"


class RemoteEngine:
    """An EngineClient whose engine an EngineHost serves at the other end of a socket. All requests have one outlet."""

    def __init__(self, connection: Connection[FromEngine]):
        loop = asyncio.get_running_loop()
        self._connection = connection
        self.max_model_len = self.max_queued = 0  # until the engine has said them
        self._outlet: Outlet | None = None  # of the first request, and of all others
        self._running: set[int] = set()  # the numbers of the choices that have not ended
        self.lost = 0  # how many choices were running when the engine's process ended
        self._queueing: dict[int, asyncio.Future[None]] = {}  # by the number of the first choice
        self._questions: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._numbers = itertools.count()  # of questions
        self._hello: asyncio.Future[None] = loop.create_future()
        #: The seconds that the engine's process gives running requests before it ends; None: it has ended already.
        self.drain_asked: asyncio.Future[float | None] = loop.create_future()
        self.close_asked = asyncio.Event()  # also set when the engine's process has ended
        self._reading = loop.create_task(self._read())

    @classmethod
    async def open(cls, sock: socket.socket) -> RemoteEngine:
        """The engine at the other end of a connected socket, which is then owned. Waits for the engine to start.

        Raises NotReady if the other end closes the connection first.
        """
        engine = cls(await Connection.open(sock, FROM_ENGINE))
        await engine._hello
        return engine

    async def submit(self, request: Request, outlet: Outlet, first: int) -> Cancel:
        for prompt in request.prompts:  # here already, because the engine's process would have to decode it first
            check_length(len(prompt), self.max_model_len)
        self._check_connection()
        if self._outlet is None:
            self._outlet = outlet
        assert outlet is self._outlet, "all requests of a RemoteEngine have one outlet"
        numbers = range(first, first + request.n_choices)

        def cancel(choice: int, keep_seconds: float = 0.0) -> None:
            if first + choice in self._running:
                self._running.discard(first + choice)
                self._connection.send(messages.End(first, choice, keep_seconds))

        self._running.update(numbers)
        queued = self._queueing[first] = asyncio.get_running_loop().create_future()
        try:
            self._connection.send(messages.Submit(first, request))
            await queued
        except BaseException as error:
            self._running.difference_update(numbers)
            if not isinstance(error, EngineError):
                self._connection.send(messages.Withdraw(first))
            raise
        finally:
            self._queueing.pop(first, None)
        return cancel

    def choice_ended(self, reason: str, seconds: float) -> None:
        self._connection.send(messages.Ended(reason, seconds))

    async def status(self) -> EngineStatus:
        return await self._ask(EngineStatus, "status")

    async def metrics(self) -> bytes:
        return await self._ask(bytes, "metrics")

    async def report(self, n: int) -> Report:
        return await self._ask(Report, "report", n)

    async def _ask(self, kind: type[_T], method: Method, *arguments: int) -> _T:
        """The result of a method of the engine, which is of this kind."""
        self._check_connection()
        question = next(self._numbers)
        answer = self._questions[question] = asyncio.get_running_loop().create_future()
        self._connection.send(messages.Ask(question, method, list(arguments)))
        try:
            return msgspec.msgpack.decode(await asyncio.wait_for(answer, _ANSWER_SECONDS), type=kind)
        except TimeoutError:
            raise NotReady(f"the engine has not answered for {_ANSWER_SECONDS:.0f} s") from None
        finally:
            del self._questions[question]

    def serving(self) -> None:
        """Tell the engine's process that the API listens."""
        self._connection.send(messages.Serving())

    def drained(self) -> None:
        """Tell the engine's process that no request is left."""
        self._connection.send(messages.Drained())

    async def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def _check_connection(self) -> None:
        if self._reading.done():
            raise NotReady(_LOST)

    async def _read(self) -> None:
        try:
            async for message in self._connection.messages():
                self._take(message)
        except Exception:
            log.exception("the connection to the engine's process broke")
        finally:
            self._lose()

    def _take(self, message: FromEngine) -> None:
        match message:
            case messages.Step():
                self._running.difference_update(message.ended)
                if self._outlet is not None:
                    message.deliver(self._outlet)
            case messages.Submitted(first, failure):
                _settle(self._queueing.get(first), failure and failure.error)
            case messages.AskResult(question, result):
                _settle(self._questions.get(question), result)
            case messages.AskFailed(question, failure):
                _settle(self._questions.get(question), failure.error)
            case messages.EngineLimits():
                self.max_model_len, self.max_queued = message.max_model_len, message.max_queued
                self._hello.set_result(None)
            case messages.Drain(seconds):
                _settle(self.drain_asked, seconds)
            case messages.Heartbeat():
                self._connection.send(messages.HeartbeatAnswer())
            case messages.Close():
                _settle(self.drain_asked, 0.0)
                self.close_asked.set()

    def _lose(self) -> None:
        """End everything that waits for the engine."""
        waits: list[asyncio.Future[Any]] = [self._hello, *self._queueing.values(), *self._questions.values()]
        for waiting in waits:
            _settle(waiting, NotReady(_LOST))
        running, self._running = self._running, set()
        self.lost = len(running)
        for number in running:
            assert self._outlet is not None, "a request has named it"
            self._outlet.event(number, GenerationFailed(_LOST))
        _settle(self.drain_asked, None)
        self.close_asked.set()


def _settle(future: asyncio.Future[Any] | None, result: Any = None) -> None:
    """Set the result of a future, or its exception, unless there is none any more, or its waiter has gone."""
    if future is None or future.done():
        return
    if isinstance(result, EngineError):
        future.set_exception(result)
    else:
        future.set_result(result)
