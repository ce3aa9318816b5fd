"""Fields that ask for structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import orjson

from fastdecode.api.errors import ApiError
from fastdecode.api.fields import Fields, decode_json, invalid, is_boolean, is_one_of
from fastdecode.text.grammar import GrammarSpec, Kind

_ANY_OBJECT = '{"type":"object"}'
_BACKENDS = ("auto", "guidance", "llguidance")
_KINDS = ("json", "json_object", "regex", "choice", "grammar")  # of vLLM's constraints


@dataclass(frozen=True, slots=True)
class GrammarField:
    """A grammar and the request's field that asks for it."""

    param: str
    spec: GrammarSpec


def grammar_error(param: str, message: str, *, unavailable: bool = False) -> ApiError:
    """The answer (400) to a grammar that cannot be used, which the field `param` asks for. `unavailable`: this server
    can use no grammar."""
    return invalid(param, message, code="unsupported_value" if unavailable else "invalid_grammar")


def read_grammar(fields: Fields) -> GrammarField | None:
    """Read the fields that ask for structured output; at most one of them may. Raises ApiError (400)."""
    white_space = _white_space(fields, "guided_whitespace_pattern", "guided_decoding_disable_any_whitespace")
    backend = fields.string("guided_decoding_backend")
    if backend is not None and backend not in _BACKENDS:
        raise invalid("guided_decoding_backend", f"must be one of {', '.join(_BACKENDS)}", code="unsupported_value")
    found = [_response_format(fields)]
    found += [_constraint(fields, f"guided_{kind}", kind) for kind in _KINDS]
    if (nested := fields.take("structured_outputs")) is not None:
        inner = Fields(nested, "structured_outputs")
        if (nested_space := _white_space(inner, "whitespace_pattern", "disable_any_whitespace")) is not None:
            white_space = nested_space
        found += [_constraint(inner, kind, kind) for kind in _KINDS]
        inner.refuse_others(
            {
                "structural_tag": is_one_of(),
                "disable_fallback": is_boolean,
                "disable_additional_properties": is_one_of(False),
            }
        )
    given = [field for field in found if field is not None]
    if len(given) > 1:
        raise invalid(given[1].param, f"a request has one grammar, and {given[0].param} gives it already")
    if not given or white_space is None:
        return given[0] if given else None
    return replace(given[0], spec=replace(given[0].spec, white_space=white_space))


def _response_format(fields: Fields) -> GrammarField | None:
    value = fields.take("response_format")
    if value is None:
        return None
    inner = Fields(value, "response_format")
    kind = inner.required("type")
    field: GrammarField | None = None
    if kind == "json_object":
        field = GrammarField("response_format", GrammarSpec("json_schema", _ANY_OBJECT))
    elif kind == "json_schema":
        param = "response_format.json_schema"
        schema = inner.required_object("json_schema")
        for name in ("name", "description"):
            schema.string(name)
        schema.boolean("strict")  # every schema is followed strictly
        field = GrammarField(f"{param}.schema", GrammarSpec("json_schema", _json(schema, "schema") or _ANY_OBJECT))
        schema.refuse_others()
    elif kind != "text":
        raise invalid(
            inner.param("type"), f"must be text, json_object or json_schema, not {kind!r}", code="unsupported_value"
        )
    inner.refuse_others()
    return field


def _constraint(fields: Fields, name: str, kind: str) -> GrammarField | None:
    """Read one of vLLM's fields; `kind` is one of _KINDS."""
    form: Kind
    match kind:
        case "json":
            form, text = "json_schema", _json(fields, name)
        case "json_object":
            form, text = "json_schema", _ANY_OBJECT if fields.boolean(name) else None
        case "regex":
            form, text = "regex", fields.string(name)
        case "choice":
            form, text = "choice", _choice(fields, name)
        case _:
            form, text = "lark", fields.string(name)
    return None if text is None else GrammarField(fields.param(name), GrammarSpec(form, text))


def _choice(fields: Fields, name: str) -> str | None:
    choices = fields.take(name)
    if choices is None:
        return None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise invalid(fields.param(name), "must be a list of at least one string, and no string may be empty")
    return orjson.dumps(choices).decode()


def _json(fields: Fields, name: str) -> str | None:
    """A JSON schema as text: a JSON object, true or false, or a string that holds one of them."""
    value: Any = fields.take(name)
    if isinstance(value, str):
        value = decode_json(value.encode(), fields.param(name))
    if value is None:
        return None
    if value is True:
        value = {}
    if not isinstance(value, dict | bool):
        raise invalid(fields.param(name), "must be a JSON schema: an object")
    return orjson.dumps(value).decode()


def _white_space(fields: Fields, pattern: str, disable: str) -> str | None:
    """The white space that a request asks for, a regular expression; "": none; None: the request does not say."""
    text = fields.string(pattern)
    return "" if fields.boolean(disable) else text
