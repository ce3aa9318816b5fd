"""The parsers of tool calls and reasoning: by hand-written messages in each model family's own form, cut anywhere."""

from __future__ import annotations

import json
import random
import time

import pytest

from fastdecode.text.output.deltas import MessageDelta, PlainParser, Tool
from fastdecode.text.output.forms import TOOL_FORMS, reasoning_form, tool_form
from fastdecode.text.output.reasoning import ThinkParser

pytestmark = pytest.mark.quick

TOOLS = [Tool("weather"), Tool("add"), Tool("no_args")]
W = ("weather", {"city": 'Zürich "old" {town}', "days": [1, {"a": "}"}]})
A = ("add", {"a": 1, "b": -2.5e3})


def js(call, key="arguments", **options):
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False, **options)


def gpt_oss(call, recipient_first=False):
    args = json.dumps(call[1], ensure_ascii=False)
    if recipient_first:
        return f" to=functions.{call[0]}<|channel|>commentary json<|message|>{args}<|call|>"
    return f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{args}<|call|>"


THOUGHT = "<|channel|>analysis<|message|>Let me <see>.<|end|><|start|>assistant"

#: form, text, content, reasoning, calls
CASES = {
    "hermes one": ("hermes", f"<tool_call>\n{js(W)}\n</tool_call>", "", "", [W]),
    "hermes two": (
        "hermes",
        f"Sure. <tool_call>\n{js(W)}\n</tool_call>\n<tool_call>{js(A)}</tool_call>",
        "Sure.",
        "",
        [W, A],
    ),
    "hermes indented": ("hermes", f"<tool_call>{js(A, indent=2)}</tool_call>\n", "", "", [A]),
    "hermes text": ("hermes", "a < b, <tool> and\n\n more ", "a < b, <tool> and\n\n more ", "", []),
    "hermes text after": ("hermes", f"<tool_call>{js(A)}</tool_call>\n\nDone now.", "Done now.", "", [A]),
    "hermes no end tag": ("hermes", f"<tool_call>\n{js(A)}", "", "", [A]),
    "hermes no json": ("hermes", "<tool_call>weather(1)", "<tool_call>weather(1)", "", []),
    "hermes no name": ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', "", []),
    "hermes arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        "",
        "",
        [("add", {"a": 1})],
    ),
    "hermes arguments as text": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        "",
        [("add", {"a": 1})],
    ),
    "llama3 bare": ("llama3", js(W, "parameters"), "", "", [W]),
    "llama3 tag": ("llama3", "<|python_tag|>" + js(A, "parameters"), "", "", [A]),
    "llama3 two": ("llama3", js(W, "parameters") + "; " + js(A, "parameters"), "", "", [W, A]),
    "llama3 text": ("llama3", "No {braces} here.", "No {braces} here.", "", []),
    "llama3 other json": ("llama3", '{"answer": 42}', '{"answer": 42}', "", []),
    "llama3 other name": ("llama3", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', "", []),
    "llama3 cut json": ("llama3", '{"na', '{"na', "", []),
    "mistral list": ("mistral", f"[TOOL_CALLS] [{js(W)}, {js(A)}]", "", "", [W, A]),
    "mistral text and list": ("mistral", f"Well [1] . [TOOL_CALLS][{js(A)}]", "Well [1] .", "", [A]),
    "mistral args": (
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{json.dumps(W[1])}[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{json.dumps(A[1])}",
        "",
        "",
        [W, A],
    ),
    "mistral args without a call": ("mistral", "[TOOL_CALLS]add[ARGS]} Done.", "[TOOL_CALLS]add[ARGS]} Done.", "", []),
    "mistral without [ARGS]": ("mistral", '[TOOL_CALLS]add{"a": 1}', '[TOOL_CALLS]add{"a": 1}', "", []),
    "mistral text": ("mistral", "See [TOOL_KIT] [1", "See [TOOL_KIT] [1", "", []),
    "gpt-oss call": ("gpt-oss", THOUGHT + gpt_oss(W), "", "Let me <see>.", [W]),
    "gpt-oss recipient first": ("gpt-oss", gpt_oss(A, True), "", "", [A]),
    "gpt-oss final": (
        "gpt-oss",
        THOUGHT + "<|channel|>final<|message|>a <| b<|return|>",
        "a <| b",
        "Let me <see>.",
        [],
    ),
    "gpt-oss preamble": (
        "gpt-oss",
        "<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant" + gpt_oss(A),
        "I'll look.",
        "",
        [A],
    ),
    "gpt-oss without its end": ("gpt-oss", gpt_oss(A).removesuffix("<|call|>"), "", "", [A]),
    "gpt-oss plain": ("gpt-oss", "Hello", "Hello", "", []),
}


#: What is written in place of the arguments of a call, and what the arguments are.
ARGUMENTS = {
    "missing": (None, "{}"),
    "null": ("null", "{}"),
    "empty": ('""', "{}"),
    "blank": ('" "', "{}"),
    "null in text": ('"null"', "{}"),
    "object": ('{"a": null}', '{"a": null}'),
    "text": ('"{\\"a\\": 1}"', '{"a": 1}'),
    "list": ("[1]", "[1]"),
}
#: Calls as JSON objects, with ARGS for the key of the arguments and their value.
OBJECT_CALLS = {
    "hermes": '<tool_call>\n{"name": "no_args"ARGS}\n</tool_call>',
    "hermes without its end": '<tool_call>{"name": "no_args"ARGS}',
    "llama3": '{"name": "no_args"ARGS}',
    "llama3 tag": '<|python_tag|>{"name": "no_args"ARGS}',
    "mistral": '[TOOL_CALLS][{"name": "no_args"ARGS}]',
}
#: Calls whose arguments stand by themselves.
PLAIN_CALLS = {
    "mistral": "[TOOL_CALLS]no_args[ARGS]ARGS",
    "mistral, then another": '[TOOL_CALLS]no_args[ARGS]ARGS[TOOL_CALLS]add[ARGS]{"a": 1}',
    "gpt-oss": "<|channel|>commentary to=functions.no_args <|constrain|>json<|message|>ARGS<|call|>",
    "gpt-oss without its end": "<|channel|>commentary to=functions.no_args<|message|>ARGS",
}
#: Text that is no call in its form, and is content as it stands.
CONTENT = {
    "hermes": [
        '<tool_call>\n{"answer": 42}\n</tool_call>',
        '<tool_call>\n{"function": {"name": "add", "arguments": {}}}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call> and more',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        "Well, <tool_call>\nadd(1)\n</tool_call>",
        "<tool_call>",
        '<tool_call> {"na',
        "</tool_call> {",
    ],
    "llama3": [
        '{"answer": 42}',
        '<|python_tag|>{"answer": 42}',
        '  {"type": "function", "function": {"name": "add"}} end',
        '<|python_tag|>brave_search.call(query="x")',
        '[{"name": "add", "parameters": {}}]',
        '{"name": "add',
        "<|python_tag|>",
        '{"parameters": {}}',
    ],
    "mistral": [
        '[TOOL_CALLS][{"function": {"name": "add", "arguments": {}}}]',
        '[TOOL_CALLS] ["add", 5]',
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] add (1)\nand more",
        '[TOOL_CALLS]add[ARGS]"a" b, Done.',
        "[TOOL_CALLS]add[ARGS]nullify",
        "[TOOL_CALLS]a b[ARGS]{}",
    ],
    "gpt-oss": ["Hello <b>", "topic: x", "to", '{"answer": 42}', "Hi<|end|>"],
}


def parse(parser, pieces, cut=False):
    delta = MessageDelta()
    for piece in pieces:
        delta += parser.push(piece)
    return delta + parser.finish(cut=cut)


def calls_of(delta):
    calls = []
    for call in delta.calls:
        if call.name is not None:
            assert call.index == len(calls)
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    return [(name, json.loads(arguments) if arguments else None) for name, arguments in calls]


def cuts(text, seed):
    rng, pieces = random.Random(seed), []
    while text:
        n = rng.choice([1, 1, 2, 3, 7, 40])
        pieces.append(text[:n])
        text = text[n:]
    return pieces


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [None, -1, *range(6)], ids=str)
def test_messages_cut_anywhere(case, seed):
    form, text, content, reasoning, calls = CASES[case]
    pieces = [text] if seed is None else list(text) if seed == -1 else cuts(text, seed)
    delta = parse(TOOL_FORMS[form].parser(TOOLS, parallel=True), pieces)
    assert (delta.content, delta.reasoning) == (content, reasoning)
    assert calls_of(delta) == calls


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("case", OBJECT_CALLS)
def test_a_call_without_arguments_has_an_empty_object(case, arguments):
    form, (written, expected) = case.split()[0], ARGUMENTS[arguments]
    key = "parameters" if form == "llama3" else "arguments"
    text = OBJECT_CALLS[case].replace("ARGS", "" if written is None else f', "{key}": {written}')
    for pieces in ([text], list(text), cuts(text, 1)):
        delta = parse(TOOL_FORMS[form].parser(TOOLS, parallel=True), pieces)
        assert calls_of(delta) == [("no_args", json.loads(expected))] and delta.content == ""


@pytest.mark.parametrize("written", ["", " \n", "null", " null ", "{}", ' {"a": 1}'])
@pytest.mark.parametrize("case", PLAIN_CALLS)
def test_arguments_that_stand_by_themselves(case, written):
    text = PLAIN_CALLS[case].replace("ARGS", "$").replace("[$]", "[ARGS]").replace("$", written)
    for pieces in ([text], list(text), cuts(text, 1)):
        delta = parse(TOOL_FORMS[case.split()[0].strip(",")].parser(TOOLS, parallel=True), pieces)
        assert calls_of(delta)[0] == ("no_args", json.loads(written) or {} if written.strip() else {})
        assert len(calls_of(delta)) == 1 + ("another" in case) and delta.content.strip() == ""


def test_a_name_alone_is_a_call_if_a_tool_has_it():
    for text, name in (("[TOOL_CALLS]no_args", "no_args"), ("[TOOL_CALLS]nobody", None)):
        delta = parse(TOOL_FORMS["mistral"].parser(TOOLS, parallel=True), list(text))
        assert calls_of(delta) == ([(name, {})] if name else []) and delta.content == ("" if name else text)


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in CONTENT.items() for text in texts])
def test_text_that_is_no_call_is_content(form, text):
    for pieces in ([text], list(text), cuts(text, 1)):
        delta = parse(TOOL_FORMS[form].parser(TOOLS, parallel=True), pieces)
        assert delta.content == text.removesuffix("<|end|>") and not delta.calls


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ("hermes", f"<tool_call>{js(A)}{js(W)}</tool_call>", js(W) + "</tool_call>"),
        ("hermes", f"<tool_call>{js(A)}\nThat is it.", "That is it."),
        ("hermes", f"<tool_call>{js(A)}</tool_call>\n<tool_call>x", "<tool_call>x"),
        ("llama3", js(A, "parameters") + "; <|python_tag|>print()", "<|python_tag|>print()"),
        ("llama3", js(A, "parameters") + '; {"answer": 42}', '{"answer": 42}'),
        ("mistral", f'[TOOL_CALLS][{js(A)}, {{"answer": 42}}]', '{"answer": 42}]'),
        ("mistral", f"[TOOL_CALLS][{js(A)}, more", "more"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": -2.5e3} more', "more"),
        ("gpt-oss", gpt_oss(A).removesuffix("<|call|>") + " more <|call|>", "more "),
        ("gpt-oss", gpt_oss(A) + "Hello", "Hello"),
        ("gpt-oss", gpt_oss(A) + "<|start|>assistant<|channel|>commentary to=functions.f<|message|>f()<|call|>", "f()"),
        ("gpt-oss", gpt_oss(A) + "<|start|>assistant Well.<|end|>", "assistant Well."),
    ],
)
def test_text_behind_a_call_is_content(form, text, content):
    for pieces in ([text], list(text), cuts(text, 1)):
        delta = parse(TOOL_FORMS[form].parser(TOOLS, parallel=True), pieces)
        assert calls_of(delta) == [A] and delta.content == content


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "add"', "{}"),
        ('{"name": "add", "arguments": nul', "{}"),
        ('{"name": "add", "arguments": {"a": 1', '{"a": 1'),
        ('{"name": "add", "arguments": "{\\"a\\": \\', '{"a":'),
        ('{"name": "add", "arguments": "a\\ud83d', "a"),  # half of a character
    ],
)
def test_a_call_that_is_cut_off_shows_what_has_come_of_it(text, arguments):
    for pieces in ([text], list(text)):
        delta = parse(TOOL_FORMS["hermes"].parser(TOOLS, parallel=True), ["<tool_call>", *pieces])
        assert [(call.name) for call in delta.calls if call.name] == ["add"] and delta.content == ""
        assert "".join(call.arguments for call in delta.calls) == arguments


def test_half_of_a_character_is_no_name():
    """No text has it: the answer's JSON could not."""
    text = '<tool_call>{"name": "add\\ud83d", "arguments": {}}</tool_call>'
    assert parse(TOOL_FORMS["hermes"].parser(TOOLS, parallel=True), [text]) == MessageDelta(content=text)


LONG = 200_000


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("gpt-oss", "<|channel|>" + " " * LONG + "!<|message|>"),
        ("gpt-oss", " " * LONG + "to=" + "a" * LONG + "!<|channel|>" + "a" * LONG + "!<|message|>"),
        ("gpt-oss", "<|end|>" * LONG),
        ("gpt-oss", "<|channel|>commentary to=functions.add<|message|>{" + " " * 4 * LONG + "}<|call|>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "' + "a" * 4 * LONG + '"}}</tool_call>'),
    ],
    ids=["blanks", "words", "ends", "arguments", "object"],
)
def test_the_time_of_a_parser_is_linear(form, text):
    """The time of one that reads what it has read again for each character, or tries each way to match, is endless."""
    begin = time.thread_time()
    parse(TOOL_FORMS[form].parser(TOOLS, parallel=True), [text])
    assert time.thread_time() - begin < 3


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ("hermes", "Sure. <tool_c", "Sure."),
        ("hermes", "<tool_call>", ""),
        ("hermes", '<tool_call>\n{"na', ""),
        ("hermes", f"<tool_call>{js(A)}</tool_call>\n<tool", ""),
        ("hermes", "Sure, \n", "Sure, \n"),
        ("hermes", "<b", "<b"),
        ("llama3", "<|python_t", ""),
        ("llama3", '<|python_tag|>{"na', ""),
        ("llama3", '{"answer": 4', '{"answer": 4'),
        ("mistral", "Sure. [TOOL_", "Sure."),
        ("mistral", "[TOOL_CALLS]wea", ""),
        ("mistral", '[TOOL_CALLS][{"na', ""),
        ("gpt-oss", "<|channel|>final<|message|>Sure.<|en", "Sure."),
    ],
)
def test_a_call_that_is_cut_off_within_its_marker_or_before_its_name_shows_nothing(form, text, content):
    for pieces in ([text], list(text)):
        delta = parse(TOOL_FORMS[form].parser(TOOLS, parallel=True), pieces, cut=True)
        assert delta.content == content and len(calls_of(delta)) == text.count("</tool_call>")


@pytest.mark.parametrize("text", ["<thi", "<think>Hm.</th"])
def test_reasoning_that_is_cut_off_within_its_marker_shows_no_marker(text):
    for pieces in ([text], list(text)):
        delta = parse(ThinkParser(PlainParser(), begun=False), pieces, cut=True)
        assert (delta.content, delta.reasoning) == ("", text[7:10])


@pytest.mark.parametrize("form", TOOL_FORMS)
@pytest.mark.parametrize("seed", range(100))
def test_nothing_that_a_model_writes_is_lost(form, seed):
    """Random pieces of the form, in any order: however the text is cut, the deltas add up to the same, and every word
    reaches the client."""
    rng, words = random.Random(seed), iter(range(100))
    pieces = ["{", "}", '"name": "add"', '"arguments": {}', ", ", " ", "\n", '{"name": "add"}', "[", "]", "null", "to="]
    pieces += [*TOOL_FORMS[form].markers, "<|message|>"] if form != "llama3" else ["<|python_tag|>", "; "]
    text = ""
    for _ in range(rng.randint(1, 12)):
        # Behind gpt-oss's <|channel|> a word is the name of a channel.
        wordy = rng.random() < 0.4 and not text.rstrip().endswith(("<|channel|>", "<|constrain|>", "<|start|>", "to="))
        text += f"w{next(words)}, " if wordy else rng.choice(pieces)
    whole = parse(TOOL_FORMS[form].parser(TOOLS, parallel=True), [text])
    told = whole.content + whole.reasoning + "".join((call.name or "") + call.arguments for call in whole.calls)
    assert [f"w{i}, " for i in range(next(words)) if f"w{i}" not in told] == [], text
    for n in (0, 1):
        cut = parse(TOOL_FORMS[form].parser(TOOLS, parallel=True), list(text) if n else cuts(text, seed))
        assert (cut.content, cut.reasoning) == (whole.content, whole.reasoning), text


@pytest.mark.parametrize("case", [case for case, values in CASES.items() if len(values[4]) == 2])
def test_without_parallel_calls_the_first_one_stays(case):
    form, text, content, _, calls = CASES[case]
    delta = parse(TOOL_FORMS[form].parser(TOOLS, parallel=False), list(text))
    assert (delta.content, calls_of(delta)) == (content, calls[:1])


@pytest.mark.parametrize("form", sorted({values[0] for values in CASES.values()} & TOOL_FORMS.keys()))
def test_arguments_stream_as_they_come(form):
    """The text of the arguments is not held back to their end."""
    text = next(values[1] for case, values in CASES.items() if values[0] == form and values[4][:1] == [W])
    parser, before = TOOL_FORMS[form].parser(TOOLS, parallel=True), 0
    for character in text:
        before += sum(len(call.arguments) > 0 for call in parser.push(character).calls)
    assert before > 20


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("I see.</think>\n\nYes.", "Yes.", "I see."),
        ("I see. < </thin", "", "I see. < </thin"),
        ("a</think>", "", "a"),
    ],
)
def test_think(begun, text, content, reasoning):
    text = text if begun else "\n<think>" + text
    for pieces in ([text], list(text), cuts(text, 1)):
        delta = parse(ThinkParser(PlainParser(), begun=begun), pieces)
        assert (delta.content, delta.reasoning) == (content, reasoning)


@pytest.mark.parametrize("text", ["Yes.", " \n", "", "<thin", "<b>x</b>", "a <think> b"])
def test_an_answer_without_reasoning(text):
    for pieces in ([text], list(text)):
        delta = parse(ThinkParser(PlainParser(), begun=False), pieces)
        assert (delta.content, delta.reasoning) == (text, "")


def test_a_call_behind_reasoning():
    text = f"<think>hm <tool_call></think>\n\n<tool_call>{js(A)}</tool_call>"
    delta = parse(ThinkParser(TOOL_FORMS["hermes"].parser(TOOLS, parallel=True), begun=False), list(text))
    assert (delta.content, delta.reasoning, calls_of(delta)) == ("", "hm <tool_call>", [A])


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes", None),
        ("{% if tools %}<tool_call>{% endif %}</think>", "hermes", "think"),
        ("{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
        ("{{ tools }}<|start_header_id|>", "llama3", None),
        ("{{ tools }}<|channel|>", "gpt-oss", "gpt-oss"),
        ("<|start_header_id|>", "generic", None),
        ("", None, None),
        ("{{ tools }}", None, None),
    ],
)
def test_a_template_tells_its_forms(template, tools, reasoning):
    form = tool_form("auto", template)
    assert (form and form.name) == tools
    assert reasoning_form("auto", template) == reasoning
    assert tool_form("mistral", template) is TOOL_FORMS["mistral"]
    assert reasoning_form("none", template) is None and reasoning_form("think", template) == "think"
