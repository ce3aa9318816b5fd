"""Every field of every request is used, refused, or listed in docs/api.md as one that does nothing.

The parsers and the openai client name the fields. Values of many kinds are tried for each field: a used field changes
what the parser returns.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from fastdecode.api.anthropic import parse_message
from fastdecode.api.errors import ApiError
from fastdecode.api.fields import Fields
from fastdecode.api.protocol import parse_chat, parse_completion
from fastdecode.api.responses import parse_response

pytestmark = pytest.mark.quick

DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
#: For each kind of request: its parser, bodies that have its objects of options, and the client's names.
REQUESTS = {
    "completion": (
        parse_completion,
        {"prompt": "x", "max_tokens": 5, "stream": True, "stream_options": {}, "structured_outputs": {"regex": "x"}},
        CompletionParams.__annotations__,
    ),
    "chat": (
        parse_chat,
        {
            "messages": [USER],
            "tools": [TOOL],
            "stream": True,
            "stream_options": {},
            "logprobs": True,
            "response_format": {"type": "json_object"},
        },
        ChatParams.__annotations__,
    ),
    "response": (
        parse_response,
        {"input": "x", "tools": [{"type": "function", "name": "f"}], "reasoning": {}, "text": {}},
        ResponseParams.__annotations__,
    ),
    "message": (
        parse_message,
        {
            "messages": [USER],
            "max_tokens": 5,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "thinking": {"type": "adaptive"},
            "output_config": {},
            "tool_choice": {"type": "auto"},
        },
        {},
    ),
}
#: Values that ask for something, of every kind that a field of options may have.
VALUES = (
    *(True, False, 2, 0, 0.5, "low", "x", "f", "required", ["x"], [5], {"x": 1}, {"5": 2}, [{"x": 1}]),
    {"type": "json_object"},
    {"type": "object"},
    {"type": "any"},
    {"type": "disabled"},
    {"enable_thinking": False},
    {"format": {"type": "json_object"}},
    {"include_usage": True},
    {"regex": "y"},
    {"effort": "low"},
    [USER | {"content": "y"}],
    [],
)


def at(body, path, value):
    """The body with the value at a path such as a[].b, in the only entry of each list."""
    name, _, rest = path.partition(".")
    key = name.removesuffix("[]")
    if not rest:
        return body | {key: value}
    inner = body.get(key)
    return body | {key: [at(inner[0], rest, value)] if name.endswith("[]") else at(inner or {}, rest, value)}


def known(parse, body, monkeypatch):
    """The paths that a parser asks for, and for each the tests of values that ask for nothing."""
    names, neutral = set(), {}
    take, refuse_others = Fields.take, Fields.refuse_others

    def recorded(fields, name, *default):
        names.add(fields.param(name))
        return take(fields, name, *default)

    def refused(fields, passing=None, left_out=None):
        names.update(fields.param(name) for name in {**(passing or {}), **(left_out or {})})
        neutral.update({fields.param(name): test for name, test in (passing or {}).items()})
        refuse_others(fields, passing, left_out)

    monkeypatch.setattr(Fields, "take", recorded)
    monkeypatch.setattr(Fields, "refuse_others", refused)
    parse(dict(body))
    monkeypatch.undo()
    plain = {re.sub(r"\[\d+\]", "[]", name): test for name, test in neutral.items()}
    return {re.sub(r"\[\d+\]", "[]", name) for name in names}, plain


def listed():
    """The names that docs/api.md lists as labels, or as left out."""
    labels = next(line for line in DOCS.splitlines() if "labels: checked, otherwise unused" in line)
    left_out = DOCS.partition("### Fields that are left out\n")[2].partition("\n## ")[0]
    messages = DOCS.partition("\n## Messages\n")[2].partition("\n## ")[0]
    return set(re.findall(r"`([\w.]+)`", labels + left_out + messages))


def shown(parsed):
    """The parts of a parser's result that tests compare, without parts that only repeat the request."""
    fields = dataclasses.asdict(getattr(parsed, "chat", parsed))
    return fields | {"background": parsed.background} if hasattr(parsed, "background") else fields


@pytest.mark.parametrize(
    ("kind", "path", "hint"),
    [
        ("completion", "temprature", "; did you mean temperature?"),
        ("completion", "max_new_tokens", "; did you mean max_tokens?"),
        ("completion", "stream_options.include_useage", "; did you mean include_usage?"),
        ("chat", "tools[].function.paramters", "; did you mean parameters?"),
        ("chat", "moddalities", "; did you mean modalities?"),  # which may only have a value that asks for nothing
        ("response", "instruction", "; did you mean instructions?"),
        ("message", "stop_sequence", "; did you mean stop_sequences?"),
        ("completion", "input", ""),
        ("chat", "prompt", ""),
        ("completion", "temperature" * 100_000, ""),
    ],
    ids=lambda value: value[:40],
)
def test_an_unknown_field_is_refused_with_the_field_that_may_be_meant(kind, path, hint):
    parse, body, _ = REQUESTS[kind]
    with pytest.raises(ApiError) as refused:
        parse(at(body, path, "x"))
    assert refused.value.message.endswith(f": unknown field{hint}")
    assert refused.value.code == "unknown_field"


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_field_is_used_refused_or_listed(kind, monkeypatch):
    parse, body, names = REQUESTS[kind]
    found, neutral = known(parse, body, monkeypatch)
    plain = shown(parse(dict(body)))
    unexplained = {}
    for path in sorted(found | set(names)):
        try:
            at(body, path, None)
        except (LookupError, TypeError):
            continue  # a field of the chat that the body is translated into, and not of the body
        ignored = []
        for value in VALUES:
            if path in neutral and neutral[path](value):
                continue
            try:
                if shown(parse(at(body, path, value))) != plain:
                    break
                if value is not False and value != body.get(path):
                    ignored.append(value)
            except ApiError as error:
                assert error.status == 400
        else:
            if ignored and not {path, path.rpartition(".")[2]} & listed():
                unexplained[path] = ignored
    assert unexplained == {}
