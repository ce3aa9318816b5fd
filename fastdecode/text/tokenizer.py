"""Text to token ids and back: a Hugging Face tokenizer directory, read without transformers.

`Tokenizer` encodes, decodes and renders chats exactly as transformers does with the same files; `Detokenizer` turns a
stream of tokens into a stream of text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import tokenizers
from tokenizers import AddedToken

from fastdecode.text.chat_template import ChatTemplate, ChatTemplateError

_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class TokenizerError(ValueError):
    """A tokenizer's files are missing or broken; the message names the file."""


class Tokenizer:
    """A model's tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], template: str | None = None):
        """`config` is tokenizer_config.json's content; `template` a Jinja chat template, None where the model has
        none.
        """
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._named = {name: text for name in _NAMED_SPECIALS if (text := _token_text(config.get(name))) is not None}
        self._add_special_tokens(config)
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self._byte_level = _uses(backend.decoder, "ByteLevel")
        self._template = None if template is None else ChatTemplate(template, self._named)

    @classmethod
    def from_dir(cls, model_dir: str | Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template of `model_dir`.

        Raises TokenizerError, and ChatTemplateError for a template that is not valid Jinja.
        """
        directory = Path(model_dir)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{directory} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise TokenizerError(f"{path}: {error}") from None
        config = _read_json(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # older directories keep the named tokens in a file of their own
            config = config | _read_json(directory / "special_tokens_map.json")
        try:
            return cls(backend, config, _find_template(directory, config))
        except (TokenizerError, ChatTemplateError):
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TokenizerError(f"{directory / 'tokenizer_config.json'} is not understood: {error!r}") from None

    def _add_special_tokens(self, config: Mapping[str, Any]) -> None:
        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        listed = config.get("added_tokens_decoder") or {}
        self._backend.add_tokens(
            [t for i in sorted(listed, key=int) if (t := _added_token(listed[i])).content not in known]
        )
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        specials = [config[name] for name in self._named] + list(
            extra.values() if isinstance(extra, Mapping) else extra
        )
        known = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        missing = [token for special in specials if (token := _added_token(special, special=True)).content not in known]
        self._backend.add_special_tokens(missing)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens tokenizer.json's post processor adds. Special tokens written out
        in the text become those tokens, as everywhere in this field.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids the tokenizer does not know (a padded vocabulary's) are nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_text(self, token: int) -> bool:
        """Whether the id stands for text: not a special token, not beyond the vocabulary."""
        return token not in self._special_ids and self._backend.id_to_token(token) is not None

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for, in any context but a text's start; b"" for an unknown id."""
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if token in self._added_ids:
            return text.encode()
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[c] for c in text)
            except KeyError:
                return text.encode()
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace("▁", " ").encode()

    def tokens_from(self, token: int) -> list[str]:
        """The tokens whose ids are `token` and above, in order."""
        ids = {i: text for text, i in self._backend.get_vocab(with_added_tokens=True).items() if i >= token}
        return [ids[i] for i in sorted(ids)]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt of a conversation as text. Raises ChatTemplateError if there is no template, or it refuses the
        messages.
        """
        if self._template is None:
            raise ChatTemplateError(
                "the model has no chat template; use /v1/completions with a prompt in its own format"
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)


class Detokenizer:
    """Text of a stream of tokens, as it comes.

    What `push` and `flush` return, joined, is the decoded text of all tokens. `push` never returns part of a character:
    bytes that may be the start of one are held back until it is whole, or until `MAX_HELD` tokens show that it never
    will be.

    Only a window of the last tokens is decoded: those before the last clean cut, as context (a decoder may treat a
    text's first token in a way of its own), and those since.
    """

    MAX_HELD = 3  # a UTF-8 character has at most four bytes, and a token at least one
    _CONTEXT = 8  # tokens that are enough for the next ones to be decoded as in the whole text
    _MAX_WINDOW = 64  # tokens that never end on a whole character are forgotten from here on

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        """With `prompt`, the text is what follows the prompt's, leading space and all; without, a text of its own."""
        self._tokenizer = tokenizer
        self._window = [token for token in prompt[-self._CONTEXT :] if tokenizer.is_text(token)]
        self._clean = len(self._window)  # tokens of the window that are context
        while self._decode(self._window[: self._clean]).endswith(_REPLACEMENT):
            self._clean -= 1
        self._sent = len(self._decode(self._window[: self._clean]))  # characters of the window's text already returned
        self._held = 0  # tokens in a row after which the text ended within a character

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids) if ids else ""

    def push(self, token: int) -> str:
        """The text that `token` adds; "" for special tokens and for parts of a character."""
        if not self._tokenizer.is_text(token):
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        whole = len(text.rstrip(_REPLACEMENT))
        self._held = self._held + 1 if whole < len(text) else 0
        if self._held > self.MAX_HELD:
            whole = len(text) - 1  # those bytes will never be a character; the last one may yet start another
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
        """Forget the window's first `n` tokens; the last `unsent` characters of its text are still to be returned."""
        del self._window[:n]
        self._sent = len(self._decode(self._window)) - unsent

    def flush(self) -> str:
        """The rest, at the end of the stream: an unfinished character comes out as U+FFFD."""
        text = self._decode(self._window)[self._sent :]
        self._window, self._clean, self._sent = [], 0, 0
        return text


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise TokenizerError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _find_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template, by transformers' precedence: a file of its own, then tokenizer_config.json, then the
    processor's old file.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{directory}: the chat template is not a string")
    return template


def _token_text(token: str | Mapping[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token


def _added_token(token: str | Mapping[str, Any], *, special: bool | None = None) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, normalized=False, special=True)
    fields = {k: token[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in token}
    if special is not None:
        fields["special"] = special
    return AddedToken(token["content"], **fields)


def _uses(decoder: tokenizers.decoders.Decoder | None, kind: str) -> bool:
    """Whether a decoder, or a member of a sequence of them, is of `kind`."""
    return decoder is not None and f'"type":"{kind}"' in decoder.__getstate__().decode()


def _byte_level_alphabet() -> dict[str, int]:
    """The printable characters that byte-level BPE writes bytes as (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
