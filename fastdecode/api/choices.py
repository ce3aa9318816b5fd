"""The choices of a request: from the engine's tokens to pieces of text.

A Choice turns the tokens of one choice into text, and never waits. A Run takes the tokens of all choices of a request
from the engine, and hands out the text that is ready: a piece for every token, because clients count and time tokens by
the chunks that they get. A sink gets the pieces of a stream within the call that brings the token, without a turn of a
task. The Run takes the tokens whether the client is fast or slow: a slow client gets larger pieces and delays nobody
else. The text that waits for a client is limited by its max_tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from fastdecode.api.delivery import FastPath, TokenDelivery
from fastdecode.engine.state.request import EngineError, TokenEvent, TokenScore
from fastdecode.service.client import Cancel, EngineClient, Request
from fastdecode.text.detokenizer import ByteDetokenizer, Detokenizer
from fastdecode.text.stop_strings import StopStrings

#: Unread pieces of a choice from which on the following ones are joined to the last.
_MAX_UNREAD = 32


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
    stop_string: str | None = None  # that ended the choice
    #: If the stream has marks (continuation.py), its tokens; the engine's finish reason is the last entry.
    tokens: tuple[int | str, ...] = ()

    def append(self, piece: Piece) -> None:
        self.tokens += piece.tokens
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.finish_reason, self.stop_string = piece.finish_reason, piece.stop_string


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
    min_tokens: int = 0  # the text of these first tokens is not searched for stop strings
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
        self.fast_path: FastPath | None = None  # of its tokens to a stream; None: all go through `feed`
        self._n_tokens = 0  # that `feed` has taken
        self.n_reused = 0  # prompt tokens found in the prefix cache
        self.prompt_scores: Sequence[TokenScore] = ()
        self._logprob_sum = 0.0
        self._detokenizer = detokenizer
        self._holds = bool(options.stops) or options.prompt_only  # more than the text of each token is to be seen to
        self._options, self._echo = options, echo
        self._stops = StopStrings(options.stops, include=options.include_stop, is_special=detokenizer.is_special)
        self._seen = 0  # characters detokenised
        self._released = 0  # characters handed out
        self._waiting: list[TokenLogprob] = []  # entries of tokens whose text is held back

    @property
    def n_tokens(self) -> int:
        """The tokens so far."""
        return self._n_tokens + (self.fast_path.n_tokens if self.fast_path else 0)

    @property
    def direct(self) -> ByteDetokenizer | None:
        """The detokenizer whose texts are the choice's pieces as they are, if each token's text stands by itself and
        nothing else is to be seen to; else None."""
        plain = self._echo is None and not self._holds
        return self._detokenizer if plain and isinstance(self._detokenizer, ByteDetokenizer) else None

    def feed(self, event: int | TokenEvent) -> Piece:
        """Take one token, and return the text that is now ready. After a finish_reason, no token may follow.

        An int is a token that has nothing else to say."""
        if isinstance(event, int):
            if self._echo is None and not self._holds:  # nearly every token of most requests
                self._n_tokens += 1
                return Piece(self._detokenizer.push(event))
            event = TokenEvent(event, reused=self.n_reused)
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
        self._n_tokens += 1
        self._logprob_sum += event.logprob or 0.0
        text = hidden = ""
        if event.finish_reason != "stop" or self._options.include_stop:
            if event.logprob is not None:
                self._waiting.append(TokenLogprob(event.token, event.logprob, event.top, self._seen))
            text = self._detokenizer.push(event.token)
            hidden = self._detokenizer.hidden_text(event.token) if self._options.stops else ""
        if event.finish_reason:
            text += self._detokenizer.flush()
        self._seen += len(text)
        if self.n_tokens > self._options.min_tokens:
            released, stopped = self._stops.push(hidden, hidden=True)
            if not stopped:
                more, stopped = self._stops.push(text)
                released += more
        else:
            released, stopped = text, False
        if event.finish_reason and not stopped:
            released += self._stops.flush()
        self._released += len(released)
        ended = event.finish_reason is not None and not stopped
        ready = sum(ended or entry.offset < self._released for entry in self._waiting)
        logprobs, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return Piece(released, logprobs, "stop" if stopped else event.finish_reason, self._stops.complete)


def _echoed(echo: Echo, scores: Sequence[TokenScore]) -> Piece:
    """The piece with which a text that echoes its prompt begins."""
    logprobs = []
    for i, (token, offset) in enumerate(zip(echo.tokens, echo.offsets, strict=False)):
        score = scores[i - 1] if i else None
        logprobs.append(TokenLogprob(token, score and score.logprob, score.top if score else [], offset))
    return Piece(echo.text, logprobs)


class Run:
    """All choices of one request.

    A context manager, which cancels the choices that still run when it is left.
    """

    def __init__(self, choices: Sequence[Choice], on_choice_end: Callable[[str, float], None], delivery: TokenDelivery):
        """`on_choice_end(reason, seconds)` is called at the end of each choice.

        The reason is "stop", "length", "abort" or "error"; the seconds count from now.
        """
        self.choices = choices
        #: The key of a stream that a router may continue at another S-node, whose pieces have their tokens.
        self.stream_key: str | None = None
        self.leave: Callable[[], None] | None = None  # tells the client that this server is about to end
        self.joins = True  # unread pieces are joined when they become many
        self._delivery = delivery
        self._first: int | None = None  # number of the first choice there; None: the choices are not submitted
        self._running = {choice.index for choice in choices}
        self._ready: dict[int, list[Piece]] = {}
        self._sink: Callable[[int, Piece], bool] | None = None
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._started = time.monotonic()
        self.first_token_seconds: float | None = None  # from `_started` to the first token of any choice
        self._on_choice_end = on_choice_end
        self._cancel: Cancel | None = None  # None: the choices are being queued

    @property
    def running(self) -> bool:
        """True if a choice has not ended."""
        return bool(self._running)

    def runs(self, index: int) -> bool:
        """True if the choice `index` has not ended."""
        return index in self._running

    def feed(self, index: int, event: TokenEvent) -> Piece:
        """Feed a choice a token that another S-node has generated. Returns its piece, which the client has already."""
        piece = self._piece(index, event)
        if piece.finish_reason:
            self._end(index, piece.finish_reason)
        return piece

    async def submit(self, engine: EngineClient, request: Request) -> None:
        """Queue the choices in the engine. Raises EngineError."""
        first = self._first = self._delivery.add(self._take, len(self.choices))
        try:
            self._cancel = await engine.submit(request, self._delivery, first)
        except BaseException:
            for choice in self.choices:
                self._delivery.remove(first + choice.index)
            raise
        for choice in self.choices:
            if choice.index not in self._running:
                self._cancel(choice.index)

    def offer_to(self, sink: Callable[[int, Piece], bool]) -> None:
        """Offer each piece to `sink`, with its choice's index, at the moment when it is ready. If `sink` returns False,
        the piece and its successors go to `pieces`, until a call of `pieces` has returned them."""
        self._sink = sink

    @property
    def is_read(self) -> bool:
        """Whether a sink has taken all pieces so far, so that it may get the next one."""
        return not self._ready and self._error is None

    def open_fast_path(self, index: int, fast_path: FastPath) -> None:
        """Let the tokens of a choice take a fast path where they can."""
        assert self._first is not None, "a choice that gets tokens is submitted"
        self.choices[index].fast_path = fast_path
        self._delivery.open_fast_path(self._first + index, fast_path)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """End the choices that have not ended."""
        for index in list(self._running):
            self._end(index, "abort" if self._error is None else "error")

    def fail(self, error: Exception) -> None:
        """End the run: `pieces` hands out the text that is ready, then raises `error`."""
        self._error = self._error or error
        self._wake.set()

    def _take(self, index: int, event: int | TokenEvent | EngineError) -> None:
        """Take a token of a choice, or the error that ends it."""
        if index not in self._running or self._error is not None:
            return
        if isinstance(event, EngineError):
            self.fail(event)
            return
        if self.first_token_seconds is None:
            self.first_token_seconds = time.monotonic() - self._started
        try:
            piece = self._piece(index, event)
            if self._ready or self._sink is None or not self._sink(index, piece):
                self._keep(index, piece)
        except Exception as bug:  # must not leave the client waiting, and must not reach the other requests
            self.fail(bug)
            return
        if piece.finish_reason:
            self._end(index, piece.finish_reason)
            self._wake.set()

    def _piece(self, index: int, event: int | TokenEvent) -> Piece:
        """The piece of a token, with the token if the stream has marks."""
        piece = self.choices[index].feed(event)
        if self.stream_key is not None:
            token, reason = (event, None) if isinstance(event, int) else (event.token, event.finish_reason)
            piece.tokens = (token,) if reason is None else (token, reason)
        return piece

    def _keep(self, index: int, piece: Piece) -> None:
        """Keep a piece for `pieces`."""
        unread = self._ready.setdefault(index, [])
        if len(unread) < _MAX_UNREAD or not self.joins:
            unread.append(piece)
        else:
            unread[-1].append(piece)
        self._wake.set()

    def _end(self, index: int, reason: str) -> None:
        """End a choice, in the engine too if it has more tokens there."""
        self._running.discard(index)
        if self._first is not None:
            self._delivery.remove(self._first + index)
        self._on_choice_end(reason, time.monotonic() - self._started)
        if self._cancel is not None:
            self._cancel(index)

    async def pieces(self, timeout: float | None = None) -> dict[int, list[Piece]] | None:
        """Wait for a piece that no sink has taken, and return all pieces since the last call, by the choice's index.

        Returns {} if none comes within `timeout` seconds, and None after the end. Raises the error that
        ended the generation (an EngineError, or the argument of `fail`), after the text that was ready before it.
        """
        if not self._ready and self._error is None and self._running:
            self._wake.clear()
            timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, self._wake.set)
            await self._wake.wait()
            if timer is not None:
                timer.cancel()
        if self._ready:
            ready, self._ready = self._ready, {}
            return ready
        if self._error is not None:
            raise self._error
        return {} if self._running else None
