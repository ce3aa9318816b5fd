"""What of a tool's schema is followed, judged by llguidance's own matcher and by jsonschema."""

from __future__ import annotations

import json
import logging
import time

import pytest

from fastdecode.text.grammar import GrammarError
from fastdecode.text.json_schema import arguments_schema, without_annotations
from fastdecode.text.output.deltas import Tool
from fastdecode.text.output.lark import arguments_rule

llguidance = pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.quick


def allows(rule, text):
    """Whether the rule `args` is that of `text`, by llguidance."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(f"start: args\n{rule}"))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def with_property(schema, **others):
    return {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}, "required": ["a", "b"], **others}


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"properties": {"x": {"type": "string"}}},
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "array"}, {"properties": {"x": {"type": "string"}}}]},
        {"$ref": "#/$defs/d", "$defs": {"d": {"properties": {"x": {"type": "string"}}}}},
        {"title": "T", "description": "d", "$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"type": "array"},
        {"type": "strin"},
        {"type": {}},
        {"enum": [1, 2]},
    ],
    ids=str,
)
def test_arguments_are_an_object_whatever_the_parameters_say(parameters):
    rule = arguments_rule("args", Tool("f", parameters))
    assert allows(rule, '{"x": "1"}')
    for text in ("[]", "1", '"x"', "null", '[{"x": "1"}]'):
        assert not allows(rule, text)


#: Parts of a schema that llguidance cannot follow.
HARD = [
    {"type": "string", "pattern": "^(?=.*[0-9]).+$"},
    {"type": "string", "pattern": r"(a)\1"},
    {"type": "string", "pattern": r"\bx\b"},
    {"type": "string", "pattern": "[unclosed"},
    {"type": "string", "pattern": 5},
    {"$ref": "https://example.com/town.json"},
    {"$ref": "#/$defs/nowhere"},
    {"$ref": 5},
    {"type": "string", "format": "password"},
    {"type": "string", "format": 5},
    {"type": "integer", "format": "int64"},
    {"not": {"type": "integer"}},
    {"type": "array", "uniqueItems": True, "contains": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 1}},
    {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 9}]},
    {"type": "object", "propertyNames": {"pattern": "^(?!x)"}, "patternProperties": {"^(?=x)": {"type": "string"}}},
    {"type": "object", "properties": None, "required": None},
    {"type": "any"},
    {"type": "string", "nullable": True, "example": "x", "x-order": 1},
    {"anyOf": [{"type": "string", "pattern": "(?<=x)y"}, {"type": "null"}]},
    {"type": "array", "items": {"type": "string", "pattern": "(?!x)"}},
    {"enum": []},
    {"type": "string", "minLength": 5, "maxLength": 2},
]


@pytest.mark.parametrize("part", HARD, ids=str)
def test_what_cannot_be_followed_of_a_tool_that_is_not_strict_is_left_out_alone(part):
    rule = arguments_rule("args", Tool("f", with_property(part, additionalProperties=False)))
    values = ("null", '"x"', '"1x"', "{}", "[]", "7", '["y"]')
    assert any(allows(rule, f'{{"a": {value}, "b": 1}}') for value in values)
    assert not any(allows(rule, f'{{"a": {value}, "b": "1"}}') for value in values)
    assert not any(allows(rule, f'{{"a": {value}, "b": 1, "c": 1}}') for value in values)


def test_the_log_says_once_what_is_not_followed(caplog):
    caplog.set_level(logging.INFO, "fastdecode.text.json_schema")
    for _ in range(2):
        arguments_rule("args", Tool("f", with_property({"type": "string", "pattern": "^(?=once).$"})))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1 and "the pattern ^(?=once).$ cannot be followed: look-around" in lines[0]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "string", "pattern": "^(?=x)"}, "the pattern ^(?=x) cannot be followed: look-around"),
        ({"$ref": "https://example.com/town.json"}, "the $ref https://example.com/town.json is outside the schema"),
        ({"$ref": "#/$defs/nowhere"}, "the $ref #/$defs/nowhere points to nothing"),
        ({"not": {}}, 'the keyword "not" cannot be followed'),
        ({"oneOf": [{"type": "string"}, {"maxLength": 9}]}, '"oneOf" cannot be followed'),
        ({"type": "any"}, "Invalid type: any"),
    ],
    ids=str,
)
def test_a_strict_tool_is_refused_in_one_sentence_that_names_the_field(part, says):
    with pytest.raises(GrammarError) as caught:
        arguments_rule("args", Tool("f", with_property(part), strict=True, param="tools[2].function.parameters"))
    message = str(caught.value)
    assert says in message and caught.value.param == "tools[2].function.parameters"
    assert not any(inner in message for inner in ("\n", "%json", "x-guidance", "args", "at 1("))


def test_a_strict_tool_whose_parameters_are_no_object_is_refused():
    with pytest.raises(GrammarError, match='"type" of parameters must be "object"'):
        arguments_rule("args", Tool("f", {"type": "array"}, strict=True))


@pytest.mark.parametrize("form", ["password", "binary", "uri-reference", "my-own", 5, {}])
def test_an_unknown_format_is_an_annotation_of_strict_tools_too(form):
    schema = with_property({"type": "string", "format": form})
    rule = arguments_rule("args", Tool("f", schema, strict=True))
    assert allows(rule, '{"a": "x", "b": 1}') and not allows(rule, '{"a": 1, "b": 1}')


def test_properties_and_values_that_are_called_like_keywords_stay():
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "x"}, "pattern": {"const": {"format": "y"}}},
        "default": {"format": "z"},
    }
    expected = json.loads(json.dumps(schema))
    del expected["properties"]["format"]["format"]
    assert without_annotations(schema) == expected


def test_a_schema_that_can_be_followed_stays_as_it_is():
    schema = with_property({"type": "string", "pattern": "^x", "title": "A"}, **{"$defs": {"d": {"type": "null"}}})
    assert arguments_schema(schema, strict=False) == arguments_schema(schema, strict=True) == schema


def test_a_schema_nested_too_deeply_is_refused():
    schema = {}
    for _ in range(3000):
        schema = {"properties": {"a": schema}}
    for strict in (True, False):
        with pytest.raises(GrammarError, match="too deeply"):
            arguments_rule("args", Tool("f", schema, strict))


def test_what_takes_long_to_loosen_is_any_object():
    """One thread prepares the requests of all clients. The properties below were compiled one by one, each with all
    definitions."""
    n = 1400
    definitions = {f"d{i}": {"type": "object", "properties": {"a": {"type": "string"}}} for i in range(n)}
    wrong = {f"p{i}": {"minLength": "x", "anyOf": [{"$ref": f"#/$defs/d{i}"}]} for i in range(n)}
    begin = time.thread_time()
    rule = arguments_rule("args", Tool("f", {"$defs": definitions, "properties": wrong}))
    assert time.thread_time() - begin < 3
    assert allows(rule, '{"x": 1}') and not allows(rule, "[]")


@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_that_is_too_long_is_refused_before_it_is_compiled(strict, monkeypatch):
    monkeypatch.setattr("fastdecode.text.output.lark.arguments_schema", lambda *_, **__: pytest.fail("it is too long"))
    parameters = {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}
    with pytest.raises(GrammarError, match="longer than 262144 characters") as caught:
        arguments_rule("args", Tool("f", parameters, strict, "tools[0].function.parameters"))
    assert caught.value.param == "tools[0].function.parameters"
