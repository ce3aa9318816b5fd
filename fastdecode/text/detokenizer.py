"""Detokenizers: from a stream of tokens to a stream of text."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from fastdecode.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(ABC):
    """Turns a stream of tokens into a stream of text.

    The results of all calls of `push` and of `flush`, joined, are the decoded text of all tokens. `push` never returns
    a part of a character: it holds bytes back that may be the start of a character, until the character is complete or
    the next tokens have shown that it never will be.
    """

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int], *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._shown, self._skip = shown, skip_special_tokens

    @staticmethod
    def make(
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        shown: frozenset[int] = frozenset(),
        skip_special_tokens: bool = True,
    ) -> Detokenizer:
        """A detokenizer whose text continues that of `prompt`, with its leading space; without a prompt it starts a new
        text.

        `shown` are special tokens that are text all the same; without `skip_special_tokens`, all are.
        """
        kind = ByteDetokenizer if tokenizer.is_bytewise else WindowDetokenizer
        return kind(tokenizer, prompt, shown, skip_special_tokens=skip_special_tokens)

    @abstractmethod
    def push(self, token: int) -> str:
        """Take a token, and return the text that it adds; "" for special tokens and for parts of a character."""

    @abstractmethod
    def flush(self) -> str:
        """At the end of the stream, return the rest of the text. An incomplete character becomes U+FFFD."""

    def hidden_text(self, token: int) -> str:
        """The text of a special token that is left out of the text; "" for other tokens."""
        return self._tokenizer.token_text(token) or "" if self._is_left_out(token) else ""

    def is_special(self, text: str) -> bool:
        """Whether `text` has the text of a special token in it."""
        return self._tokenizer.has_special(text)

    def _is_left_out(self, token: int) -> bool:
        return self._skip and self._tokenizer.is_special(token) and token not in self._shown


class ByteDetokenizer(Detokenizer):
    """For tokenizers whose texts are the bytes of their tokens: decodes the bytes of each token alone."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], shown: frozenset[int], *, skip_special_tokens: bool
    ):
        super().__init__(tokenizer, shown, skip_special_tokens=skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.mid_character = False  # the decoder holds the beginning of a character
        self._texts = tokenizer.whole_texts
        for token in prompt[-3:]:  # a character that the prompt has begun has at most three bytes there
            self.push(token)

    def whole_text(self, token: int) -> str | None:
        """The text that the token adds unless it comes `within` a character, if that is known already and the same in
        every request."""
        return self._texts.get(token)

    def push(self, token: int) -> str:
        if not self.mid_character and (known := self._texts.get(token)) is not None:
            return known
        if self._is_left_out(token):
            return ""
        began_inside, data = self.mid_character, self._tokenizer.token_bytes(token)
        text = self._decoder.decode(data)
        self.mid_character = bool(self._decoder.getstate()[0])
        if not (began_inside or self.mid_character or self._tokenizer.is_special(token)):
            self._texts[token] = text
        return text

    def flush(self) -> str:
        self.mid_character = False
        return self._decoder.decode(b"", True)


class WindowDetokenizer(Detokenizer):
    """For all other tokenizers: each call decodes a window of the last tokens.

    The window has some tokens before the last point where the text ended on a whole character, and all tokens since.
    The former are context, because decoders treat the first token of a text specially.
    """

    MAX_HELD = 3  # a UTF-8 character has at most four bytes, and a token at least one
    _CONTEXT = 8  # with this many tokens before them, tokens decode as in the whole text
    _MAX_WINDOW = 64  # longest window while the text never ends on a whole character

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], shown: frozenset[int], *, skip_special_tokens: bool
    ):
        super().__init__(tokenizer, shown, skip_special_tokens=skip_special_tokens)
        self._window = [token for token in prompt[-self._CONTEXT :] if self._is_text(token)]
        self._clean = len(self._window)  # number of tokens in the window that are context
        while self._decode(self._window[: self._clean]).endswith(_REPLACEMENT):
            self._clean -= 1
        self._sent = len(self._decode(self._window[: self._clean]))  # returned characters of the window's text
        self._held = 0  # number of last tokens after each of which the text ended within a character

    def _is_text(self, token: int) -> bool:
        return not self._is_left_out(token) and self._tokenizer.token_text(token) is not None

    def _decode(self, ids: list[int]) -> str:
        # The window has only tokens that are text, so no special one is left out here.
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def push(self, token: int) -> str:
        if not self._is_text(token):
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        whole = len(text.rstrip(_REPLACEMENT))
        self._held = self._held + 1 if whole < len(text) else 0
        if self._held > self.MAX_HELD:
            whole = len(text) - 1  # these bytes are no character; only the last one may start one
        new = text[self._sent : whole]
        self._sent = max(self._sent, whole)
        if new and not self._held:
            self._cut(self._clean, 0)
            self._clean = len(self._window)
        elif len(self._window) - self._clean > self._MAX_WINDOW:
            self._cut(len(self._window) - self._CONTEXT, len(text) - self._sent)
            self._clean = 0
        return new

    def _cut(self, n: int, unsent: int) -> None:
        """Drop the first `n` tokens of the window; the last `unsent` characters of its text remain to be returned."""
        del self._window[:n]
        self._sent = len(self._decode(self._window)) - unsent

    def flush(self) -> str:
        text = self._decode(self._window)[self._sent :]
        self._window, self._clean, self._sent = [], 0, 0
        return text
