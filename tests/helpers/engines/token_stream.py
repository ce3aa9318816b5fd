"""The token stream of one request to an Engine, and the parameters of a greedy one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from fastdecode.engine.engine import Engine
from fastdecode.engine.state.request import EngineError, SamplingParams, TokenEvent
from fastdecode.engine.state.sequence import Sequence


def submit(engine: Engine, prompt_ids: list[int], params: SamplingParams, request_id: str | None = None):
    """Queue a request of one choice; returns its RequestStream. Raises as Engine.submit_choices does."""
    events: asyncio.Queue[TokenEvent | EngineError | None] = asyncio.Queue()
    [seq] = engine.submit_choices(prompt_ids, params, {request_id or secrets.token_hex(12): events.put_nowait})
    return RequestStream(seq, events, engine.cancel)


def greedy(n: int) -> SamplingParams:
    """A request of `n` tokens, whatever these are."""
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


async def tokens_of(stream: RequestStream) -> list[int]:
    return [event.token async for event in stream]


class RequestStream:
    """The tokens of one request as they are generated. Iterate it once.

    The iteration raises GenerationFailed if the request cannot be finished.
    """

    def __init__(
        self,
        seq: Sequence,
        events: asyncio.Queue[TokenEvent | EngineError | None],
        cancel: Callable[[Sequence], None],
    ):
        """`events` gets the request's tokens, or the error that ends it; None ends the stream."""
        self._seq = seq
        self._events = events
        self._cancel = cancel
        self._done = False

    @property
    def request_id(self) -> str:
        return self._seq.request_id

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return self._seq.n_prompt

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._done:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, TokenEvent):
            self._done = event.finish_reason is not None
            return event
        self._done = True
        if event is None:  # cancelled
            raise StopAsyncIteration
        raise event

    def cancel(self) -> None:
        """End the request and free its pages; the iteration ends after the tokens that were already generated.

        Idempotent; does nothing to a request that has ended.
        """
        self._cancel(self._seq)
        self._events.put_nowait(None)
