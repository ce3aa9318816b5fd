"""The JSON of the answers of completions and chats, whole and streamed, and the base of answers that have items."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any
from uuid import uuid4

import orjson

from fastdecode.api.choices import Choice, Piece, TokenLogprob
from fastdecode.api.errors import ApiError
from fastdecode.engine.state.request import TokenScore
from fastdecode.text.output.deltas import CallDelta, MessageDelta, OutputParser, PlainParser
from fastdecode.text.tokenizer import Tokenizer

Event = dict[str, Any]
_LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have

#: Further fields of a choice, by its index.
Fields = Callable[[int], dict[str, Any]]


class Answer(ABC):
    """The shape of one endpoint's answer.

    `id` is the id in the answer; the header x-request-id and the request's id in the engine are the same.
    """

    id_prefix: str
    object: str
    chunk_object: str
    prompt_param: str  # the request's field that holds the prompt
    has_one_prompt = False  # its prompt is a chat, not one of a list
    named_events = False  # a stream's events have a line with their type (sse.py)

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool):
        self.id = f"{self.id_prefix}-{uuid4().hex}"
        self.tokenizer = tokenizer
        self.logprobs = logprobs
        self._begun: set[int] = set()  # choices whose first delta has been made
        self._head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model}

    def take_head(self, id: str, created: int) -> None:
        """Be the answer with this id, which was begun at the time `created`."""
        self.id = id
        self._head |= {"id": id, "created": created}

    @property
    def created(self) -> int:
        """When the answer was begun, in seconds since 1970."""
        created: int = self._head["created"]
        return created

    @abstractmethod
    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A choice of a whole answer; `piece` holds all of its text."""

    @abstractmethod
    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]] | str:
        """The deltas for a piece of a choice's text; the last piece has a finish_reason. A text means the one delta
        `text_delta(index, text)`."""

    @abstractmethod
    def text_delta(self, index: int, text: str) -> dict[str, Any]:
        """The delta of a text that extends what has begun, and says nothing else."""

    def adds_text(self, index: int) -> bool:
        """Whether every text that a choice gets from now on, until its last piece, means its `text_delta`."""
        return False

    def whole(self, pieces: dict[int, Piece], usage: dict[str, Any], more: Fields | None = None) -> dict[str, Any]:
        """The answer to a request without `stream`. `pieces[i]` is the text of choice i, and `more(i)` has further
        fields of it. Choices are JSON already: the log-probabilities of all of them take much memory as objects."""
        encoded = [
            orjson.dumps(self.choice(index, pieces[index]) | (more(index) if more else {})) for index in sorted(pieces)
        ]
        choices = [orjson.Fragment(choice) for choice in encoded]
        return self._head | {"object": self.object, "choices": choices, "usage": usage}

    def begin(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream before its first token. `usage` has the prompt's tokens."""
        return []

    def end(self, usage: dict[str, Any], *, wanted: bool) -> list[dict[str, Any]]:
        """The events of a stream after its last token. `wanted`: the client has asked for the usage."""
        return [self.chunk(None, usage, with_usage=True)] if wanted else []

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that fails."""
        return error.body

    @property
    def so_far(self) -> dict[str, Any]:
        """The answer as it is now, of an endpoint whose answers can be generated in the background."""
        raise NotImplementedError(f"{self.object} has no background")

    def cancel(self) -> None:
        """Be an answer that its client has cancelled, unless it has ended."""
        return

    def prompt_logprobs(self, scores: Sequence[TokenScore], tokens: Sequence[int], top: int) -> list[Any]:
        """vLLM's `prompt_logprobs`: null for the prompt's first token; for every other one an object that maps token
        ids to objects, for the token itself and the `top` likeliest ones. `tokens` is the prompt."""
        entries: list[Any] = [None]
        for token, score in zip(tokens[1:], scores, strict=True):
            likeliest = {t: (value, rank) for rank, (t, value) in enumerate(score.top[:top], 1)}
            entries.append(
                {
                    str(t): {"logprob": _finite(value), "rank": rank, "decoded_token": self._text_of(t)}
                    for t, (value, rank) in ({token: (score.logprob, score.rank)} | likeliest).items()
                }
            )
        return entries

    def _text_of(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode(errors="backslashreplace")

    def chunk(
        self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None, *, with_usage: bool = False
    ) -> dict[str, Any]:
        """One event of a stream. With `with_usage`, for clients that asked for usage, every event has that key, which
        is null without a `usage`."""
        chunk = self._head | {"object": self.chunk_object, "choices": [] if choice is None else [choice]}
        return chunk | {"usage": usage} if with_usage else chunk


class CompletionAnswer(Answer):
    """The answer of /v1/completions. `text_offset` counts the characters of the choice's text, without the prompt."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"
    prompt_param = "prompt"

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": piece.finish_reason,
        }

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]] | str:
        return [self.choice(index, piece)] if self.logprobs or piece.finish_reason else piece.text

    def text_delta(self, index: int, text: str) -> dict[str, Any]:
        return self.choice(index, Piece(text))

    def adds_text(self, index: int) -> bool:
        return not self.logprobs

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {
            "tokens": [self._token(entry.token) for entry in entries],
            "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry.logprob is None else self._top(entry, entry.logprob) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenLogprob, own: float) -> dict[str, float]:
        """The alternatives and the chosen token, text -> logprob. Of tokens with equal texts the likeliest counts."""
        top: dict[str, float] = {}
        for token, logprob in [*entry.top, (entry.token, own)]:
            top.setdefault(self._token(token), _finite(logprob))
        return top

    def _token(self, token: int) -> str:
        """A token's text, or "bytes:\\xe4\\xb8" for a token that holds a part of a character."""
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_param = "messages"
    has_one_prompt = True

    def __init__(
        self, model: str, tokenizer: Tokenizer, *, logprobs: bool, parser: Callable[[], OutputParser] = PlainParser
    ):
        """`parser()` makes the parser of a choice's text."""
        super().__init__(model, tokenizer, logprobs=logprobs)
        self._new_parser = parser
        self._parsers: dict[int, OutputParser] = {}  # by the choice's index
        self._call_ids: dict[tuple[int, int], str] = {}  # by the choice's index and the call's

    def _parse(self, index: int, piece: Piece) -> MessageDelta:
        """The delta by which a piece extends the message of a choice."""
        if (parser := self._parsers.get(index)) is None:
            parser = self._parsers[index] = self._new_parser()
        delta = parser.push(piece.text)
        return delta + parser.finish(cut=piece.finish_reason == "length") if piece.finish_reason else delta

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = self._parse(index, piece)
        message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["content"] = delta.content or None
            message["tool_calls"] = self._whole_calls(index, delta.calls)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": self._finish_reason(index, piece),
        }

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]] | str:
        parsed = self._parse(index, piece)
        is_text = not (self.logprobs or piece.finish_reason or parsed.reasoning or parsed.calls)
        if is_text and index in self._begun:
            return parsed.content
        # The role comes with the first token and not before it: clients take the first delta's time for the token's.
        message: dict[str, Any] = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [self._call_delta(index, call) for call in parsed.calls]
        if parsed.content or not (parsed.reasoning or parsed.calls):
            message["content"] = parsed.content
        deltas = []
        if any(message.values()) or piece.logprobs or not piece.finish_reason:
            deltas.append(_delta(index, message, self._logprobs(piece.logprobs)))
        if piece.finish_reason:
            deltas.append(_delta(index, {}, finish_reason=self._finish_reason(index, piece)))
        return deltas

    def text_delta(self, index: int, text: str) -> dict[str, Any]:
        return _delta(index, {"content": text})

    def adds_text(self, index: int) -> bool:
        # The parser of plain text keeps nothing of it.
        return not self.logprobs and index in self._begun and isinstance(self._parsers.get(index), PlainParser)

    def _finish_reason(self, index: int, piece: Piece) -> str | None:
        called = any(choice == index for choice, _ in self._call_ids)
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason

    def _call_delta(self, index: int, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": self._call_id(index, call), "type": "function", "function": function}

    def _call_id(self, index: int, call: CallDelta) -> str:
        """An id of nine letters and digits, because the templates of Mistral take no other."""
        return self._call_ids.setdefault((index, call.index), uuid4().hex[:9])

    def _whole_calls(self, index: int, deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.name is not None:
                function = {"name": delta.name, "arguments": ""}
                calls.append({"id": self._call_id(index, delta), "type": "function", "function": function})
            calls[delta.index]["function"]["arguments"] += delta.arguments
        return calls

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            self._token(entry.token, entry.logprob) | {"top_logprobs": [self._token(*top) for top in entry.top]}
            for entry in entries
            if entry.logprob is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": self._text_of(token), "logprob": _finite(logprob), "bytes": list(data)}


class ItemAnswer(Answer):
    """An answer of one choice that consists of items: reasoning, text and calls, in the order of the model's output."""

    named_events = True
    kinds: tuple[str, str, str]  # the endpoint's names of these items

    def __init__(self, model: str, tokenizer: Tokenizer, *, parser: Callable[[], OutputParser]):
        """`parser()` makes the parser of the answer's text, once the prompt is known to fit."""
        super().__init__(model, tokenizer, logprobs=False)
        self.id = f"{self.id_prefix}_{uuid4().hex}"
        self._new_parser = parser

    @cached_property
    def _parser(self) -> OutputParser:
        return self._new_parser()

    @abstractmethod
    def _body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer, as it is now."""

    @abstractmethod
    def _begin(self, kind: str, call: CallDelta | None = None) -> list[Event]:
        """The events that begin an item of this kind, unless it has begun already."""

    @abstractmethod
    def _text(self, text: str) -> Event:
        """The event that extends the last item."""

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError(f"a {self.object} has items and no choices")

    def text_delta(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError(f"a delta of a {self.object} depends on its items")

    def whole(self, pieces: dict[int, Piece], usage: dict[str, Any], more: Fields | None = None) -> dict[str, Any]:
        self.deltas(0, pieces[0])
        return self._body(usage)

    def chunk(
        self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None, *, with_usage: bool = False
    ) -> dict[str, Any]:
        return choice or {}

    def deltas(self, index: int, piece: Piece) -> list[Event]:
        delta = self._parser.push(piece.text)
        if piece.finish_reason:
            delta += self._parser.finish(cut=piece.finish_reason == "length")
        reasoning, content, called = self.kinds
        events: list[Event] = []
        for kind, text in ((reasoning, delta.reasoning), (content, delta.content)):
            if text:
                events += self._begin(kind)
                events.append(self._text(text))
        for call in delta.calls:
            if call.name is not None:
                events += self._begin(called, call)
            if call.arguments:
                events.append(self._text(call.arguments))
        return events


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Token counts of a request with `n` choices per prompt. The tokens of a prompt count once, whatever `n` is."""
    prompt = sum(choice.n_prompt for choice in choices[::n])
    completion = sum(choice.n_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.n_reused for choice in choices[::n])},
    }


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
