"""Chat templates against transformers' apply_chat_template, on a tokenizer trained here."""

from __future__ import annotations

import pytest
from models import tokenizers_made
from models.tokenizers_made import CHATML
from transformers import AutoTokenizer

from fastdecode.text import chat_template
from fastdecode.text.chat_template import ChatTemplateError
from fastdecode.text.output.dialogue import Dialogue
from fastdecode.text.tokenizer import Tokenizer
from fastdecode.text.turn_end import end_of_turn

pytestmark = pytest.mark.quick

QUESTION = {"role": "user", "content": "Yes or No, in a table | <, is it the end?"}
STRIPPING = CHATML.replace("message['content']", "message['content'] | trim")
#: Qwen 3's way: the reasoning of the last message stands before its content.
THINKING = CHATML.replace(
    "+ message['content']",
    "+ ('<think>\n' + message.reasoning_content + '\n</think>\n\n' if message.reasoning_content else '')"
    " + message['content'].lstrip('\n')",
)
#: A reminder stands behind the last message, and repeats its beginning.
ECHOING = CHATML + "{{ messages[-1]['content'][:3] }}"
PREFILLS = ["|", "<", "_", "end", "", "\n", "Yes ", "  Yes, ", "<|im_end|>", "No, in a table", "ÄÖ 世界 "]


@pytest.fixture
def pair(tmp_path):
    """Makes our tokenizer and transformers' own with some templates."""

    def make(template):
        directory = tokenizers_made.byte_level(tmp_path, chat_template=template)
        return Tokenizer.from_dir(directory), AutoTokenizer.from_pretrained(directory)

    return make


@pytest.mark.parametrize("template", [CHATML, STRIPPING, THINKING, ECHOING], ids=["chatml", "strip", "think", "echo"])
@pytest.mark.parametrize("reasoning", [None, "It is. The end"], ids=["", "reasoning"])
def test_a_continued_message_ends_where_transformers_ends_it(pair, template, reasoning):
    ours, theirs = pair(template)
    for prefill in PREFILLS:
        last = {"role": "assistant", "content": prefill} | ({"reasoning_content": reasoning} if reasoning else {})
        expected = theirs.apply_chat_template([QUESTION, last], tokenize=False, continue_final_message=True)
        text = ours.render_chat([QUESTION, last], add_generation_prompt=False, continue_final_message=True)
        assert text == expected, prefill


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", CHATML.replace("message['content']", "'content'")])
def test_a_message_that_the_template_does_not_show_cannot_be_continued(pair, template):
    ours, theirs = pair(template)
    chat = [QUESTION, {"role": "assistant", "content": "Well"}]
    with pytest.raises(ValueError, match="continue_final_message"):
        theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "content", "thought"),
    [
        ("think", "<|im_start|>assistant\n<think>\nHm", ", so.</think>Yes", "Yes", ", so."),
        ("think", "is <think> a tag?<|im_start|>assistant\n<think>Hm</think>\nYe", "s", "s", ""),
        ("gpt-oss", "<|start|>assistant<|channel|>final<|message|>Ye", "s<|return|>", "s", ""),
        ("gpt-oss", "<|start|>assistant<|channel|>analysis<|message|>Hm", ", so.<|end|>", "", ", so."),
    ],
)
def test_a_continued_message_is_read_from_where_it_was_cut(pair, reasoning, prompt, text, content, thought):
    dialogue = Dialogue(pair(CHATML)[0], None, reasoning=reasoning, continued=True)
    parser = dialogue.parser(prompt)
    delta = parser.push(text) + parser.finish()
    assert (delta.content, delta.reasoning) == (content, thought)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for i in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    ],
    ids=["ranges", "macros"],
)
def test_a_template_without_end_is_named_to_the_operator_alone(template, tmp_path, monkeypatch):
    """At the start, which looks for the end of a turn, with its file; for a request, whose client gets the message,
    without."""
    monkeypatch.setattr(chat_template, "_MOST_SECONDS", 0.1)
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path, chat_template=template))
    message = r"the chat template is not done with the messages after 0\.1 s"
    with pytest.raises(ChatTemplateError, match=rf"/tokenizer_config\.json: {message}"):
        end_of_turn(tokenizer, (), 400)
    with pytest.raises(ChatTemplateError, match=f"^{message}$"):
        tokenizer.render_chat([QUESTION])


def test_a_range_that_no_conversation_needs_is_refused(pair):
    ours, _ = pair("{% for i in range(1000000000) %}{% endfor %}")
    with pytest.raises(ChatTemplateError, match="Range too big"):
        ours.render_chat([QUESTION])


# -- templates by name ------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "now", "description": "the time", "parameters": {}}}]
NAMED = {"default": "plain", "tool_use": "{{ tools | tojson }}", "rag": "rag"}


def place(directory, where, templates):
    """Write a model's templates to one of the places where they may stand."""
    if where == "list":
        listed = [{"name": name, "template": template} for name, template in templates.items()]
        return tokenizers_made.byte_level(directory, chat_template=listed)
    config = CHATML if where == "files over config" else None
    tokenizers_made.byte_level(directory, chat_template=config)
    (directory / "additional_chat_templates").mkdir()
    for name, template in templates.items():
        file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (directory / file).write_text(template)
    return directory


@pytest.mark.parametrize("names", [("default", "tool_use", "rag"), ("default", "rag"), ("tool_use", "rag")], ids=str)
@pytest.mark.parametrize("where", ["list", "files", "files over config"])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_the_template_of_a_chat_is_the_one_that_transformers_takes(tmp_path, where, names, tools):
    directory = place(tmp_path, where, {name: NAMED[name] for name in names})
    ours, theirs = Tokenizer.from_dir(directory), AutoTokenizer.from_pretrained(directory)
    if names[0] != "default" and tools is None:
        with pytest.raises(ValueError, match="no default"):
            theirs.apply_chat_template([QUESTION], tokenize=False)
        if where == "files over config":  # the one in tokenizer_config.json is still there
            assert ours.render_chat([QUESTION]).endswith("<|im_start|>assistant\n")
            return
        with pytest.raises(ChatTemplateError, match="named rag, tool_use"):
            ours.render_chat([QUESTION])
        return
    expected = theirs.apply_chat_template([QUESTION], tools=tools, tokenize=False)
    assert ours.render_chat([QUESTION], tools=tools) == expected
    assert ours.template_source(tools=bool(tools)) == theirs.get_chat_template(tools=tools)


def test_a_template_of_ones_own_replaces_all_of_the_models(tmp_path):
    tokenizer = Tokenizer.from_dir(place(tmp_path, "list", NAMED), chat_template="own")
    assert tokenizer.render_chat([QUESTION]) == tokenizer.render_chat([QUESTION], tools=TOOLS) == "own"


def test_named_templates_of_a_gguf_file_as_the_package_gguf_writes_them(tmp_path):
    gguf = pytest.importorskip("gguf")
    from models.gguf_made import tokenizer_fields

    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    for key, value in tokenizer_fields(tokenizers_made.byte_level(tmp_path / "hf")).items():
        (writer.add_array if isinstance(value, list) else writer.add_string)(key, value)
    writer.add_chat_template([{"name": name, "template": template} for name, template in NAMED.items()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_dir(tmp_path / "t.gguf")
    assert tokenizer.render_chat([QUESTION]) == "plain"
    assert tokenizer.template_source(tools=True) == NAMED["tool_use"]


# -- reasoning, effort and tools without a description ----------------------------------------------------------------

#: What gpt-oss's template reads, and what it refuses.
HARMONY = """{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' -%}
{{- 'Reasoning: ' + effort + '\n' }}
{%- for tool in tools or [] %}{{- '// ' + tool.function.description + '\n' + tool.function.name }}{% endfor %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if message.content and message.thinking %}{{- raise_exception('both') }}{% endif %}
        {{- '<|channel|>analysis' + (message.content or message.thinking or '') + message.tool_calls[0].function.name }}
    {%- elif loop.last and 'thinking' in message %}
        {{- '<|channel|>analysis' + message.thinking + '<|end|>' + message.content }}
    {%- else %}
        {{- message.role + (message.content or '') }}
    {%- endif %}
{%- endfor %}"""
CALLS = [{"type": "function", "function": {"name": "now", "arguments": {}}}]


@pytest.mark.parametrize("template", [HARMONY, THINKING], ids=["gpt-oss", "qwen"])
@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("effort", [{}, {"reasoning_effort": "high"}], ids=["", "high"])
def test_the_reasoning_of_a_turn_reaches_the_template_as_with_transformers(pair, template, name, effort):
    ours, theirs = pair(template)
    for turn in (
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "assistant", "content": "It is."},
    ):
        chat = [QUESTION, turn | {name: "Hm, the end."}]
        expected = theirs.apply_chat_template(chat, tokenize=False, **effort)
        assert ours.render_chat(chat, add_generation_prompt=False, **effort) == expected
        assert "Hm, the end." in expected


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
def test_a_template_finds_reasoning_by_whatever_name_it_reads(pair, name, read):
    template = "{% for m in messages %}{{ m." + read + " if m." + read + " is defined }}{% endfor %}"
    chat = [QUESTION, {"role": "assistant", "content": "Yes", name: "Hm"}]
    assert pair(template)[0].render_chat(chat) == "Hm"


def test_content_and_reasoning_before_a_call_where_the_template_takes_one_of_them(pair):
    turn = {"role": "assistant", "content": "I look.", "tool_calls": CALLS, "reasoning_content": "Hm"}
    assert pair(HARMONY)[0].render_chat([QUESTION, turn]).endswith("<|channel|>analysisI look.now")
    assert "<think>\nHm\n</think>" in pair(THINKING)[0].render_chat([QUESTION, turn])


def test_reasoning_is_continued_as_by_transformers(pair):
    last = {"role": "assistant", "content": "", "reasoning_content": "First |"}
    for template in (HARMONY, THINKING):
        ours, theirs = pair(template)
        options = {"tokenize": False, "continue_final_message": "reasoning_content"}
        expected = theirs.apply_chat_template([QUESTION, last], **options)
        without_content = {name: value for name, value in last.items() if name != "content"}
        text = ours.render_chat([QUESTION, without_content], add_generation_prompt=False, continue_final_message=True)
        assert text == expected and text.endswith("First |")


def test_a_tool_without_a_description(pair):
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    assert "// \nnow" in pair(HARMONY)[0].render_chat([QUESTION], tools=[tool])
    ours, theirs = pair("{{ tools | tojson }}{{ tools[0].function.get('description', 'none') }}")
    assert ours.render_chat([QUESTION], tools=[tool]) == theirs.apply_chat_template(
        [QUESTION], tools=[tool], tokenize=False
    )
