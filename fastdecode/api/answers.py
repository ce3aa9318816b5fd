"""The JSON of both endpoints' answers, whole and streamed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from fastdecode.api.generation import Choice, Piece, TokenLogprob
from fastdecode.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


class Answer(ABC):
    """The shape of one endpoint's answer. `id` is also the request's id in the engine and in the headers."""

    id_prefix: str
    object: str
    chunk_object: str
    prompt_param: str  # the field the prompt is in

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool):
        self.id = f"{self.id_prefix}-{uuid4().hex}"
        self.tokenizer = tokenizer
        self.logprobs = logprobs
        self._head = {"id": self.id, "created": int(time.time()), "model": model}

    @abstractmethod
    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def opening(self, index: int) -> list[dict[str, Any]]:
        """What a choice's stream begins with."""

    @abstractmethod
    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a choice's stream."""

    def whole(self, pieces: dict[int, Piece], choices: Sequence[Choice], n: int) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        return self._head | {
            "object": self.object,
            "choices": [self.choice(index, pieces[index]) for index in sorted(pieces)],
            "usage": usage(choices, n),
        }

    def chunk(
        self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None, *, with_usage: bool = False
    ) -> dict[str, Any]:
        """One event of a stream. `with_usage`: the client asked for usage, so that every chunk has the key."""
        chunk = self._head | {"object": self.chunk_object, "choices": [] if choice is None else [choice]}
        return chunk | {"usage": usage} if with_usage else chunk


class CompletionAnswer(Answer):
    """/v1/completions. `text_offset` counts characters of the choice's own text."""

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

    def opening(self, index: int) -> list[dict[str, Any]]:
        return []

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        return [self.choice(index, piece)]

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {
            "tokens": [self._token(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives and the chosen token. Of two tokens that are written the same, the likelier."""
        top: dict[str, float] = {}
        for token, logprob in [*entry.top, (entry.token, entry.logprob)]:
            top.setdefault(self._token(token), _finite(logprob))
        return top

    def _token(self, token: int) -> str:
        """A token's text; "bytes:\\xe4\\xb8" for one that is not whole characters."""
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_param = "messages"

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": piece.finish_reason,
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        return [_delta(index, {"role": "assistant", "content": ""})]

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        deltas = []
        if piece.text or piece.logprobs:
            deltas.append(_delta(index, {"content": piece.text}, self._logprobs(piece.logprobs)))
        if piece.finish_reason:
            deltas.append(_delta(index, {}, finish_reason=piece.finish_reason))
        return deltas

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            self._token(entry.token, entry.logprob) | {"top_logprobs": [self._token(*top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": data.decode(errors="backslashreplace"), "logprob": _finite(logprob), "bytes": list(data)}


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Token counts of a request of `n` choices a prompt. A prompt counts once, however many choices it has."""
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
