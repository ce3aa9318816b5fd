"""Typed, exhaustive reading of a JSON object: every field is read with a type and a range, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastdecode.api.errors import ApiError


def invalid(param: str, message: str, *, code: str | None = None) -> ApiError:
    """The 400 that names a field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


class Fields:
    """The fields of one JSON object, each to be taken once. A field that is null counts as absent, as in OpenAI's API.

    `prefix` is the object's own name within the request ("messages[0]"), "" at the top.
    """

    def __init__(self, body: Any, prefix: str = ""):
        if not isinstance(body, dict):
            where = prefix or "the body"
            raise ApiError(400, f"{where} must be a JSON object", param=prefix or None)
        self._left = dict(body)
        self._prefix = prefix + "." if prefix else ""

    def param(self, name: str) -> str:
        return self._prefix + name

    def take(self, name: str) -> Any:
        """The raw value; None if absent or null."""
        return self._left.pop(name, None)

    def required(self, name: str) -> Any:
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

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        value = self.take(name)
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

    def end(self, neutral: Mapping[str, Callable[[Any], bool]]) -> None:
        """Refuse what was not taken, except fields of `neutral` whose value asks for nothing."""
        for name, value in self._left.items():
            if name not in neutral:
                raise invalid(self.param(name), "unknown field", code="unknown_field")
            if value is not None and not neutral[name](value):
                raise invalid(self.param(name), "this value is not supported here", code="unsupported_value")


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_one_of(*allowed: Any) -> Callable[[Any], bool]:
    """A test for equality with one of `allowed`, where true is not 1."""
    return lambda value: any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)
