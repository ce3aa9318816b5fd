"""Structured output through the real server: every completed answer follows its schema, judged by `jsonschema`."""

from __future__ import annotations

import asyncio
import json
import re
import sys

import numpy as np
import openai
import pytest
from engines.api_client import MODEL
from engines.json_schemas import SCHEMAS, fault

from fastdecode.engine.state.request import SamplingParams
from fastdecode.service.client import Request
from fastdecode.service.local import LocalEngine
from fastdecode.text.grammar import GrammarCompiler, GrammarSpec, LLGrammarState

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

PER_SCHEMA = 8
ASK = {"model": MODEL, "prompt": "Answer: ", "max_tokens": 200}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Answer."}], "max_completion_tokens": 200}


def response_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def valid(text, schema):
    assert fault(text, schema) is None


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "text", "follows"),
    [
        ("format date", '"2023-02-28"', True),
        ("format date", '"0000-02-29"', True),
        ("format date", '"2023-02-29"', False),
        ("format date", '"20230228"', False),
        ("bounds", "119", True),
        ("bounds", "120", False),
        ("enum", '"gre', False),
    ],
)
def test_judge(name, text, follows):
    assert (fault(text, SCHEMAS[name]) is None) == follows


async def test_every_completed_answer_follows_its_schema(client):
    """Requests of all schemas run at once, with a model whose weights are random."""

    async def ask(name, seed):
        answer = await client.openai.chat.completions.create(
            **CHAT, response_format=response_format(SCHEMAS[name]), seed=seed
        )
        return name, answer.choices[0]

    completed = dict.fromkeys(SCHEMAS, 0)
    asks = [ask(name, seed) for seed in range(PER_SCHEMA) for name in SCHEMAS]
    for name, choice in await asyncio.gather(*asks):
        if choice.finish_reason == "stop":
            valid(choice.message.content, SCHEMAS[name])
            completed[name] += 1
    assert len(SCHEMAS) == 20
    assert all(completed.values()), completed


@pytest.mark.quick
async def test_one_batch_may_mix_answers_with_and_without_a_schema(client):
    """A sequence without a mask draws the same tokens beside sequences with one."""
    free = ASK | {"seed": 3, "max_tokens": 40}
    alone = (await client.openai.completions.create(**free)).choices[0].text
    bound = ASK | {"n": 4, "extra_body": {"guided_json": SCHEMAS["properties"]}}
    answers = await asyncio.gather(*(client.openai.completions.create(**ask) for ask in (bound, free, bound, free)))
    assert [answers[i].choices[0].text for i in (1, 3)] == [alone, alone]
    for choice in answers[0].choices + answers[2].choices:
        assert choice.finish_reason == "stop"
        valid(choice.text, SCHEMAS["properties"])


async def test_json_object(client):
    completed = 0
    for seed in range(6):
        answer = await client.openai.chat.completions.create(
            **CHAT | {"max_completion_tokens": 400}, response_format={"type": "json_object"}, seed=seed
        )
        text = answer.choices[0].message.content
        assert text.lstrip().startswith("{")
        if answer.choices[0].finish_reason == "stop":
            completed += isinstance(json.loads(text), dict)
    assert completed


@pytest.mark.quick
@pytest.mark.parametrize("nested", [False, True], ids=["guided", "structured_outputs"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("kind", "value", "judge"),
    [
        ("json", SCHEMAS["ref"], lambda text: valid(text, SCHEMAS["ref"]) is None),
        ("json", json.dumps(SCHEMAS["enum"]), lambda text: valid(text, SCHEMAS["enum"]) is None),
        ("regex", "(ab|c){2,5}-[0-9]", lambda text: re.fullmatch("(ab|c){2,5}-[0-9]", text)),
        ("choice", ["yes", 'no "really"', "möglich"], lambda text: text in ("yes", 'no "really"', "möglich")),
        ("grammar", 'start: "x" num\nnum: /[0-9]{1,4}/', lambda text: re.fullmatch("x[0-9]{1,4}", text)),
        ("grammar", 'root ::= "x" ("y" | "z")', lambda text: text in ("xy", "xz")),
    ],
    ids=["json", "json-text", "regex", "choice", "lark", "gbnf"],
)
async def test_vllms_fields(client, nested, streamed, kind, value, judge):
    extra = {"structured_outputs": {kind: value}} if nested else {f"guided_{kind}": value}
    answer = await client.openai.completions.create(**ASK, seed=1, extra_body=extra, stream=streamed)
    if streamed:
        chunks = [chunk.choices[0] async for chunk in answer]
        text, reason = "".join(choice.text for choice in chunks), chunks[-1].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert reason == "stop"
    assert judge(text), text


async def test_white_space_is_bounded_and_can_be_switched_off(client):
    schema = SCHEMAS["properties"]
    spaced = await client.openai.completions.create(**ASK, n=8, seed=1, extra_body={"guided_json": schema})
    runs = {run for choice in spaced.choices for run in re.findall(r"\s+", choice.text)}
    assert runs and all(re.fullmatch(r" |\r?\n[ \t]{0,32}", run) for run in runs)
    extra = {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    tight = await client.openai.completions.create(**ASK, n=8, seed=1, extra_body=extra)
    for choice in tight.choices:
        assert choice.text == json.dumps(json.loads(choice.text), separators=(",", ":"))


async def test_a_grammar_ends_an_answer_that_ignores_the_end_token(client):
    answer = await client.openai.completions.create(
        **ASK, extra_body={"guided_choice": ["abc"], "ignore_eos": True, "min_tokens": 150}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": response_format({"type": "strin"})}, "response_format.json_schema.schema", "strin"),
        (
            {"response_format": response_format({"not": {"type": "string"}})},
            "response_format.json_schema.schema",
            "not",
        ),
        ({"response_format": response_format({"$ref": "#/nowhere"})}, "response_format.json_schema.schema", "nowhere"),
        ({"response_format": response_format(5)}, "response_format.json_schema.schema", "object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        ({"response_format": {"type": "json_object", "extra": 1}}, "response_format.extra", "unknown"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_regex": "a("}, "guided_regex", "unclosed"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": "yes"}, "guided_choice", "list"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        *(
            ({"guided_grammar": text}, "guided_grammar", "")
            for text in ("hello", 'root ::= "a" | (', "root ::= foo", 'rt ::= "a"', "")
        ),
        ({"guided_json": {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}}, "guided_json", ""),
        pytest.param({"guided_json": '{"a":' * 300 + "1" + "}" * 300}, "guided_json", "deep", id="deep"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex", ""),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "longer"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "guidance"),
    ],
    ids=str,
)
async def test_a_bad_grammar_is_a_400_that_says_why(client, fields, param, says):
    for path, ask in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
        status, body = await client.post(path, ask | fields)
        assert (status, body["error"]["param"]) == (400, param), body
        assert says in body["error"]["message"]


@pytest.mark.quick
async def test_a_grammar_that_turns_out_too_large_is_a_400_that_says_why(client):
    """llguidance finds it while the text is generated."""
    properties = {f"property_{i}": {"type": "integer"} for i in range(700)}
    ask = ASK | {"guided_json": {"type": "object", "properties": properties, "additionalProperties": False}}
    status, body = await client.post("/v1/completions", ask)
    assert (status, body["error"]["code"]) == (400, "invalid_value")
    assert "2000" in body["error"]["message"]


@pytest.mark.quick
async def test_two_thousand_choices(client):
    choices = [f"city_{i}" for i in range(2000)]
    status, body = await client.post("/v1/completions", ASK | {"guided_choice": choices})
    assert status == 200, body
    assert body["choices"][0]["text"] in choices


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("guided_json", {"$ref": "#"}, "guided_json: no text follows the grammar$"),
        ("guided_regex", "(a?){500}a{500}", "allow no next token: lexer error: too many expressions constructed$"),
    ],
)
async def test_a_grammar_that_fails_is_told_by_its_field_and_not_by_its_parsers_state(client, name, value, message):
    status, body = await client.post("/v1/completions", ASK | {name: value})
    assert (status, body["error"]["param"]) == (400, name) and re.search(message, body["error"]["message"])
    with pytest.raises(openai.APIError, match=message) as caught:
        async for _ in await client.openai.completions.create(**ASK, stream=True, extra_body={name: value}):
            pass
    assert caught.value.param == name


@pytest.mark.quick
@pytest.mark.parametrize("keyword", [{"propertyNames": {"type": "string"}}, {"uniqueItems": False}], ids=str)
async def test_a_keyword_that_demands_nothing_is_accepted(client, keyword):
    """Zod writes propertyNames for each record."""
    schema = {"type": "object", "additionalProperties": {"type": "number"}} | keyword
    status, body = await client.post("/v1/chat/completions", CHAT | {"response_format": response_format(schema)})
    assert status == 200, body


@pytest.mark.parametrize("form", ["password", "binary", "uri-reference", "my-own"])
async def test_an_unknown_format_is_an_annotation(client, form):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": form, "maxLength": 5}}}
    status, body = await client.post("/v1/chat/completions", CHAT | {"response_format": response_format(schema)})
    assert status == 200, body


def test_a_compiled_grammar_is_used_again_with_a_state_of_its_own(tokenizer):
    compiler = GrammarCompiler(tokenizer, [1])
    grammar = compiler.compile(GrammarSpec("choice", '["ab"]'))
    assert compiler.compile(GrammarSpec("choice", '["ab"]')) is grammar
    first, second = grammar.start(), grammar.start()
    [a], [b] = tokenizer.encode_all(["a", "b"], add_special_tokens=False)
    first.advance(a)
    assert allowed(first) == {b}
    assert a in allowed(second) and b not in allowed(second)
    first.advance(b)
    assert allowed(first) == {1}


async def test_the_old_tokens_of_a_continued_stream_take_no_steps_in_the_event_loop(engine, tokenizer, monkeypatch):
    """A long output would keep the loop from all other clients."""
    [a], [b] = tokenizer.encode_all(["a", "b"], add_special_tokens=False)
    stepped = []
    advance = LLGrammarState.advance
    monkeypatch.setattr(LLGrammarState, "advance", lambda state, token: (stepped.append(token), advance(state, token)))

    class Texts:
        """An Outlet."""

        def __init__(self):
            self.tokens_of, self.ended = {0: [], 1: []}, asyncio.Event()

        def tokens(self, numbers, tokens):
            for number, token in zip(numbers, tokens, strict=True):
                self.tokens_of[number].append(token)

        def event(self, number, event):
            self.tokens_of[number].append(event.token)
            self.ended.set() if all(tokens[-1:] == [1] for tokens in self.tokens_of.values()) else None

    texts, spec = Texts(), GrammarSpec("regex", "a{300}b|b")
    request = Request("id", [[3, 4, 5]], SamplingParams(max_tokens=400), 2, spec, generated=[[a] * 300, []])
    await LocalEngine(engine, tokenizer, MODEL).submit(request, texts, 0)
    await asyncio.wait_for(texts.ended.wait(), 60)
    assert texts.tokens_of[0] == [b, 1]
    assert len(stepped) <= sum(map(len, texts.tokens_of.values()))


def allowed(state):
    row = np.full(12, -1, np.int32)
    state.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


async def test_masks_keep_logprobs_of_the_models_own_distribution(client):
    """As for the other filters, a log-probability is that of the model, before the mask."""
    answer = await client.openai.completions.create(**ASK, logprobs=2, seed=2, extra_body={"guided_choice": ["Ä"]})
    logprobs = answer.choices[0].logprobs
    assert all(value < 0 for value in logprobs.token_logprobs)
    assert all(len(top) >= 2 for top in logprobs.top_logprobs)


async def test_without_llguidance_the_answer_says_what_to_install(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match=r"fastdecode\[structured\]") as caught:
        await client.openai.completions.create(**ASK, extra_body={"guided_choice": ["x"]})
    assert caught.value.param == "guided_choice"
