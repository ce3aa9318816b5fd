"""TokenDelivery: brings the tokens of all choices of a process from the engine to their requests.

Nearly every token of a stream adds a known text to an event whose other bytes are known too. The FastPath of a choice
joins these bytes and writes them to the connection. All other tokens, and all tokens of a choice without a fast path,
go through the choice's Run (choices.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import orjson

from fastdecode.api.sse import Events
from fastdecode.engine.state.request import EngineError, TokenEvent
from fastdecode.text.detokenizer import ByteDetokenizer

#: Takes a token of a choice, whose index in its request comes first, or the error that ends it.
Taker = Callable[[int, int | TokenEvent | EngineError], None]


class FastPath:
    """Writes the tokens of one choice to its stream without the choice's Run."""

    __slots__ = ("_before", "_behind", "_detokenizer", "_free", "_length", "_stream", "_texts", "n_tokens")

    def __init__(
        self,
        stream: Events,
        around: tuple[bytes, bytes],
        detokenizer: ByteDetokenizer,
        texts: dict[int, bytes],
        free: Callable[[], bool],
    ):
        """`around`: the bytes of an event before and after the text. `texts`: the texts of tokens in JSON, by token;
        new ones are added. While `free()` is False, tokens go through the Run."""
        self._stream, self._detokenizer, self._texts, self._free = stream, detokenizer, texts, free
        self._before, self._behind = around
        self._length = len(self._before) + len(self._behind)
        self.n_tokens = 0  # written this way

    def take(self, token: int) -> bool:
        """Write the event of a token. False: the token must go through the Run."""
        text = self._texts.get(token)
        if text is None:
            if (whole := self._detokenizer.whole_text(token)) is None:
                return False
            text = self._texts[token] = orjson.dumps(whole)
        if self._detokenizer.mid_character or not self._free():
            return False
        if not self._stream.put(self._length + len(text), self._before, text, self._behind):
            return False
        self.n_tokens += 1
        return True


class TokenDelivery:
    """The outlet of a process's requests (engine/state/request.py)."""

    def __init__(self) -> None:
        self._next = 0  # number of the next choice
        self._takers: dict[int, tuple[Taker, int]] = {}  # by the choice's number; the index in its request
        self._fast_paths: dict[int, FastPath] = {}
        self._due: list[tuple[list[int], Sequence[int | TokenEvent | EngineError]]] = []  # numbers and their events

    def add(self, taker: Taker, n: int) -> int:
        """Give `n` choices of a request their numbers. Returns the first one."""
        first, self._next = self._next, self._next + n
        self._takers.update({first + i: (taker, i) for i in range(n)})
        return first

    def open_fast_path(self, number: int, fast_path: FastPath) -> None:
        """Let the tokens of a choice take a fast path where they can."""
        if number in self._takers:
            self._fast_paths[number] = fast_path

    def remove(self, number: int) -> None:
        """Forget a choice: it gets nothing more. Idempotent."""
        self._takers.pop(number, None)
        self._fast_paths.pop(number, None)

    # -- Outlet -----------------------------------------------------------------------------------------------------

    def tokens(self, numbers: list[int], tokens: list[int]) -> None:
        self._hand_out_soon()
        self._due.append((numbers, tokens))

    def event(self, number: int, event: TokenEvent | EngineError) -> None:
        self._hand_out_soon()
        self._due.append(([number], [event]))

    def _hand_out_soon(self) -> None:
        if not self._due:
            asyncio.get_running_loop().call_soon(self._hand_out)

    def _hand_out(self) -> None:
        due, self._due = self._due, []
        fast_paths, takers = self._fast_paths, self._takers
        for numbers, events in due:
            for number, event in zip(numbers, events, strict=True):
                if isinstance(event, int) and (path := fast_paths.get(number)) is not None and path.take(event):
                    continue
                if found := takers.get(number):  # else the choice has ended
                    taker, index = found
                    taker(index, event)
