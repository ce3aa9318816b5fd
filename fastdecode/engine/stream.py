"""The token stream of one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastdecode.engine.request import TokenEvent

if TYPE_CHECKING:
    from fastdecode.engine.sequence import Sequence


class RequestStream:
    """The tokens of one request as they are generated. Iterate it once.

    The iteration raises GenerationFailed if the request cannot be finished.
    """

    def __init__(self, seq: Sequence, cancel: Callable[[Sequence], None]):
        self._seq = seq
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
        event = await self._seq.output.get()
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
