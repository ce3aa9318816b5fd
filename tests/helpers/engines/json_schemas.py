"""JSON schemas in the shapes of the JSON Schema test suite, and a judge of answers that should follow them."""

from __future__ import annotations

import contextlib
import datetime
import json
from importlib import import_module
from typing import Any

#: Integers beyond it are not exact in JSON (RFC 7493, 2.2).
_EXACT = 2**53 - 1

#: The shapes of the JSON Schema test suite, each bounded so that a random model ends its answer.
SCHEMAS: dict[str, dict[str, Any]] = {
    "type integer": {"type": "integer", "minimum": -_EXACT, "maximum": _EXACT},
    "type several": {"type": ["boolean", "null"]},
    "bounds": {"type": "integer", "minimum": -3, "exclusiveMaximum": 120},
    "multipleOf": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    "string length": {"type": "string", "minLength": 1, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "format date": {"type": "string", "format": "date"},
    "format uuid": {"type": "string", "format": "uuid"},
    "enum": {"enum": ["red", 5, None, {"a": [1]}]},
    "const": {"const": {"kind": "x", "n": [1, 2]}},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "prefixItems": {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["a", "b"]}],
        "items": False,
        "minItems": 2,
    },
    "properties": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "anyOf": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 10, "maximum": 20}]},
    "oneOf": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 1, "maximum": 9}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 7}]},
    "ref": {
        "$defs": {"point": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "recursion": {
        "$defs": {
            "tree": {
                "anyOf": [{"type": "boolean"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}]
            }
        },
        "$ref": "#/$defs/tree",
    },
}


def fault(text: str, schema: dict[str, Any]) -> str | None:
    """Why `text` is not JSON that follows `schema`, by the package jsonschema; None if it does."""
    jsonschema = import_module("jsonschema")
    checker = jsonschema.FormatChecker()
    checker.checks("date")(_is_date)
    try:
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def _is_date(value: object) -> bool:
    """True if `value` is a full-date of RFC 3339, or no string.

    RFC 3339 has a year 0000, with the days of the year 2000. Python's dates, by which jsonschema judges, begin in the
    year 0001.
    """
    if not isinstance(value, str):
        return True
    with contextlib.suppress(ValueError):
        return len(datetime.date.fromisoformat(value.replace("0000-", "2000-", 1)).isoformat()) == len(value)
    return False
