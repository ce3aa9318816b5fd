"""Pieces of grammars of tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from fastdecode.text.grammar import JSON_WHITE_SPACE, GrammarError, GrammarSpec, check_length
from fastdecode.text.json_schema import arguments_schema, fault_of, without_annotations
from fastdecode.text.output.deltas import Tool


def arguments_rule(name: str, tool: Tool) -> str:
    """A rule for the arguments of `tool`, which are an object. What llguidance cannot follow of the parameters is not
    followed; of a strict tool it raises GrammarError."""
    options = {"whitespace_pattern": JSON_WHITE_SPACE, "lenient": not tool.strict}
    try:
        check_length(json.dumps(tool.parameters), tool.param)
        schema = arguments_schema(tool.parameters, strict=tool.strict)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply", tool.param) from None
    if tool.strict:
        if schema.get("type") != "object":
            raise GrammarError('the "type" of parameters must be "object"', tool.param)
        if (reason := fault_of(schema, **options)) is not None:
            raise GrammarError(f"a strict tool's schema must be followed as a whole, but {reason}", tool.param)
    return f"{name}: %json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def rules(tools: Sequence[Tool], call: Callable[[str, str], str]) -> list[str]:
    """The rule `call`, which is one call of any tool; `call(name, arguments)` writes it from a name and a rule."""
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        lines += [f"call_{i}: {call(tool.name, f'args_{i}')}", arguments_rule(f"args_{i}", tool)]
    return lines


def behind(opening: str, calls: str) -> str:
    """A grammar of texts that follow the rule `calls` from their first `opening` on. A text without it may be any text.

    `calls` has that rule and those it needs.
    """
    any_text = r"/(.|\n)*/"
    return "\n".join(
        [
            "start: PLAIN | OPENED calls",
            f"PLAIN: {any_text} & ~({any_text} {text(opening)} {any_text})",
            f"OPENED: PLAIN {text(opening)}",
            calls,
        ]
    )


def text(value: str) -> str:
    """A text as it stands in a grammar."""
    return json.dumps(value, ensure_ascii=False)


def json_call(key: str) -> Callable[[str, str], str]:
    """The writer of a call as a JSON object, {"name": ..., KEY: ...}."""
    return lambda name, arguments: text(f'{{"name": {json.dumps(name)}, "{key}": ') + f' {arguments} "}}"'


def answer_rule(spec: GrammarSpec) -> str:
    """The rule `answer`: a text that follows `spec`. Raises GrammarError for a Lark grammar, which has rules of its
    own."""
    match spec.kind:
        case "json_schema":
            schema = without_annotations(json.loads(spec.text))
            schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
            options = {"whitespace_pattern": spec.white_space} if spec.white_space else {"whitespace_flexible": False}
            return f"answer: %json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"
        case "regex":
            escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", spec.text, flags=re.DOTALL)
            return f"answer: /{escaped}/"
        case "choice":
            return "answer: " + " | ".join(text(choice) for choice in json.loads(spec.text))
    raise GrammarError("a grammar of its own rules cannot be combined with this model's form of messages or with tools")
