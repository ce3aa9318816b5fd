"""/v1/messages and count_tokens by Anthropic's own client, whole and streamed, and what is refused."""

from __future__ import annotations

import contextlib
import json
import logging

import pytest
from engines.api_client import MODEL, served
from engines.real_engine import real_engine
from engines.scripted_engine import ScriptedEngine
from models.checkpoints import VOCAB_SIZE, make_checkpoint, write_tokenizer

from fastdecode.engine.state.request import GenerationFailed, Overloaded, TokenEvent
from fastdecode.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ reasoning_effort | default('') }}"
    "{% for m in messages %}<{{ m['role'] }}>{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{# <tool_call> </think> #}"
)
DICE = {
    "name": "dice",
    "description": "Rolls a die.",
    "input_schema": {"type": "object", "properties": {"sides": {"type": "integer"}}, "required": ["sides"]},
}
CALL = '<tool_call>{"name": "dice", "arguments": {"sides": 6}}</tool_call>'
MESSAGE = "<think>A die.</think>\n\nI roll. " + CALL + "\n" + CALL.replace("6", "20")
ASK = {"model": MODEL, "max_tokens": 4000, "messages": [{"role": "user", "content": "Roll."}]}
HELLO = {"type": "text", "text": "Hello"}
USER = {"role": "user", "content": "x"}
USE = {"type": "tool_use", "id": "a", "name": "dice", "input": {}}


def said(*blocks):
    """A message of the assistant."""
    return {"role": "assistant", "content": list(blocks)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(write_tokenizer(tmp_path_factory.mktemp("tok"), chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def spell(tokenizer):
    ids = {tokenizer.token_bytes(i): i for i in range(VOCAB_SIZE)}
    return lambda text: [*(ids[bytes([b])] for b in text.encode()), TokenEvent(1, finish_reason="stop")]


@pytest.fixture
async def anthropic_of():
    """Makes Anthropic's client of a served API."""
    package = pytest.importorskip("anthropic")
    async with contextlib.AsyncExitStack() as stack:

        async def make(client):
            url = f"http://127.0.0.1:{client.server.port}"
            return await stack.enter_async_context(package.AsyncAnthropic(base_url=url, api_key="none", max_retries=0))

        yield make


def summary(message):
    """The content blocks of a message, without their ids."""
    found = []
    for block in message.content:
        shown = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block.type]
        found.append((block.type, getattr(block, "name", None), getattr(block, shown)))
    return found


EXPECTED = [
    ("thinking", None, "A die."),
    ("text", None, "I roll."),
    ("tool_use", "dice", {"sides": 6}),
    ("tool_use", "dice", {"sides": 20}),
]


async def test_content_blocks_of_a_message(tokenizer, spell, anthropic_of):
    engine = ScriptedEngine(spell(MESSAGE))
    async with served(engine, tokenizer) as client:
        message = await (await anthropic_of(client)).messages.create(**ASK, system="Be brief.", tools=[DICE])
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert summary(message) == EXPECTED
    assert len({block.id for block in message.content[2:]}) == 2
    usage = message.usage
    assert usage.output_tokens == len(spell(MESSAGE))
    assert usage.input_tokens + usage.cache_read_input_tokens == len(engine.prompts[0])


async def test_a_calls_input_of_many_levels(tokenizer, spell):
    nested = '{"a": ' * 300 + "1" + "}" * 300
    engine = ScriptedEngine(spell(CALL.replace('{"sides": 6}', nested)))
    async with served(engine, tokenizer) as client:
        status, message = await client.post("/v1/messages", ASK | {"tools": [DICE]})
    [block] = message["content"]
    assert (status, block["type"], block["input"]) == (200, "tool_use", json.loads(nested))


async def test_a_stream_adds_up_to_the_message(tokenizer, spell, anthropic_of):
    """Anthropic's own accumulator follows the events and raises for one out of order."""
    engine = ScriptedEngine(spell(MESSAGE))
    async with served(engine, tokenizer) as client:
        kinds, texts, arguments = [], "", {}
        async with (await anthropic_of(client)).messages.stream(**ASK, tools=[DICE]) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "message_start":
                    assert event.message.usage.input_tokens == len(engine.prompts[0])
                if event.type == "text":
                    texts += event.text
                if event.type == "input_json":
                    assert event.partial_json
            final = await stream.get_final_message()
    assert summary(final) == EXPECTED and texts == "I roll." and arguments == {}
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", len(spell(MESSAGE)))
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4


async def test_a_conversation_is_sent_back(tokenizer, spell, anthropic_of):
    engine = ScriptedEngine(spell(MESSAGE), spell("Six."))
    async with served(engine, tokenizer) as client:
        anthropic = await anthropic_of(client)
        first = await anthropic.messages.create(**ASK, tools=[DICE])
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "6"},
            {"type": "tool_result", "tool_use_id": calls[1].id, "content": [HELLO], "is_error": True},
            {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
        ]
        history = [*ASK["messages"], {"role": "assistant", "content": first.content}]
        history += [{"role": "user", "content": results}, {"role": "user", "content": "Now?"}]
        second = await anthropic.messages.create(**ASK | {"messages": history}, tools=[DICE])
    assert (summary(second), second.stop_reason) == ([("text", None, "Six.")], "end_turn")
    head, _, tail = tokenizer.decode(engine.prompts[1]).partition("<user>")
    [tool] = json.loads(head)
    assert tool["function"] == {key: DICE[key] for key in ("name", "description")} | {
        "parameters": DICE["input_schema"]
    }
    assert tail == (
        'Roll.<assistant>(A die.)I roll.[dice {"sides": 6}][dice {"sides": 20}]'
        "<tool>6<tool>Error:\nHello<user>Well?\nNow?"
    )


async def test_the_ends_of_a_message(tokenizer, spell, anthropic_of):
    cut = spell("Hel")[:-1]
    stopped = spell("Hello you")
    async with served(ScriptedEngine(cut, stopped, stopped), tokenizer) as client:
        anthropic = await anthropic_of(client)
        message = await anthropic.messages.create(**ASK | {"max_tokens": 3})
        assert (message.stop_reason, summary(message)) == ("max_tokens", [("text", None, "Hel")])
        ask = ASK | {"stop_sequences": ["you", " yo"]}
        message = await anthropic.messages.create(**ask)
        assert (message.stop_reason, message.stop_sequence, message.content[0].text) == (
            "stop_sequence",
            " yo",
            "Hello",
        )
        async with anthropic.messages.stream(**ask) as stream:
            message = await stream.get_final_message()
        assert (message.stop_reason, message.stop_sequence, message.content[0].text) == (
            "stop_sequence",
            " yo",
            "Hello",
        )


async def test_an_assistants_last_message_is_continued(tokenizer, spell, anthropic_of):
    engine = ScriptedEngine(spell("(B)"))
    begun = [*ASK["messages"], {"role": "assistant", "content": "The answer is "}]
    async with served(engine, tokenizer) as client:
        message = await (await anthropic_of(client)).messages.create(**ASK | {"messages": begun})
    assert message.content[0].text == "(B)"
    assert tokenizer.decode(engine.prompts[0]) == "<user>Roll.<assistant>The answer is "


async def test_tokens_are_counted(tokenizer, spell, anthropic_of):
    engine = ScriptedEngine(spell("x"))
    ask = {"model": MODEL, "messages": ASK["messages"], "system": [HELLO], "tools": [DICE]}
    async with served(engine, tokenizer) as client:
        anthropic = await anthropic_of(client)
        counted = await anthropic.messages.count_tokens(**ask)
        await anthropic.messages.create(**ask, max_tokens=1)
    assert counted.input_tokens == len(engine.prompts[0])


async def test_choices_of_tools(tmp_path, tokenizer, anthropic_of):
    pytest.importorskip("llguidance")
    async with (
        real_engine(make_checkpoint("llama-gqa"), tmp_path) as engine,
        served(engine, tokenizer, reasoning_parser="none") as client,
    ):
        anthropic = await anthropic_of(client)
        four = {"properties": {"sides": {"enum": [4]}}, "additionalProperties": False}
        limited = DICE | {"input_schema": DICE["input_schema"] | four}
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "dice"}):
            message = await anthropic.messages.create(**ASK | {"max_tokens": 300}, tools=[limited], tool_choice=choice)
            assert summary(message) == [("tool_use", "dice", {"sides": 4})]
        form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
        message = await anthropic.messages.create(**ASK | {"max_tokens": 100}, output_config={"format": form})
        assert json.loads(message.content[0].text) in ("yes", "no")


async def test_errors_have_anthropics_shape(tokenizer, anthropic_of):
    package = pytest.importorskip("anthropic")
    failing = [5, GenerationFailed("lost")]
    engine = ScriptedEngine(failing, failing, refusal=Overloaded("busy", 3))
    async with served(engine, tokenizer) as client:
        anthropic = await anthropic_of(client)
        with pytest.raises(package.InternalServerError) as raised:
            await anthropic.messages.create(**ASK)
        assert raised.value.body["error"]["type"] == "api_error"
        with pytest.raises(package.APIStatusError, match="lost"):
            async with anthropic.messages.stream(**ASK) as stream:
                await stream.get_final_message()
        with pytest.raises(package.RateLimitError) as raised:
            await anthropic.messages.create(**ASK)
        assert raised.value.body["type"] == "error" and raised.value.body["error"]["type"] == "rate_limit_error"
        with pytest.raises(package.NotFoundError) as raised:
            await anthropic.messages.create(**ASK | {"model": "claude"})
        assert raised.value.body["error"]["type"] == "not_found_error"


async def test_a_key_in_anthropics_header(tokenizer, spell, anthropic_of):
    package = pytest.importorskip("anthropic")
    async with served(ScriptedEngine(spell("Hi")), tokenizer, api_keys=("none",)) as client:
        assert (await (await anthropic_of(client)).messages.create(**ASK)).content[0].text == "Hi"
        with pytest.raises(package.AuthenticationError) as raised:
            await (await anthropic_of(client)).with_options(api_key="wrong").messages.create(**ASK)
        assert raised.value.body["error"]["type"] == "authentication_error"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [HELLO, {"type": "image", "source": {}}]}]},
            "messages[0].content[1].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0].type",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"messages": [USER, said(HELLO, USE | {"input": "x"})], "system": "x"}, "messages[1].content[1].input"),
        ({"messages": [USER, USER, said(USE, USE | {"name": 5})]}, "messages[2].content[1].name"),
        ({"tools": [DICE, DICE | {"name": "a b"}]}, "tools[1].name"),
        ({"tools": [DICE | {"input_schema": 5}]}, "tools[0].input_schema"),
        ({"tools": [DICE | {"strict": 5}]}, "tools[0].strict"),
        ({"output_config": {"format": {"type": "yaml", "schema": {}}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [DICE], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"output_config": {"effort": "endless"}}, "output_config.effort"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"temperature": 3}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
    ],
    ids=str,
)
async def test_bad_messages_are_refused_by_name(tokenizer, fields, named):
    async with served(ScriptedEngine(), tokenizer) as client:
        status, body = await client.post("/v1/messages", ASK | fields)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error"), body
    assert body["error"]["message"].startswith(named + ": "), body


@pytest.mark.quick
async def test_a_request_of_claude_code(tokenizer, spell, caplog):
    """Its fields that ask for what this server does not have."""
    caplog.set_level(logging.INFO, "fastdecode.api")
    engine = ScriptedEngine(spell("Hi."))
    ask = {
        "messages": [{"role": "user", "content": [HELLO]}, {"role": "system", "content": "More."}],
        "system": [HELLO, {"type": "text", "text": "you", "cache_control": {"type": "ephemeral"}}],
        "tools": [DICE, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "1"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    async with served(engine, tokenizer, drop_hosted_tools=True) as client:
        status, body = await client.post("/v1/messages?beta=true", ask)
    assert status == 200 and body["content"] == [{"type": "text", "text": "Hi."}]
    assert tokenizer.decode(engine.prompts[0]).endswith("]high<system>Hello\nyou<user>Hello<system>More.")
    assert any("web_search_20250305" in record.getMessage() for record in caplog.records)


@pytest.mark.quick
async def test_unknown_paths_below_messages_and_methods(tokenizer):
    async with served(ScriptedEngine(), tokenizer) as client:
        status, body = await client.post("/v1/messages/batches", {})
        assert (status, body["error"]["type"]) == (404, "not_found_error")
        async with client.http.get("/v1/messages") as response:
            assert response.status == 405 and (await response.json())["type"] == "error"
