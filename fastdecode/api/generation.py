"""The choices of a request: from the engine's tokens to pieces of text.

A Choice turns the tokens of one choice into text, and never waits. A Run reads the engine's streams of all choices of a
request at once, and hands out the text that is ready: a piece for every token, because clients count and time tokens by
the chunks that they get. It reads the streams whether the client is fast or slow: a slow client gets larger pieces and
delays nobody else. The text that waits for a client is limited by its max_tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from fastdecode.engine.request import GenerationFailed, SamplingParams, TokenEvent, TokenScore
from fastdecode.text.stop_strings import StopStrings
from fastdecode.text.tokenizer import Detokenizer

#: A client that has left so many pieces of a choice unread gets what follows in larger pieces.
_MAX_UNREAD = 32


class TokenStream(Protocol):
    """The engine's stream of one choice: an async iterator of TokenEvent, which may raise GenerationFailed."""

    def __aiter__(self) -> TokenStream: ...
    async def __anext__(self) -> TokenEvent: ...
    def cancel(self) -> None: ...


class EngineClient(Protocol):
    """The methods of the engine that generate. `submit` raises an EngineError, e.g. PromptTooLong, Overloaded."""

    max_queued: int  # a request with more choices can never be queued
    end_tokens: frozenset[int]  # the model's tokens that end a text

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence, prompt and output together."""
        ...

    def submit(self, prompt_ids: list[int], params: SamplingParams, request_id: str | None = None) -> TokenStream: ...


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of a choice with its log-probability."""

    token: int
    logprob: float | None  # nats; None: the first token of a prompt, which nothing precedes
    top: list[tuple[int, float]]  # the best alternatives, best first
    offset: int  # characters of the choice's text before this token


@dataclass(slots=True)
class Piece:
    """The text that a token made ready, which may be none, with the log-probabilities of the tokens it completed."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None  # on a choice's last piece: "stop" or "length"

    def append(self, piece: Piece) -> None:
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its choices' texts begin with."""

    text: str
    tokens: list[int]
    offsets: list[int]  # characters of `text` before each token; empty: no log-probabilities are asked for


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the tokens of a choice become its text."""

    stops: Sequence[str] = ()
    min_tokens: int = 0  # the text of so many tokens is not searched for stop strings
    include_stop: bool = False  # the stop string, or the text of the token that ends the choice, is text
    prompt_only: bool = False  # nothing is wanted but the echo or the scores of the prompt


class Choice:
    """Turns the tokens of one choice into text that is cut at stop strings.

    The log-probability of a token comes with the piece that holds the token's first character. A token that ends the
    text (end of sequence, a stop token id) is not part of the text and has no log-probability, but `n_tokens` counts
    it.
    """

    def __init__(
        self,
        index: int,
        n_prompt: int,
        detokenizer: Detokenizer,
        options: TextOptions = TextOptions(),
        echo: Echo | None = None,
    ):
        self.index = index
        self.n_prompt = n_prompt
        self.n_tokens = 0
        self.n_reused = 0  # prompt tokens found in the prefix cache
        self.prompt_scores: Sequence[TokenScore] = ()
        self._logprob_sum = 0.0
        self._detokenizer = detokenizer
        self._options, self._echo = options, echo
        self._stops = StopStrings(options.stops, include=options.include_stop)
        self._seen = 0  # characters detokenised
        self._released = 0  # characters handed out
        self._waiting: list[TokenLogprob] = []  # entries of tokens whose text is held back

    def feed(self, event: TokenEvent) -> Piece:
        """Take one token, and return the text that is now ready. After a finish_reason, no token may follow."""
        head = Piece()
        if event.prompt_scores:
            self.prompt_scores = event.prompt_scores
        if self._echo is not None:
            head = _echoed(self._echo, event.prompt_scores)
            self._seen = self._released = len(self._echo.text)
            self._echo = None
        self.n_reused = event.reused
        if self._options.prompt_only:
            head.finish_reason = "length"
            return head
        head.append(self._feed(event))
        return head

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the tokens so far, if they are reported."""
        return self._logprob_sum / max(1, self.n_tokens)

    def _feed(self, event: TokenEvent) -> Piece:
        self.n_tokens += 1
        self._logprob_sum += event.logprob or 0.0
        text = ""
        if event.finish_reason != "stop" or self._options.include_stop:
            if event.logprob is not None:
                self._waiting.append(TokenLogprob(event.token, event.logprob, event.top, self._seen))
            text = self._detokenizer.push(event.token)
        if event.finish_reason:
            text += self._detokenizer.flush()
        self._seen += len(text)
        searched = self.n_tokens > self._options.min_tokens
        released, stopped = self._stops.push(text) if searched else (text, False)
        if event.finish_reason and not stopped:
            released += self._stops.flush()
        self._released += len(released)
        ended = event.finish_reason is not None and not stopped
        ready = sum(ended or entry.offset < self._released for entry in self._waiting)
        logprobs, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return Piece(released, logprobs, "stop" if stopped else event.finish_reason)


def _echoed(echo: Echo, scores: Sequence[TokenScore]) -> Piece:
    """The piece with which a text that echoes its prompt begins."""
    logprobs = []
    for i, (token, offset) in enumerate(zip(echo.tokens, echo.offsets, strict=False)):
        score = scores[i - 1] if i else None
        logprobs.append(TokenLogprob(token, score and score.logprob, score.top if score else [], offset))
    return Piece(echo.text, logprobs)


class Run:
    """All choices of one request.

    An async context manager, which cancels the choices that still run when it is left.
    """

    def __init__(self, on_choice_end: Callable[[str, float], None]):
        """`on_choice_end(reason, seconds)` is called at the end of each choice.

        The reason is "stop", "length", "abort" or "error"; the seconds count from submit.
        """
        self.choices: list[Choice] = []
        self._streams: list[TokenStream] = []
        self._ready: dict[int, list[Piece]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._on_choice_end = on_choice_end
        self._n_running = 0  # choices that have not ended

    def add(self, choice: Choice, stream: TokenStream) -> None:
        """Add a choice, before the run is entered."""
        self.choices.append(choice)
        self._streams.append(stream)

    def cancel(self) -> None:
        """Cancel every choice in the engine. Needed for a run that is never entered. Idempotent."""
        for stream in self._streams:
            stream.cancel()

    def fail(self, error: Exception) -> None:
        """End the run: `pieces` hands out the text that is ready, then raises `error`."""
        self._error = self._error or error
        self._wake.set()

    async def __aenter__(self) -> Run:
        self._n_running = len(self.choices)
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
                unread = self._ready.setdefault(choice.index, [])
                if len(unread) < _MAX_UNREAD:
                    unread.append(piece)
                else:
                    unread[-1].append(piece)
                self._wake.set()
                if piece.finish_reason:
                    reason = piece.finish_reason
                    return
            raise GenerationFailed("the generation was cancelled by the server")
        except Exception as failure:  # an EngineError, or a bug, which must not leave the client waiting
            reason = "error"
            self.fail(failure)
        finally:
            stream.cancel()
            self._n_running -= 1
            self._wake.set()
            self._on_choice_end(reason, time.monotonic() - started)

    async def pieces(self, timeout: float | None = None) -> dict[int, list[Piece]] | None:
        """Wait for a token, and return the pieces of all tokens since the last call, by the choice's index.

        Returns {} if no token comes within `timeout` seconds, and None after the end. Raises the error that
        ended the generation (an EngineError, or the argument of `fail`), after the text that was ready before it.
        """
        while not self._ready and self._error is None and self._n_running:
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
    on_choice_end: Callable[[str, float], None],
) -> Run:
    """Submit `n` choices of every prompt, in OpenAI's order: choice i belongs to prompt i // n.

    `params_of(k)` gives the parameters of a prompt's k-th choice. If the engine refuses a choice (EngineError), the
    choices before it are cancelled.
    """
    run = Run(on_choice_end)
    try:
        for p, prompt in enumerate(prompts):
            for k in range(n):
                index = p * n + k
                run.add(make_choice(index, prompt), engine.submit(prompt, params_of(k), f"{request_id}-{index}"))
    except BaseException:
        run.cancel()
        raise
    return run
