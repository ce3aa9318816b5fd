"""The answers of /v1/messages: a message with its content blocks, whole or as Anthropic's events."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any
from uuid import uuid4

import orjson

from fastdecode.api.answers import Answer
from fastdecode.api.errors import ApiError
from fastdecode.api.generation import Piece
from fastdecode.text.output.deltas import CallDelta, MessageDelta, OutputParser
from fastdecode.text.tokenizer import Tokenizer

_Event = dict[str, Any]
#: For each kind of content block, its field that grows, and the delta and the delta's field by which it does.
_TEXTS = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}


class _ContentBlock:
    """A content block that is being written."""

    def __init__(self, message: str, kind: str, index: int, name: str | None):
        """`message` is the message's id, from which the id of a call follows: another S-node may end the block."""
        self.kind, self.index, self.text = kind, index, ""
        self._head: dict[str, Any] = {"type": kind}
        if kind == "tool_use":
            # An id of nine digits, because the templates of Mistral take no other.
            digest = blake2b(f"{message} {index}".encode(), digest_size=8).hexdigest()[:9]
            self._head |= {"id": digest, "name": name}
        elif kind == "thinking":
            self._head["signature"] = ""

    @property
    def shown(self) -> dict[str, Any]:
        """The block as the message shows it."""
        text: Any = self.text
        if self.kind == "tool_use":
            try:
                text = orjson.loads(self.text or "{}")
            except orjson.JSONDecodeError:  # of a call that is cut off
                text = {}
        return self._head | {_TEXTS[self.kind][0]: text}


class AnthropicAnswer(Answer):
    """The answer of /v1/messages, which has one choice."""

    id_prefix = "msg"
    object = "message"
    chunk_object = "message"
    prompt_param = "messages"
    named_events = True

    def __init__(self, model: str, tokenizer: Tokenizer, *, parser: OutputParser):
        super().__init__(model, tokenizer, logprobs=False)
        self.id = f"{self.id_prefix}_{uuid4().hex}"
        self._parser = parser
        self._blocks: list[_ContentBlock] = []
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError("a message has content blocks and no choices")

    def text_delta(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError("a delta of a message depends on its content blocks")

    def whole(self, pieces: dict[int, Piece], usage: dict[str, Any]) -> dict[str, Any]:
        self.deltas(0, pieces[0])
        return self._message(usage)

    def begin(self, usage: dict[str, Any]) -> list[_Event]:
        return [{"type": "message_start", "message": self._message(usage)}]

    def chunk(
        self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None, *, with_usage: bool = False
    ) -> dict[str, Any]:
        return choice or {}

    def deltas(self, index: int, piece: Piece) -> list[_Event]:
        delta = self._parser.push(piece.text)
        if piece.finish_reason:
            delta += self._parser.finish()
        events = self._events_of(delta)
        if piece.finish_reason:
            self._stop = {"stop_reason": self._stop_reason(piece), "stop_sequence": piece.stop_string}
        return events

    def _stop_reason(self, piece: Piece) -> str:
        if piece.finish_reason == "length":
            return "max_tokens"
        if piece.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if any(block.kind == "tool_use" for block in self._blocks) else "end_turn"

    def _events_of(self, delta: MessageDelta) -> list[_Event]:
        events: list[_Event] = []
        for kind, text in (("thinking", delta.reasoning), ("text", delta.content)):
            if text:
                events += self._begin(kind)
                events.append(self._text(text))
        for call in delta.calls:
            if call.name is not None:
                events += self._begin("tool_use", call)
            if call.arguments:
                events.append(self._text(call.arguments))
        return events

    def _begin(self, kind: str, call: CallDelta | None = None) -> list[_Event]:
        """The events that begin a content block of this kind, unless it has begun already."""
        if self._blocks and self._blocks[-1].kind == kind and call is None:
            return []
        events = self._end_block()
        block = _ContentBlock(self.id, kind, len(self._blocks), call.name if call else None)
        self._blocks.append(block)
        return [*events, {"type": "content_block_start", "index": block.index, "content_block": block.shown}]

    def _end_block(self) -> list[_Event]:
        return [{"type": "content_block_stop", "index": self._blocks[-1].index}] if self._blocks else []

    def _text(self, text: str) -> _Event:
        block = self._blocks[-1]
        block.text += text
        _, kind, name = _TEXTS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def end(self, usage: dict[str, Any], *, wanted: bool) -> list[_Event]:
        ended = {"type": "message_delta", "delta": self._stop, "usage": _usage(usage)}
        return [*self._end_block(), ended, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> _Event:
        return error.anthropic_body

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": [block.shown for block in self._blocks],
            **self._stop,
            "usage": _usage(usage),
        }


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    """The token counts. `input_tokens` leaves out the tokens found in the prefix cache."""
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
