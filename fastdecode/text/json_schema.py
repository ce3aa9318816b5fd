"""What of a JSON schema llguidance can follow.

An annotation asks for nothing, so it is left out. Where a schema need not be followed strictly, everything else that
llguidance cannot follow is left out too, and the log says once what.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from fastdecode.text.log_once import log_once

log = logging.getLogger(__name__)

#: The formats that llguidance follows. JSON Schema lets a validator take `format` as an annotation.
_FORMATS = frozenset(
    {*("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")}
)
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
#: Keywords whose values are schemas by name, lists of schemas, and schemas or lists of them.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTED = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"})

#: Most characters of schemas that are tried one by one, and the characters that are read in the time of a short one.
_MOST_TRIED, _COST_OF_TRY = 1 << 23, 2000

_Keep = Callable[[str, Any], bool]
_ANY_OBJECT = {"type": "object"}


def without_annotations(schema: Any) -> Any:
    """The schema without formats that llguidance does not know, and without keywords that demand nothing."""

    def keep(keyword: str, value: Any) -> bool:
        if keyword == "propertyNames" and value in (True, {}, {"type": "string"}):  # as zod writes for a record
            return False
        if keyword == "uniqueItems" and value is False:
            return False
        if keyword != "format" or (isinstance(value, str) and value in _FORMATS):
            return True
        log_once(log, f"a JSON schema's format {json.dumps(value)[:80]} is an annotation here, which nothing checks")
        return False

    return _walk(schema, keep)


def arguments_schema(parameters: Any, *, strict: bool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object. Unless `strict`, llguidance can follow it.

    Raises RecursionError for a schema that is nested too deeply.
    """
    schema = without_annotations(parameters) if isinstance(parameters, Mapping) else {}
    kind = schema.get("type", "object")
    if kind == "object" or (isinstance(kind, list) and "object" in kind):
        schema = {**schema, "type": "object"}
    elif not strict:
        schema = _ANY_OBJECT
    return schema if strict else json.loads(_loosened(json.dumps(schema)))


def fault_of(schema: Mapping[str, Any], **options: Any) -> str | None:
    """Why llguidance cannot follow the schema; None: it can, or it is not installed. `options` are llguidance's."""
    try:
        from llguidance import LLMatcher
    except ImportError:
        return None
    try:
        source = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": options}))
        failed, messages = LLMatcher.validate_grammar_with_warnings(source)
    except (ValueError, RuntimeError) as error:
        return plain_reason(str(error))
    if failed:
        return plain_reason("; ".join(messages))
    for message in messages:
        log_once(log, f"of the parameters of a tool that is not strict: {plain_reason(message)}")
    return None


@lru_cache(64)
def _loosened(text: str) -> str:
    """A schema of arguments, as JSON, without what llguidance cannot follow."""
    schema = json.loads(text)
    if (reason := fault_of(schema, lenient=True)) is None:
        return text
    log_once(log, f"of the parameters of a tool that is not strict: {reason}")
    schema = _walk(schema, lambda keyword, value: _can_be_followed(keyword, value, schema))
    if fault_of(schema, lenient=True) is not None:
        alone = {name: value for name, value in schema.items() if name in ("$defs", "definitions")} | _ANY_OBJECT
        properties = schema.get("properties")
        named = properties if isinstance(properties, dict) else {}
        if len(named) * (len(json.dumps(alone)) + _COST_OF_TRY) > _MOST_TRIED:
            named = {}
        for name in named:
            if fault_of(alone | {"properties": {name: named[name]}, "required": [name]}, lenient=True) is not None:
                named[name] = True
    return json.dumps(schema if fault_of(schema, lenient=True) is None else _ANY_OBJECT)


def _walk(schema: Any, keep: _Keep) -> Any:
    """The schema without the keywords, at any depth, for whose name and value `keep` is false."""
    if not isinstance(schema, dict):
        return schema
    walked: dict[str, Any] = {}
    for keyword, value in schema.items():
        if not keep(keyword, value):
            continue
        if keyword in _NAMED and isinstance(value, dict):
            walked[keyword] = {
                name: _walk(inner, keep)
                for name, inner in value.items()
                if keyword != "patternProperties" or keep("pattern", name)
            }
        elif keyword in _LISTED | _SINGLE and isinstance(value, list):
            walked[keyword] = [_walk(inner, keep) for inner in value]
        else:
            walked[keyword] = _walk(value, keep) if keyword in _SINGLE else value
    return walked


def _can_be_followed(keyword: str, value: Any, root: dict[str, Any]) -> bool:
    match keyword:
        case "pattern":
            return fault_of({"type": "string", "pattern": value}) is None
        case "type":
            kinds = value if isinstance(value, list) else [value]
            return all(isinstance(kind, str) and kind in _TYPES for kind in kinds)
        case "$ref":
            return isinstance(value, str) and _is_within(value, root)
    return value is not None


def _is_within(ref: str, root: Any) -> bool:
    """Whether a `$ref` points into the schema (RFC 6901)."""
    base, _, pointer = ref.partition("#")
    if base or not pointer.startswith("/"):
        return not base
    for step in unquote(pointer).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and step.isdigit() and int(step) < len(root):
            root = root[int(step)]
        elif isinstance(root, dict) and step in root:
            root = root[step]
        else:
            return False
    return True


def plain_reason(message: str) -> str:
    """llguidance's message as one sentence, without the state of its parser and lines of the grammar that was made from
    the schema."""
    lines = message.partition("<state>")[0].split("failed to compile JSON schema: ")[-1].splitlines()
    text = "\n".join(line for line in lines if not re.match(r"\s*(\d+ \||\^+\s*$)", line))
    if found := re.match(r"Unimplemented keys: \[(.*)\]", text):
        return f"the keyword {found[1]} cannot be followed"
    if text.startswith("oneOf constraints are not supported"):
        return 'the keyword "oneOf" cannot be followed where two alternatives may hold at once; "anyOf" can'
    if text.startswith("oneOf not fully supported"):
        return 'the keyword "oneOf" is followed as "anyOf"'
    if found := re.match(r"regex parse error:\s*(.*)\s*error: (.*)", text):
        return f"the pattern {found[1]} cannot be followed: {found[2]}"
    if found := re.match(r"Resource '(.*?)' is not present", text):
        return f"the $ref {found[1]} is outside the schema"
    if found := re.match(r"Pointer '(.*?)' does not exist", text):
        return f"the $ref #{found[1]} points to nothing"
    if text.strip() == "NoExtensionBias":
        return "no text follows the grammar"
    return " ".join(text.split())[:500]
