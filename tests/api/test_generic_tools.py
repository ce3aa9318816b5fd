"""Tools for models that know none: chat templates without tools, and tokenizers without a token for a call."""

from __future__ import annotations

import json

import numpy as np
import pytest
from engines.api_client import MODEL, served
from engines.scripted_engine import ScriptedEngine
from models.checkpoints import VOCAB_SIZE, write_tokenizer

from fastdecode.engine.state.request import TokenEvent
from fastdecode.text.grammar import GrammarCompiler
from fastdecode.text.output.deltas import Tool
from fastdecode.text.output.dialogue import Dialogue
from fastdecode.text.output.forms import TOOL_FORMS
from fastdecode.text.tokenizer import Tokenizer

#: Without tools. Like many templates, it wants users and assistants to take turns.
TEMPLATE = (
    "{% set last = namespace(role='') %}{% for m in messages %}"
    "{% if m.role == last.role or m.role == 'tool' %}{{ raise_exception('no turns') }}{% endif %}"
    "{% set last.role = m.role %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DICE = {
    "type": "function",
    "function": {
        "name": "dice",
        "description": "Rolls a die.",
        "parameters": {
            "type": "object",
            "properties": {"sides": {"enum": [4, 6]}},
            "required": ["sides"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "dice", "arguments": {"sides": 6}}\n</tool_call>'
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Roll."}], "tools": [DICE]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(write_tokenizer(tmp_path_factory.mktemp("tok"), chat_template=TEMPLATE))


@pytest.fixture(scope="module")
def ids(tokenizer):
    return {tokenizer.token_bytes(i): i for i in range(VOCAB_SIZE)}


@pytest.fixture(scope="module")
def spell(ids):
    return lambda text: [*(ids[bytes([b])] for b in text.encode()), TokenEvent(1, finish_reason="stop")]


@pytest.mark.quick
async def test_a_conversation_with_tools_on_a_template_without(tokenizer, spell):
    engine = ScriptedEngine(spell("I roll. " + CALL), spell("Six."), spell("Hi."))
    system = {"role": "system", "content": "Be brief."}
    async with served(engine, tokenizer) as client:
        chat = client.openai.chat.completions
        first = (await chat.create(**ASK | {"messages": [system, *ASK["messages"]]})).choices[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", "I roll.")
        [call] = first.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("dice", {"sides": 6})
        results = [{"role": "tool", "tool_call_id": call.id, "content": text} for text in ("6", "5")]
        history = [*ASK["messages"], first.message, *results, {"role": "user", "content": "Well?"}]
        second = (await chat.create(**ASK | {"messages": history})).choices[0]
        assert (second.finish_reason, second.message.content) == ("stop", "Six.")
        plain = [{"role": "user", "content": "Hi"}]
        await chat.create(model=MODEL, messages=plain)
    prompts = [tokenizer.decode(prompt) for prompt in engine.prompts]
    instructions, _, tail = prompts[0].partition("\n\nBe brief.")
    assert json.dumps(DICE["function"]) in instructions and "<tool_call>" in instructions and tail == "<user>Roll."
    assert prompts[1].partition("<user>")[2] == (
        f"Roll.<assistant>I roll.\n{CALL}<user><tool_response>\n6\n</tool_response>\n\n"
        "<tool_response>\n5\n</tool_response>\n\nWell?"
    )
    assert prompts[2] == "<user>Hi"


@pytest.mark.parametrize("form", ["hermes", "mistral", "generic"])
def test_a_strict_tool_is_followed_from_the_text_of_its_opening_on(tokenizer, ids, form):
    """With tool_choice "auto" and a tokenizer without a token for the opening."""
    pytest.importorskip("llguidance")
    tool = Tool("dice", DICE["function"]["parameters"], strict=True)
    spec = Dialogue(tokenizer, TOOL_FORMS[form], (tool,)).grammar("", None)
    grammar = GrammarCompiler(tokenizer, [1]).compile(spec)

    def allowed(text):
        """The bytes that may follow a text, and whether it may end."""
        state = grammar.start()
        for byte in text.encode():
            state.advance(ids[bytes([byte])])
        row = np.full(grammar.vocab_size // 32 + 1, -1, np.int32)
        state.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        return {token for token, i in ids.items() if len(token) == 1 and bits[i]}, bool(bits[1])

    head = {"mistral": '[TOOL_CALLS][{"name": "dice", "arguments": '}.get(form)
    head = head or '<tool_call>\n{"name": "dice", "arguments": '
    everything = {bytes([b]) for b in b'abc{}<>[]\n "'}
    for text in ("", "Well, ", TOOL_FORMS[form].opening[:-1], "a <b> [c] {d}"):
        found, may_end = allowed(text)
        assert everything <= found and may_end, text
    for text in ("", "I roll. "):
        found, may_end = allowed(text + head + '{"sides": ')
        assert {b"4", b"6"} <= found and not found & {b"5", b'"', b"n", b"{"} and not may_end
