"""/v1/responses by OpenAI's client, whole and streamed; /tokenize, /detokenize, /version, and what is refused."""

from __future__ import annotations

import json
import logging

import openai
import pytest
from engines.api_client import MODEL, served
from engines.real_engine import real_engine
from engines.scripted_engine import ScriptedEngine
from models.checkpoints import VOCAB_SIZE, make_checkpoint, write_tokenizer

from fastdecode import __version__
from fastdecode.engine.state.request import GenerationFailed, TokenEvent
from fastdecode.text.log_once import log_once
from fastdecode.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{# <tool_call> </think> #}"
)
DICE = {
    "type": "function",
    "name": "dice",
    "parameters": {"type": "object", "properties": {"sides": {"type": "integer"}}, "required": ["sides"]},
    "strict": False,
}
CALL = '<tool_call>{"name": "dice", "arguments": {"sides": 6}}</tool_call>'
MESSAGE = "<think>A die.</think>\n\nI roll. " + CALL + "\n" + CALL.replace("6", "20")


CRM = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [DICE, DICE | {"name": "dial"}]}
USER = {"role": "user", "content": "x"}
CALLED = {"type": "function_call", "call_id": "a", "name": "dice", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "6"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(write_tokenizer(tmp_path_factory.mktemp("tok"), chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def spell(tokenizer):
    ids = {tokenizer.token_bytes(i): i for i in range(VOCAB_SIZE)}
    return lambda text: [*(ids[bytes([b])] for b in text.encode()), TokenEvent(1, finish_reason="stop")]


def summary(response):
    """The items of a response, without their ids."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.status, item.name, item.arguments))
        else:
            found.append((item.type, item.status, item.content[0].text))
    return found


EXPECTED = [
    ("reasoning", "completed", "A die."),
    ("message", "completed", "I roll."),
    ("function_call", "completed", "dice", '{"sides": 6}'),
    ("function_call", "completed", "dice", '{"sides": 20}'),
]


@pytest.mark.quick
async def test_items_of_a_response(tokenizer, spell):
    async with served(ScriptedEngine(spell(MESSAGE)), tokenizer) as client:
        response = await client.openai.responses.create(
            model=MODEL, input="Roll.", tools=[DICE], instructions="Be brief.", metadata={"run": "7"}
        )
    assert (response.status, response.object, response.model) == ("completed", "response", MODEL)
    assert summary(response) == EXPECTED
    assert response.output_text == "I roll."
    assert (response.instructions, response.metadata, response.tools[0].name) == ("Be brief.", {"run": "7"}, "dice")
    usage = response.usage
    assert usage.output_tokens == len(spell(MESSAGE)) and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == len(tokenizer.encode("A die."))
    assert len({item.id for item in response.output}) == 4


@pytest.mark.quick
async def test_a_stream_adds_up_to_the_response(tokenizer, spell):
    """OpenAI's own accumulator follows the events and raises for one out of order."""
    async with served(ScriptedEngine(spell(MESSAGE), spell(MESSAGE)), tokenizer) as client:
        texts = {"response.output_text.delta": "", "response.reasoning_text.delta": ""}
        arguments, numbers, kinds = {}, [], []
        async with client.openai.responses.stream(model=MODEL, input="Roll.", tools=[DICE]) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type in texts:
                    texts[event.type] += event.delta
                if event.type == "response.function_call_arguments.delta":
                    arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
            final = await stream.get_final_response()
        assert summary(final) == EXPECTED
        assert list(texts.values()) == ["I roll.", "A die."]
        assert list(arguments.values()) == ['{"sides": 6}', '{"sides": 20}']
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
        raw = await client.openai.responses.create(model=MODEL, input="Roll.", tools=[DICE], stream=True)
        async for event in raw:
            numbers.append(event.sequence_number)
        assert numbers == list(range(len(numbers)))


@pytest.mark.quick
async def test_the_last_token_may_end_an_item_and_begin_the_next(tokenizer, spell):
    """Only the item that max_tokens has cut off is incomplete."""
    cut = spell("<think>A die.</think>I")[:-1]
    async with served(ScriptedEngine(cut), tokenizer) as client:
        events = [event async for event in await client.openai.responses.create(model=MODEL, input="x", stream=True)]
    done = [event.item.status for event in events if event.type == "response.output_item.done"]
    assert done == [item.status for item in events[-1].response.output] == ["completed", "incomplete"]


@pytest.mark.quick
async def test_a_conversation_is_sent_back(tokenizer, spell):
    engine = ScriptedEngine(spell(MESSAGE), spell("Six."))
    async with served(engine, tokenizer) as client:
        asked = [{"role": "user", "content": [{"type": "input_text", "text": "Roll."}]}]
        first = await client.openai.responses.create(model=MODEL, input=asked, tools=[DICE])
        calls = [item for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "6"} for call in calls]
        history = [*asked, *(item.model_dump(exclude_none=True) for item in first.output), *results]
        second = await client.openai.responses.create(model=MODEL, input=history, tools=[DICE])
        assert second.output_text == "Six."
    tail = tokenizer.decode(engine.prompts[1]).partition("<user>")[2]
    assert tail == 'Roll.<assistant>I roll.[dice {"sides": 6}][dice {"sides": 20}]<tool>6<tool>6'


@pytest.mark.quick
async def test_functions_of_namespaces(tokenizer, spell):
    """The model sees flat names; the client gets its own, and sends them back."""
    text = CALL.replace("dice", "crm.dial") + "\n" + CALL
    engine = ScriptedEngine(spell(text), spell(text), spell("Six."))
    ask = {"model": MODEL, "tools": [DICE, CRM]}
    async with served(engine, tokenizer) as client:
        first = await client.openai.responses.create(**ask, input="Call.")
        assert [(item.name, item.namespace) for item in first.output] == [("dial", "crm"), ("dice", None)]
        async with client.openai.responses.stream(**ask, input="Call.") as stream:
            final = await stream.get_final_response()
        assert [(item.name, item.namespace) for item in final.output] == [("dial", "crm"), ("dice", None)]
        history = [item.model_dump(exclude_none=True) for item in first.output]
        history += [
            {"type": "function_call_output", "call_id": item.call_id, "namespace": item.namespace, "output": "6"}
            for item in first.output
        ]
        choice = {"type": "function", "namespace": "crm", "name": "dice"}
        await client.openai.responses.create(**ask, input=history, tool_choice="auto")
        status, body = await client.post("/v1/responses", ask | {"input": "x", "tool_choice": choice | {"name": "x"}})
        assert (status, body["error"]["param"]) == (400, "tool_choice") and "crm.x" in body["error"]["message"]
    head, _, tail = tokenizer.decode(engine.prompts[2]).partition("<assistant>")
    functions = [tool["function"] for tool in json.loads(head)]
    assert [(f["name"], f.get("description")) for f in functions] == [
        ("dice", None),
        ("crm.dice", "Customers."),
        ("crm.dial", None),
    ]
    assert tail.endswith('[crm.dial {"sides": 6}][dice {"sides": 6}]<tool>6<tool>6')


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["web_search", "web_search_preview_2025_03_11", "file_search", "mcp"])
async def test_hosted_tools_are_dropped_where_that_is_asked_for(tokenizer, spell, caplog, kind):
    caplog.set_level(logging.INFO, "fastdecode.api.response_tools")
    ask = {"input": "Roll.", "tools": [{"type": kind, "anything": {"x": 1}}, DICE]}
    async with served(ScriptedEngine(spell(CALL)), tokenizer, drop_hosted_tools=True) as client:
        status, body = await client.post("/v1/responses", ask)
    assert status == 200 and [tool["name"] for tool in body["tools"]] == ["dice"]
    assert [item["type"] for item in body["output"]] == ["function_call"]
    assert any(kind in record.getMessage() for record in caplog.records)
    async with served(ScriptedEngine(), tokenizer) as client:
        status, body = await client.post("/v1/responses", ask)
    assert (status, body["error"]["param"]) == (400, "tools[0].type")
    assert kind in body["error"]["message"] and "--drop-hosted-tools" in body["error"]["message"]


@pytest.mark.quick
async def test_what_a_server_may_leave_out_is_accepted_and_named_once(tokenizer, spell, caplog):
    """The fields of a request of Codex CLI that ask for what this server does not have."""
    log_once.cache_clear()
    caplog.set_level(logging.INFO, "fastdecode.api.fields")
    ask = {
        "input": [{"type": "message", "role": "user", "phase": "x", "content": [{"type": "input_text", "text": "Hi"}]}],
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"session_id": "1"},
        "reasoning": {"summary": "auto"},
        "store": False,
        "prompt_cache_key": "1",
        "service_tier": "priority",
    }
    async with served(ScriptedEngine(spell("Hi."), spell("Hi."), spell("Hi.")), tokenizer) as client:
        plain = await client.openai.responses.create(model=MODEL, input="Hi")
        for _ in range(2):
            status, body = await client.post("/v1/responses", ask)
            assert status == 200 and body["usage"]["input_tokens"] == plain.usage.input_tokens
    named = [record.getMessage().split()[2] for record in caplog.records]
    assert sorted(named) == ["client_metadata", "include", "input[].phase", "reasoning.summary", "service_tier"]


async def test_a_cut_response_and_a_failed_stream(tokenizer, spell):
    cut = [*spell("Hel")[:-1]]
    async with served(ScriptedEngine(cut, cut, [*cut, GenerationFailed("lost")]), tokenizer) as client:
        ask = {"model": MODEL, "input": "Hi", "max_output_tokens": 3}
        response = await client.openai.responses.create(**ask)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert summary(response) == [("message", "incomplete", "Hel")]
        events = [event async for event in await client.openai.responses.create(**ask, stream=True)]
        assert events[-1].type == "response.incomplete" and summary(events[-1].response) == summary(response)
        events = [event async for event in await client.openai.responses.create(**ask, stream=True)]
        assert events[-1].type == "response.failed" and events[-1].response.error.message == "lost"


async def test_structured_text(tmp_path, tokenizer):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    async with (
        real_engine(make_checkpoint("llama-gqa"), tmp_path) as engine,
        served(engine, tokenizer, reasoning_parser="none") as client,
    ):
        response = await client.openai.responses.create(
            model=MODEL, input="x?", text={"format": form}, max_output_tokens=150
        )
        assert response.status == "completed" and set(json.loads(response.output_text)) == {"x"}
        bad = {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}
        status, body = await client.post("/v1/responses", {"input": "x", "text": {"format": bad}})
        assert (status, body["error"]["param"]) == (400, "text.format.schema"), body
        bad.pop("name")
        ask = {"messages": [USER], "max_tokens": 9, "output_config": {"format": bad}}
        status, body = await client.post("/v1/messages", ask)
        assert status == 400 and body["error"]["message"].startswith("output_config.format.schema: "), body


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "file_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [USER, {"role": "judge", "content": "x"}]}, "input[1].role"),
        ({"input": [USER, {"role": "judge", "content": "x"}], "instructions": "x"}, "input[1].role"),
        ({"input": [{"type": "reasoning"}, {"role": "user", "content": 5}]}, "input[1].content"),
        (
            {"input": [USER, {"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
            "input[1].content[0].text",
        ),
        ({"input": [USER, CALLED, CALLED | {"arguments": "{"}]}, "input[2].arguments"),
        ({"input": [USER, CALLED | {"name": 5}]}, "input[1].name"),
        ({"input": [USER, CALLED, OUTPUT | {"output": 5}]}, "input[2].output"),
        ({"input": [USER, CALLED, OUTPUT | {"output": [{"type": "text", "text": 5}]}]}, "input[2].output[0].text"),
        ({"input": [{"role": "user", "content": "x", "phase": 1}]}, "input[0].phase"),
        ({"tools": [DICE, DICE | {"name": "a b"}]}, "tools[1].name"),
        ({"tools": [DICE | {"parameters": 5}]}, "tools[0].parameters"),
        ({"tools": [CRM | {"tools": [DICE, DICE | {"strict": 5}]}]}, "tools[0].tools[1].strict"),
        ({"tools": [DICE], "tool_choice": {"type": "function", "name": 5}}, "tool_choice.name"),
        ({"tools": [DICE], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": 5, "schema": {}}}}, "text.format.name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"tools": [CRM | {"tools": [{"type": "custom", "name": "x"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [CRM | {"name": None}]}, "tools[0].name"),
        ({"tools": [CRM | {"tools": [DICE | {"description": 5}]}]}, "tools[0].tools[0].description"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"include": "reasoning.encrypted_content"}, "include"),
        ({"client_metadata": "x"}, "client_metadata"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"truncation": "auto"}, "truncation"),
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": 3}, "temperature"),
        *(({name: value}, name) for name, value in (("tools", 0), ("text", False), ("reasoning", ""))),
    ],
    ids=str,
)
async def test_bad_responses_are_refused_by_name(tokenizer, fields, param):
    async with served(ScriptedEngine(), tokenizer) as client:
        status, body = await client.post("/v1/responses", {"input": "x"} | fields)
    assert (status, body["error"]["param"]) == (400, param), body
    assert body["error"]["message"].startswith(f"{param}: ")


@pytest.mark.quick
async def test_tokenize_and_detokenize(tokenizer):
    async with served(ScriptedEngine(), tokenizer) as client:
        text = "Zwölf <pad> x"
        status, body = await client.post("/tokenize", {"prompt": text, "return_token_strs": True})
        ids = tokenizer.encode(text)
        assert status == 200 and (body["tokens"], body["count"]) == (ids, len(ids))
        assert body["max_model_len"] == ScriptedEngine.max_model_len
        assert body["token_strs"][0] == tokenizer.token_text(ids[0])
        assert (await client.post("/detokenize", {"tokens": ids}))[1] == {"prompt": text}
        messages = [{"role": "user", "content": "Hi"}]
        status, body = await client.post("/tokenize", {"messages": messages})
        assert body["tokens"] == tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
        for path, fields, param in (
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "y": 1}, "y"),
            ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ):
            status, body = await client.post(path, fields)
            assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.quick
async def test_more_tokens_than_the_context_are_not_detokenized(tokenizer):
    """They would hold up all streams, for seconds if they are millions."""
    most = ScriptedEngine.max_model_len
    async with served(ScriptedEngine(), tokenizer) as client:
        assert (await client.post("/detokenize", {"tokens": [5] * most}))[0] == 200
        status, body = await client.post("/detokenize", {"tokens": [5] * (most + 1)})
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "tokens", "context_length_exceeded")


@pytest.mark.quick
async def test_version_and_embeddings(tokenizer):
    async with served(ScriptedEngine(), tokenizer) as client:
        async with client.http.get("/version") as response:
            assert await response.json() == {"version": __version__}
        with pytest.raises(openai.BadRequestError, match="computes no embeddings"):
            await client.openai.embeddings.create(model=MODEL, input="x")
