"""Tools through the real server and OpenAI's client: the request's fields, streamed calls, and calls by grammar."""

from __future__ import annotations

import asyncio
import json

import openai
import pydantic
import pytest
from engines.api_client import MODEL, served
from engines.real_engine import real_engine
from engines.scripted_engine import ScriptedEngine
from models.checkpoints import VOCAB_SIZE, make_checkpoint, write_tokenizer

from fastdecode.text.tokenizer import Tokenizer

jsonschema = pytest.importorskip("jsonschema")

#: A template that shows what it is given.
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "maxLength": 3}, "unit": {"enum": ["C", "F"]}},
            "required": ["where", "unit"],
            "additionalProperties": False,
        },
    },
}
DICE = {
    "type": "function",
    "function": {
        "name": "dice",
        "parameters": {
            "$defs": {"sides": {"type": "integer", "minimum": 2, "maximum": 20}},
            "type": "object",
            "properties": {"sides": {"$ref": "#/$defs/sides"}},
            "required": ["sides"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, DICE]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Roll."}], "tools": TOOLS}
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
CALL = '<tool_call>\n{"name": "dice", "arguments": {"sides": 6}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(write_tokenizer(tmp_path_factory.mktemp("tok"), chat_template=TEMPLATE + "<tool_call>"))


def ended(tokens):
    """The script of a text that ends by itself."""
    from fastdecode.engine.state.request import TokenEvent

    return [*tokens, TokenEvent(1, finish_reason="stop")]


async def streamed(client, **ask):
    """The message and the finish reason that a stream adds up to, by the rules of OpenAI's deltas."""
    content, calls, reason, chunks = "", {}, None, 0
    async for chunk in await client.openai.chat.completions.create(**ask, stream=True):
        choice = chunk.choices[0]
        chunks += 1
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert call.type == "function" and call.index not in calls
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
    return content, [tuple(calls[i]) for i in sorted(calls)], reason, chunks


@pytest.mark.quick
async def test_a_call_whole_and_streamed(tokenizer, spell):
    tokens = ended(spell("Let me roll. " + CALL))
    async with served(ScriptedEngine(tokens, tokens), tokenizer) as client:
        answer = (await client.openai.chat.completions.create(**ASK)).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", "Let me roll.")
        [call] = answer.message.tool_calls
        assert (call.type, call.function.name, call.function.arguments) == ("function", "dice", '{"sides": 6}')
        content, calls, reason, chunks = await streamed(client, **ASK)
    assert (content, calls, reason) == ("Let me roll.", [("dice", '{"sides": 6}')], "tool_calls")
    assert chunks == len(tokens)  # every token is a chunk


@pytest.mark.quick
async def test_a_call_cut_off_within_its_marker_is_no_content(tokenizer, spell):
    tokens = spell("Let me roll. <tool_ca")
    async with served(ScriptedEngine(tokens, tokens, ended(tokens)), tokenizer) as client:
        answer = (await client.openai.chat.completions.create(**ASK)).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("length", "Let me roll.")
        assert (await streamed(client, **ASK))[:3] == ("Let me roll.", [], "length")
        assert (await streamed(client, **ASK))[:3] == ("Let me roll. <tool_ca", [], "stop")


@pytest.mark.quick
async def test_parallel_calls(tokenizer, spell):
    tokens = ended(spell(CALL + "\n" + CALL.replace("6", "20")))
    async with served(ScriptedEngine(tokens, tokens, tokens), tokenizer) as client:
        _, calls, reason, _ = await streamed(client, **ASK)
        assert (calls, reason) == ([("dice", '{"sides": 6}'), ("dice", '{"sides": 20}')], "tool_calls")
        _, calls, _, _ = await streamed(client, **ASK, parallel_tool_calls=False)
        assert calls == [("dice", '{"sides": 6}')]
        message = (await client.openai.chat.completions.create(**ASK)).choices[0].message
        assert len({call.id for call in message.tool_calls}) == 2
        assert message.content is None


@pytest.mark.quick
async def test_without_tools_the_text_of_a_call_is_text(tokenizer, spell):
    async with served(ScriptedEngine(*[ended(spell(CALL))] * 2), tokenizer) as client:
        for fields in ({"tools": openai.omit}, {"tool_choice": "none"}):
            answer = (await client.openai.chat.completions.create(**ASK | fields)).choices[0]
            assert (answer.message.content, answer.finish_reason) == (CALL, "stop")
            assert answer.message.tool_calls is None


@pytest.mark.quick
async def test_the_template_gets_tools_calls_and_results(tokenizer, spell):
    """A whole conversation: a call of the model, sent back by the client's own classes, and the tool's result."""
    engine = ScriptedEngine(ended(spell(CALL)), ended(spell("Six.")))
    async with served(engine, tokenizer) as client:
        first = (await client.openai.chat.completions.create(**ASK)).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "6"}
        messages = [*ASK["messages"], first, result]
        second = await client.openai.chat.completions.create(**ASK | {"messages": messages})
        assert second.choices[0].message.content == "Six."
    prompts = [tokenizer.decode(prompt) for prompt in engine.prompts]
    head, _, tail = prompts[1].partition("<user>")
    assert json.loads(head) == [WEATHER, DICE]
    assert tail == 'Roll.<assistant>[dice {"sides": 6}]<tool>6<tool_call>'


async def test_a_call_in_the_form_of_special_tokens(tmp_path):
    """Special tokens are no text, but the parser sees those of its form."""
    tokenizer = Tokenizer.from_dir(write_tokenizer(tmp_path, specials=HARMONY, chat_template=TEMPLATE + "<|channel|>"))
    ids = {tokenizer.token_bytes(i): i for i in range(VOCAB_SIZE)}

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    text = (
        "<|channel|>analysis<|message|>A die.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.dice <|constrain|>json<|message|>{"sides": 6}'
    )
    assert ids[b"<|channel|>"] in encode(text)
    async with served(ScriptedEngine(*[ended(encode(text))] * 2), tokenizer) as client:
        message = (await client.openai.chat.completions.create(**ASK)).choices[0].message
        assert (message.content, message.reasoning_content) == (None, "A die.")
        assert (message.tool_calls[0].function.name, message.tool_calls[0].function.arguments) == (
            "dice",
            '{"sides": 6}',
        )
        _, calls, reason, _ = await streamed(client, **ASK)
        assert (calls, reason) == ([("dice", '{"sides": 6}')], "tool_calls")


# -- calls by grammar, with a model whose weights are random ----------------------------------------------------------

FORMS = {
    "hermes": {"plain": ("<tool_call>", "</tool_call>")},
    "llama3": {},
    "mistral": {"specials": ("[TOOL_CALLS]",)},
    "mistral-args": {"specials": ("[TOOL_CALLS]", "[ARGS]")},
    "gpt-oss": {"specials": HARMONY},
}


@pytest.fixture(params=FORMS)
async def grammar_client(request, tmp_path):
    """A server whose model has random weights and whose tokenizer has the special tokens of one form."""
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer.from_dir(write_tokenizer(tmp_path, **FORMS[request.param], chat_template=TEMPLATE))
    ends = [1, *filter(None, [tokenizer.token_id("<|call|>"), tokenizer.token_id("<|return|>")])]
    form = request.param.removesuffix("-args")
    async with (
        real_engine(make_checkpoint("llama-gqa"), tmp_path, end_token_ids=ends) as engine,
        served(engine, tokenizer, tool_parser=form) as client,
    ):
        yield client


async def test_required_and_named_calls_follow_their_schemas(grammar_client):
    async def ask(choice, seed, **fields):
        answer = await grammar_client.openai.chat.completions.create(
            **ASK, tool_choice=choice, seed=seed, max_completion_tokens=300, **fields
        )
        return choice, answer.choices[0]

    named = {"type": "function", "function": {"name": "dice"}}
    seen, completed = set(), 0
    for choice, answer in await asyncio.gather(*(ask(c, s) for c in ("required", named) for s in range(8))):
        if answer.finish_reason != "tool_calls":
            assert answer.finish_reason == "length"
            continue
        completed += 1
        assert answer.message.content is None
        for call in answer.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            seen.add(call.function.name)
        if choice is named:
            assert [call.function.name for call in answer.message.tool_calls] == ["dice"]
    assert completed >= 6 and "dice" in seen
    fields = ASK | {"tool_choice": named, "seed": 3, "max_completion_tokens": 300}
    whole = (await grammar_client.openai.chat.completions.create(**fields)).choices[0]
    _, calls, reason, _ = await streamed(grammar_client, **fields)
    assert reason == whole.finish_reason
    assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]


class Dice(pydantic.BaseModel):
    """Roll."""

    sides: int = pydantic.Field(ge=2, le=20)


async def test_openais_helper_parses_a_call_as_it_is_streamed(grammar_client):
    """The helper puts the pieces of the arguments together, and makes an object of the tool's own class of them."""
    request = ASK | {
        "tools": [openai.pydantic_function_tool(Dice, name="dice")],
        "tool_choice": {"type": "function", "function": {"name": "dice"}},
        "max_completion_tokens": 300,
    }
    pieces = []
    async with grammar_client.openai.chat.completions.stream(**request, seed=3) as stream:
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                pieces.append(event.arguments_delta)
        [call] = (await stream.get_final_completion()).choices[0].message.tool_calls
    assert len(pieces) > 3 and "".join(pieces) == call.function.arguments
    assert isinstance(call.function.parsed_arguments, Dice)


async def test_strict_tools_and_response_format_with_tools(grammar_client):
    """Whatever the model chooses, it is a message without a call, an answer by the schema, or a valid call."""
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    schema = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(4):
        for fields in ({"tools": strict}, {"response_format": form}):
            answer = await grammar_client.openai.chat.completions.create(
                **ASK | fields, seed=seed, max_completion_tokens=150
            )
            choice = answer.choices[0]
            if choice.finish_reason == "tool_calls":
                for call in choice.message.tool_calls:
                    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            elif choice.finish_reason == "stop" and "response_format" in fields:
                jsonschema.validate(json.loads(choice.message.content), schema)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [DICE, DICE]}, "tools"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}]},
            "messages[0].tool_calls[0].type",
        ),
    ],
    ids=str,
)
async def test_bad_tools_are_refused_by_name(tokenizer, fields, param):
    async with served(ScriptedEngine(), tokenizer) as client:
        status, body = await client.post("/v1/chat/completions", ASK | fields)
    assert (status, body["error"]["param"]) == (400, param), body


@pytest.mark.parametrize(
    "part",
    [{"type": "string", "pattern": "^(?=x)"}, {"$ref": "https://example.com/x.json"}, {"type": "strin"}, {"not": {}}],
    ids=str,
)
async def test_a_schema_that_cannot_be_followed_is_an_error_of_strict_tools_alone(client, part):
    pytest.importorskip("llguidance")
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": part}, "required": ["a"]}}
    for choice in ("required", "auto"):
        ask = ASK | {"tool_choice": choice, "max_completion_tokens": 5}
        tools = [DICE, {"type": "function", "function": function}]
        status, body = await client.post("/v1/chat/completions", ask | {"tools": tools})
        assert status == 200, body
        tools[1] = {"type": "function", "function": function | {"strict": True}}
        status, body = await client.post("/v1/chat/completions", ask | {"tools": tools})
        assert (status, body["error"]["param"]) == (400, "tools[1].function.parameters")
        message = body["error"]["message"]
        assert "a strict tool's schema must be followed as a whole" in message and "args" not in message


@pytest.mark.parametrize("parameters", [{}, None, {"properties": {"a": {"type": "null"}}}], ids=str)
async def test_the_arguments_of_a_required_call_are_an_object(client, parameters):
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for seed in range(4):
        answer = await client.openai.chat.completions.create(
            **ASK | {"tools": tools}, tool_choice="required", seed=seed, max_completion_tokens=60
        )
        for call in answer.choices[0].message.tool_calls or []:
            assert call.function.arguments.lstrip()[:1] in ("{", "")


async def test_a_model_with_tools_in_an_unknown_form_says_so(tmp_path):
    tokenizer = Tokenizer.from_dir(write_tokenizer(tmp_path, chat_template="{{ tools }}{{ messages }}"))
    async with served(ScriptedEngine(), tokenizer) as client:
        with pytest.raises(openai.BadRequestError, match=r"--tool-parser.*--chat-template") as caught:
            await client.openai.chat.completions.create(**ASK)
    assert caught.value.param == "tools"
