"""A request's choices, from the engine's tokens to pieces of text.

`Choice` is the logic of one choice, without waiting. `Run` drives all choices of a request at once and hands out what
is ready. It always drains the engine's streams, so a client that reads slowly gets bigger pieces instead of holding
anything up; what waits for it is at most the text of its own max_tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from fastdecode.engine.request import GenerationFailed, SamplingParams, TokenEvent
from fastdecode.text.stop_strings import StopStrings
from fastdecode.text.tokenizer import Detokenizer


class TokenStream(Protocol):
    """The engine's side of a choice: an async iterator of TokenEvent that raises GenerationFailed."""

    def __aiter__(self) -> TokenStream: ...
    async def __anext__(self) -> TokenEvent: ...
    def cancel(self) -> None: ...


class EngineClient(Protocol):
    """The engine, as far as generating goes. Raises PromptTooLong, Overloaded, NotReady."""

    max_queued: int  # more can never be submitted at once

    def submit(self, prompt_ids: list[int], params: SamplingParams, request_id: str | None = None) -> TokenStream: ...


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a choice with its probability."""

    token: int
    logprob: float  # nats
    top: list[tuple[int, float]]  # the best alternatives, best first
    offset: int  # characters of the choice's text before this token


@dataclass(slots=True)
class Piece:
    """Text that became ready together."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None  # on a choice's last piece: "stop" or "length"

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs or self.finish_reason)

    def append(self, piece: Piece) -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason


class Choice:
    """Text of one choice: detokenised, cut at stop strings, with the log-probabilities of the tokens that the text
    begins in.

    A token that ends the text (end of sequence, a stop token id) is no part of it and has no entry among the
    log-probabilities; it does count in `n_tokens`.
    """

    def __init__(self, index: int, n_prompt: int, detokenizer: Detokenizer, stops: Sequence[str]):
        self.index = index
        self.n_prompt = n_prompt
        self.n_tokens = 0
        self.n_reused = 0  # prompt tokens found in the prefix cache
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._seen = 0  # characters detokenised
        self._released = 0  # characters handed out
        self._waiting: list[TokenLogprob] = []  # their text is held back

    def feed(self, event: TokenEvent) -> Piece:
        """Take one token. After a piece with a finish_reason no more may come."""
        self.n_tokens += 1
        self.n_reused = event.reused
        text = ""
        if event.finish_reason != "stop":
            if event.logprob is not None:
                self._waiting.append(TokenLogprob(event.token, event.logprob, event.top, self._seen))
            text = self._detokenizer.push(event.token)
        if event.finish_reason:
            text += self._detokenizer.flush()
        self._seen += len(text)
        released, stopped = self._stops.push(text)
        if event.finish_reason and not stopped:
            released += self._stops.flush()
        self._released += len(released)
        ended = event.finish_reason is not None and not stopped
        ready = sum(ended or entry.offset < self._released for entry in self._waiting)
        logprobs, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return Piece(released, logprobs, "stop" if stopped else event.finish_reason)


class Run:
    """All choices of one request, generated together. An async context manager: on leaving, whatever still runs is
    cancelled.
    """

    def __init__(self, ended: Callable[[str, float], None]):
        """`ended` is told of each choice's end: "stop", "length", "abort" or "error", and the seconds since it was
        submitted.
        """
        self.choices: list[Choice] = []
        self._streams: list[TokenStream] = []
        self._ready: dict[int, Piece] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._ended = ended
        self._left = 0  # choices that have not ended

    def add(self, choice: Choice, stream: TokenStream) -> None:
        """One more choice, before the run is entered."""
        self.choices.append(choice)
        self._streams.append(stream)

    def cancel(self) -> None:
        """Cancel every choice in the engine. For a run that was never entered; idempotent."""
        for stream in self._streams:
            stream.cancel()

    def fail(self, error: Exception) -> None:
        """End the run: `pieces` raises `error` once it has handed out what is ready."""
        self._error = self._error or error
        self._wake.set()

    async def __aenter__(self) -> Run:
        self._left = len(self.choices)
        pairs = zip(self.choices, self._streams, strict=True)
        self._tasks = [asyncio.create_task(self._follow(choice, stream)) for choice, stream in pairs]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, choice: Choice, stream: TokenStream) -> None:
        """Read one choice to its end."""
        started = time.monotonic()
        reason = "abort"
        try:
            async for event in stream:
                if self._error is not None:
                    return
                piece = choice.feed(event)
                if piece:
                    self._ready.setdefault(choice.index, Piece()).append(piece)
                    self._wake.set()
                if piece.finish_reason:
                    reason = piece.finish_reason
                    return
            raise GenerationFailed("the generation was cancelled by the server")
        except Exception as failure:  # an EngineError, or a defect that must not leave the client waiting
            reason = "error"
            self.fail(failure)
        finally:
            stream.cancel()
            self._left -= 1
            self._wake.set()
            self._ended(reason, time.monotonic() - started)

    async def pieces(self, timeout: float | None = None) -> dict[int, Piece] | None:
        """What became ready since the last call, by index of choice; waits for something.

        Empty after `timeout` seconds of nothing, None after the end. Raises the error that ended the generation (an
        EngineError) after what became ready before it.
        """
        while not self._ready and self._error is None and self._left:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                return {}
        if self._ready:
            ready, self._ready = self._ready, {}
            return ready
        if self._error is not None:
            raise self._error
        return None


def submit(
    engine: EngineClient,
    prompts: Sequence[list[int]],
    params_of: Callable[[int], SamplingParams],
    n: int,
    *,
    request_id: str,
    make_choice: Callable[[int, list[int]], Choice],
    ended: Callable[[str, float], None],
) -> Run:
    """Submit `n` choices of every prompt, in OpenAI's order: choice i belongs to prompt i // n.

    All or nothing: if the engine refuses one (EngineError), those before it are cancelled.
    """
    run = Run(ended)
    try:
        for p, prompt in enumerate(prompts):
            for k in range(n):
                index = p * n + k
                run.add(make_choice(index, prompt), engine.submit(prompt, params_of(k), f"{request_id}-{index}"))
    except BaseException:
        run.cancel()
        raise
    return run
