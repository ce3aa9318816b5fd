"""Text to token ids and back, from the tokenizer files of a Hugging Face model directory, without transformers.

A Tokenizer encodes, decodes and renders chats exactly as transformers does with the same files. A Detokenizer turns a
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

from fastdecode.gguf.file import GGUFError, ModelSource, pointer_fault
from fastdecode.text.chat_template import ChatTemplate, ChatTemplateError
from fastdecode.text.gguf_tokenizer import GGUFTokenizerError, read_tokenizer

_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: The names of the chat templates that are used.
_TEMPLATES = frozenset({"default", "tool_use"})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(ValueError):
    """A file of the tokenizer is missing or broken; the message names the file."""


class Tokenizer:
    """A model's tokenizer."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        templates: Mapping[str, str] | None = None,
        files: Mapping[str, Path] | None = None,
    ):
        """`config` is the content of tokenizer_config.json; `templates` are the Jinja chat templates by name, `files`
        the files that have them.

        Raises ChatTemplateError for a template that is not valid Jinja; TypeError, ValueError, KeyError or
        AttributeError for a broken `config`.
        """
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self._named = {name: text for name in _NAMED_SPECIALS if (text := _token_text(config.get(name))) is not None}
        self._add_special_tokens(config)
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        names = [re.escape(token.content) for token in backend.get_added_tokens_decoder().values() if token.special]
        self._special_names = re.compile("|".join(names) or r"(?!)")
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self._byte_level = _uses(backend.decoder, "ByteLevel")
        self._bytes: dict[int, bytes] = {}  # of the tokens that token_bytes was asked for
        #: For ByteDetokenizer: the texts of tokens that are whole characters, and that every request shows.
        self.whole_texts: dict[int, str] = {}
        #: Whether a text is the bytes of its tokens, one after another; if not, a token's text depends on its place.
        self.is_bytewise = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        templates, files = templates or {}, files or {}
        self._template_names = sorted(templates)
        self._templates = {
            name: ChatTemplate(templates[name], self._named, files.get(name)) for name in _TEMPLATES & templates.keys()
        }
        self._shrink = _shrink(backend) if self._byte_level else None
        self._longest_token = max(len(text.encode()) for text in backend.get_vocab(with_added_tokens=True))

    @classmethod
    def from_dir(cls, model: str | Path | ModelSource, *, chat_template: str | None = None) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat templates of a directory, or a GGUF file's metadata.
        `chat_template` replaces all of the model's own.

        Raises TokenizerError, and ChatTemplateError for a template that is not valid Jinja.
        """
        own = {"default": chat_template} if chat_template else None
        try:
            source = ModelSource.open(model)
        except GGUFError as error:
            raise TokenizerError(str(error)) from None
        if source.gguf is not None:
            path = source.gguf.path
            try:
                backend, config, templates = read_tokenizer(source.gguf)
                files = {} if own else dict.fromkeys(templates, path)
                return cls(backend, config, own or templates, files)._tried(path)
            except GGUFTokenizerError as error:
                raise TokenizerError(str(error)) from None
            except (TokenizerError, ChatTemplateError):
                raise
            except Exception as error:  # the Rust library raises a plain Exception
                raise TokenizerError(f"the tokenizer in {path} cannot be read: {error}") from None
        directory = source.path
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{directory} has no tokenizer.json, which a model needs beside its weights; for a model with another "
                "tokenizer file, save_pretrained of transformers' AutoTokenizer writes one"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises a plain Exception
            raise TokenizerError(pointer_fault(path) or f"{path}: {error}") from None
        config = _read_json(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # older models have the named tokens in a separate file
            config = config | _read_json(directory / "special_tokens_map.json")
        try:
            templates, files = (own, {}) if own else _find_templates(directory, config)
            return cls(backend, config, templates, files)._tried(path)
        except (TokenizerError, ChatTemplateError):
            raise
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise TokenizerError(f"{directory / 'tokenizer_config.json'} cannot be read: {error!r}") from None

    def _tried(self, path: Path) -> Tokenizer:
        """The tokenizer, which has encoded a text. Raises TokenizerError, with the file `path`, if it cannot."""
        try:
            self.encode("A text.")
        except BaseException as error:
            # A panic of the Rust library is no Exception, and its class cannot be imported.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TokenizerError(f"{path}: the tokenizer cannot encode a text: {error}") from None
        return self

    def _add_special_tokens(self, config: Mapping[str, Any]) -> None:
        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        listed = config.get("added_tokens_decoder") or {}
        if not isinstance(listed, Mapping):
            raise TypeError(f"'added_tokens_decoder' is {listed!r}, not an object")
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
        """Token ids of `text`, with the special tokens that the post processor in tokenizer.json adds.

        The name of a special token in the text becomes that token, as with all tokenizers of this kind.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text. Other threads run meanwhile: unlike `encode`, the library's `encode_batch` lets go of
        the GIL."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, found without encoding it; 0 if nothing can be said."""
        if self._shrink is None:
            return 0
        return len(text.encode(errors="surrogatepass")) // (self._shrink * self._longest_token)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. An id that the tokenizer does not know (models pad their vocabulary) has no text."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def is_special(self, token: int) -> bool:
        """Whether the token is a special one, which a decoded text leaves out by default."""
        return token in self._special_ids

    def has_special(self, text: str) -> bool:
        """Whether the name of a special token is in the text."""
        return self._special_names.search(text) is not None

    def is_added(self, token: int) -> bool:
        """Whether the token is written out in the text as a whole, and not found by the model of the tokenizer."""
        return token in self._added_ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token anywhere but at the start of a text; b"" for an unknown id."""
        if (known := self._bytes.get(token)) is not None:
            return known
        if (text := self.token_text(token)) is None:
            return b""
        found = self._bytes[token] = self._bytes_of(token, text)
        return found

    def _bytes_of(self, token: int, text: str) -> bytes:
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

    def token_text(self, token: int) -> str | None:
        """The token as tokenizer.json writes it; None for an unknown id."""
        text: str | None = self._backend.id_to_token(token)
        return text

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written `text` in tokenizer.json; None if there is none."""
        token: int | None = self._backend.token_to_id(text)
        return token

    @property
    def eos_token_id(self) -> int | None:
        """The id of tokenizer_config.json's eos_token; None if there is none."""
        return self.token_id(self._named["eos_token"]) if "eos_token" in self._named else None

    def to_json(self) -> str:
        """The tokenizer in the format of tokenizer.json, with the special tokens of tokenizer_config.json."""
        return str(self._backend.to_str())

    def tokens_from(self, token: int) -> list[str]:
        """The texts of all tokens with ids >= `token`, in the order of their ids."""
        ids = {i: text for text, i in self._backend.get_vocab(with_added_tokens=True).items() if i >= token}
        return [ids[i] for i in sorted(ids)]

    def template_source(self, *, tools: bool = False) -> str:
        """The chat template of chats with or without tools; "" if there is none."""
        template = self._template(tools=tools)
        return "" if template is None else template.source

    def _template(self, *, tools: bool) -> ChatTemplate | None:
        """As transformers chooses: with tools the template named tool_use, if there is one; else the one named
        default."""
        found = self._templates.get("tool_use") if tools else None
        return found or self._templates.get("default")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation as text, to be encoded without `add_special_tokens`: the template writes them.

        `kwargs` are those of ChatTemplate.render. Raises ChatTemplateError if there is no template, or if it refuses
        the messages.
        """
        if (template := self._template(tools=bool(tools))) is not None:
            return template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        if self._template_names:
            names = ", ".join(self._template_names)
            raise ChatTemplateError(f"the model has no chat template named default; its templates are named {names}")
        raise ChatTemplateError(
            "the model has no chat template; use /v1/completions with a prompt in its own format, or start the node "
            "with --chat-template FILE"
        )


def _shrink(backend: tokenizers.Tokenizer) -> int | None:
    """How many times shorter, in bytes, a text may become before a byte-level model cuts it into tokens; None if a part
    of any length may become a single token or none."""
    tokens = backend.get_added_tokens_decoder().values()
    if backend.model.unk_token is not None or any(token.lstrip or token.rstrip for token in tokens):
        return None
    match backend.normalizer:
        case None:
            return 1
        case tokenizers.normalizers.NFC():
            return 3  # three Hangul jamo of 3 bytes each become one syllable of 3 bytes
    return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise TokenizerError(pointer_fault(path) or f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _find_templates(directory: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Path]]:
    """The chat templates by name and their files, from where transformers looks for them, in the same order.

    The places are chat_template.jinja with additional_chat_templates/NAME.jinja, tokenizer_config.json and
    chat_template.json.
    """
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (path := directory / "chat_template.jinja").is_file():
        files["default"] = path
    templates = {name: _read_text(path) for name, path in files.items()}
    if "default" in templates:
        return templates, files
    path = directory / "tokenizer_config.json"
    if not (found := config.get("chat_template")):
        path = directory / "chat_template.json"
        found = _read_json(path).get("chat_template") or {}
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, str):
        found = {"default": found}
    if not isinstance(found, dict) or not all(isinstance(template, str) for template in found.values()):
        raise TokenizerError(f"{path}: the chat template is not a string")
    return found | templates, dict.fromkeys(found, path) | files


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error}") from None


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
    """Whether a decoder, or one of the decoders in a sequence of decoders, is of this kind."""
    return decoder is not None and f'"type":"{kind}"' in decoder.__getstate__().decode()


def _byte_level_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level BPE, character -> byte (GPT-2's bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
