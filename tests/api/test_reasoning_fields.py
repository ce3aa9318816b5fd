"""Fields about how much a model is to reason and to write, and the reasoning of earlier turns."""

from __future__ import annotations

import logging

import pytest
from engines.api_client import MODEL, served
from engines.scripted_engine import ScriptedEngine
from models import tokenizers_made

from fastdecode.text.tokenizer import Tokenizer

pytestmark = pytest.mark.quick

#: Shows what it reads.
TEMPLATE = (
    "{{ reasoning_effort | default('unset') }} {{ enable_thinking | default('unset') }}"
    "{% for m in messages %}<{{ m.role }}>{{ '(' + m.thinking + ')' if m.thinking }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}{% endfor %}"
)
HI = [{"role": "user", "content": "Hi"}]
CALL = {"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
async def prompts_of(tmp_path):
    """Sends requests to an endpoint, and returns the prompts that they become."""

    async def ask(path, *bodies, template=TEMPLATE):
        tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path, chat_template=template))
        engine = ScriptedEngine(*[[5]] * len(bodies))
        async with served(engine, tokenizer) as client:
            for body in bodies:
                status, answer = await client.post(path, {"model": MODEL} | body)
                assert status == 200, answer
        return [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in engine.prompts]

    return ask


async def test_reasoning_effort_is_a_variable_of_the_template(prompts_of):
    asked = [{}, {"reasoning_effort": "high"}, {"reasoning_effort": "none"}, {"reasoning_effort": "minimal"}]
    asked += [{"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}]
    prompts = await prompts_of("/v1/chat/completions", *({"messages": HI} | fields for fields in asked))
    assert [prompt.partition("<")[0] for prompt in prompts] == [
        "unset unset",
        "high unset",
        "none False",
        "minimal unset",
        "low unset",
    ]
    asked = [{"effort": "minimal", "summary": "auto"}, {"effort": None}, {}]
    prompts = await prompts_of("/v1/responses", *({"input": "Hi", "reasoning": fields} for fields in asked))
    assert [prompt.partition("<")[0] for prompt in prompts] == ["minimal unset", "unset unset", "unset unset"]


async def test_verbosity_is_a_variable_of_the_template(prompts_of):
    template = "{{ verbosity | default('unset') }}"
    chats = [{"messages": HI}, {"messages": HI, "verbosity": "low"}]
    assert await prompts_of("/v1/chat/completions", *chats, template=template) == ["unset", "low"]
    response = {"input": "Hi", "text": {"verbosity": "high"}}
    assert await prompts_of("/v1/responses", response, template=template) == ["high"]


async def test_an_effort_that_the_template_does_not_read_is_said_once_in_the_log(prompts_of, caplog):
    caplog.set_level(logging.INFO, "fastdecode.api.preparation")
    effort = {"messages": HI, "reasoning_effort": "xhigh"}
    plain, *others = await prompts_of(
        "/v1/chat/completions", {"messages": HI}, effort, effort, template="{{ messages }}"
    )
    assert others == [plain] * 2
    assert [r.getMessage() for r in caplog.records if r.name == "fastdecode.api.preparation"] == [
        "reasoning_effort xhigh has no effect: the model's chat template does not read it"
    ]


async def test_the_effort_of_a_response_is_repeated_and_checked(tmp_path):
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path, chat_template=TEMPLATE))
    async with served(ScriptedEngine([5]), tokenizer) as client:
        response = await client.openai.responses.create(model=MODEL, input="Hi", reasoning={"effort": "low"})
        assert response.reasoning.effort == "low"
        for fields, param in (({"effort": "endless"}, "reasoning.effort"), ({"depth": 1}, "reasoning.depth")):
            status, body = await client.post("/v1/responses", {"input": "Hi", "reasoning": fields})
            assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
async def test_the_reasoning_of_a_turn_reaches_the_template(prompts_of, name):
    result = {"role": "tool", "tool_call_id": "a12345678", "content": "7"}
    turns = [
        [{"role": "assistant", "content": None, "tool_calls": [CALL], name: "First f."}, result],
        [{"role": "assistant", "content": "Well.", name: "Hm."}, *HI],
        [{"role": "assistant", name: "Hm."}],
    ]
    prompts = await prompts_of("/v1/chat/completions", *({"messages": HI + turn} for turn in turns))
    assert [prompt.partition("Hi")[2] for prompt in prompts] == [
        "<assistant>(First f.)[f]<tool>7",
        "<assistant>(Hm.)Well.<user>Hi",
        "<assistant>(Hm.)",
    ]


async def test_the_reasoning_items_of_a_response_reach_the_template(prompts_of):
    def thought(text, where="content", kind="reasoning_text"):
        return {"type": "reasoning", "id": "rs_1", "summary": [], where: [{"type": kind, "text": text}]}

    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "a"}
    output = {"type": "function_call_output", "call_id": "a", "output": "7"}
    answer = {"role": "assistant", "content": "Well."}
    user = {"role": "user", "content": "Hi"}
    encrypted = {"type": "reasoning", "encrypted_content": "x"}
    items = [user, thought("one"), call, output, thought("two"), answer, thought("three"), call, output]
    items += [thought("four", "summary", "summary_text"), answer, encrypted, user]
    [prompt] = await prompts_of("/v1/responses", {"input": items})
    assert prompt.partition("<user>")[2] == (
        "Hi<assistant>(one)[f]<tool>7<assistant>(two)Well.<assistant>(three)[f]<tool>7<assistant>(four)Well.<user>Hi"
    )


async def test_reasoning_alone_is_continued(prompts_of):
    body = {"messages": [*HI, {"role": "assistant", "reasoning": "First"}], "continue_final_message": True}
    assert (await prompts_of("/v1/chat/completions", body))[0].endswith("<assistant>(First")
