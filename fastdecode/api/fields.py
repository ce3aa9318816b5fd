"""Reads the fields of a JSON object with types and ranges, and refuses unknown fields by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson

from fastdecode.api.errors import ApiError
from fastdecode.text.did_you_mean import did_you_mean
from fastdecode.text.log_once import log_once

log = logging.getLogger(__name__)

MAX_PARTS = 100_000  #: lists, objects and strings of a body, or of the JSON in a field
_SAFE_LEVELS = 200  # of nested lists and objects, which orjson can write in any answer
_Default = TypeVar("_Default")
#: Whether a value of a field passes.
Test = Callable[[Any], bool]
_NUMBER = re.compile(r"\[\d+\]")  # of an entry of a list, in a field's name


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """An ApiError with status 400 that names the field `param`; None: the body."""
    where = "the body" if param is None else f"{param}:"
    return ApiError(400, f"{where} {message}", param=param, code=code)


class Fields:
    """The fields of a JSON object. Each method reads one field once; `refuse_others` ends the reading.

    `prefix` is the object's name within the request, for example "messages[0]", or "" for the body. A field that is
    null counts as absent, as in OpenAI's API. All methods raise ApiError (400), which names the field.
    """

    def __init__(self, body: Any, prefix: str = ""):
        if not isinstance(body, dict):
            raise invalid(prefix or None, "must be a JSON object")
        self._left = dict(body)
        self._read: set[str] = set()  # names, of absent fields too
        self.prefix = prefix

    def param(self, name: str) -> str:
        """The name of a field within the request."""
        return f"{self.prefix}.{name}" if self.prefix else name

    def take(self, name: str, default: Any = None) -> Any:
        """The value as it is; `default` if the field is absent or null."""
        self._read.add(name)
        value = self._left.pop(name, None)
        return default if value is None else value

    def required(self, name: str) -> Any:
        """The value as it is; the field must be there."""
        if (value := self.take(name)) is None:
            raise invalid(self.param(name), "this field is required")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(self.param(name), "must be true or false")
        return value

    def integer(self, name: str, low: int, high: int, default: _Default) -> int | _Default:
        value: int | None = self.take(name)
        if value is None:
            return default
        if not is_integer(value):
            raise invalid(self.param(name), "must be an integer")
        if not low <= value <= high:
            raise invalid(self.param(name), f"must be between {low} and {high}, not {value}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if not is_integer(value) and not isinstance(value, float):
            raise invalid(self.param(name), "must be a number")
        if not low <= value <= high:
            raise invalid(self.param(name), f"must be between {low:g} and {high:g}, not {value:g}")
        return float(value)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise invalid(self.param(name), "must be a string")
        return value

    def required_string(self, name: str) -> str:
        """A string that must be there, and may be empty."""
        if (value := self.string(name)) is None:
            raise invalid(self.param(name), "this field is required")
        return value

    def object(self, name: str, default: Mapping[str, Any] | None = None) -> Fields:
        """The fields of an object; those of `default` if it is absent."""
        return Fields(self.take(name, default or {}), self.param(name))

    def required_object(self, name: str) -> Fields:
        """The fields of an object that must be there."""
        return Fields(self.required(name), self.param(name))

    def require_type(self, *known: str, kind: str) -> None:
        """Require the field `type` to be one of `known`; `kind` is what these stand for, in the plural."""
        if (value := self.required("type")) not in known:
            message = f"only {kind} are supported, not {value!r}"
            raise invalid(self.param("type"), message, code="unsupported_value")

    def refuse_others(
        self, neutral: Mapping[str, Test] | None = None, left_out: Mapping[str, Test] | None = None
    ) -> None:
        """Refuse all fields that have not been read, except those of which a test in `neutral` or `left_out` passes.
        The message for an unknown field names a known one that is spelt almost like it.

        Args:
            neutral: tests whether a value of a field that the API does not implement asks for nothing.
            left_out: tests whether a value is valid that asks for something which the field's specification lets a
                server leave out. The log names the field once.
        """
        neutral, left_out = neutral or {}, left_out or {}
        for name, value in self._left.items():
            param = self.param(name)
            if name not in neutral and name not in left_out:
                hint = did_you_mean(name, self._read | neutral.keys() | left_out.keys())
                raise invalid(param, f"unknown field{hint}", code="unknown_field")
            if value is None or (name in neutral and neutral[name](value)):
                continue
            if name not in left_out or not left_out[name](value):
                raise invalid(param, "this value is not supported here", code="unsupported_value")
            log_once(log, f"the field {_NUMBER.sub('[]', param)} has no effect here")


def read_objects(value: Any, param: str, what: str) -> list[Fields]:
    """The fields of each object of a list, whose name within the request is `param`. `what` the objects are, in the
    plural. Raises ApiError (400)."""
    if not isinstance(value, list):
        raise invalid(param, f"must be a list of {what}")
    return [Fields(entry, f"{param}[{i}]") for i, entry in enumerate(value)]


def read_texts(value: Any, param: str, *kinds: str, neutral: Mapping[str, Test] | None = None) -> list[str]:
    """The texts of a list of text parts, whose `type` is one of `kinds`; `neutral`: see Fields.refuse_others. Raises
    ApiError (400)."""
    texts = []
    for part in read_objects(value, param, "text parts"):
        part.require_type(*kinds, kind="text parts")
        texts.append(part.required_string("text"))
        part.refuse_others(neutral)
    return texts


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_object, value))


def is_string(value: Any) -> bool:
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_one_of(*allowed: Any) -> Test:
    """A test whether a value equals one of `allowed`; unlike in Python, true does not equal 1."""
    return lambda value: any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)


def decode_json(text: bytes, param: str | None = None) -> Any:
    """The JSON of the field `param`, or of the body. Raises ApiError (400).

    The GIL is held while JSON is decoded, which takes long for many lists and objects and not for long strings. JSON of
    too many is refused before; afterwards what is nested so deeply that an answer could not repeat it: orjson reads
    more levels than it writes.
    """
    if _has_many_parts(text):
        raise invalid(param, f"has more than {MAX_PARTS} lists, objects and strings", code="invalid_json")
    try:
        decoded = orjson.loads(text)
        if text.count(b"{") + text.count(b"[") > _SAFE_LEVELS:
            orjson.dumps([[[[decoded]]]])  # an answer has it within other objects
    except orjson.JSONDecodeError as error:
        raise invalid(param, f"is not valid JSON: {error}", code="invalid_json") from None
    except TypeError:
        raise invalid(param, "is nested too deeply", code="invalid_json") from None
    return decoded


def _has_many_parts(text: bytes) -> bool:
    """Whether JSON has more than MAX_PARTS lists, objects and strings. Brackets within strings are none."""
    if sum(map(text.count, (b'"', b"[", b"{"))) <= MAX_PARTS:
        return False
    text = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is escaped ends no string
    n_strings = text.count(b'"') // 2
    if n_strings > MAX_PARTS:
        return True
    outside = b"".join(text.split(b'"')[::2])
    return n_strings + outside.count(b"[") + outside.count(b"{") > MAX_PARTS
