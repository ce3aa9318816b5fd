"""The tokenizer against transformers' AutoTokenizer, on tokenizers trained here."""

from __future__ import annotations

import json
import random
import unicodedata

import pytest
from models import tokenizers_made
from models.tokenizers_made import CHATML
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import AutoTokenizer

from fastdecode.text.chat_template import ChatTemplateError
from fastdecode.text.detokenizer import Detokenizer
from fastdecode.text.tokenizer import Tokenizer, TokenizerError

pytestmark = pytest.mark.quick

TEXTS = [
    "",
    " ",
    "Hello",
    " Hello  world ",
    "It is a truth universally acknowledged.\n\n\tBut 12345?",
    "她说你好世界。",
    "안녕 🦙🧑‍🚀👩🏽‍🔬 café 🇳🇱 é",
    "�a�",
    "<|im_start|>user\nhi<|im_end|>\n",
    "</s><s> x<unk>",
    "a <think> b",
    "\r\n \u200b\u00a0\u3000",
]

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now('%Y') %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday is ' + date_string + '.\n' + system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>'
        }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("conversation roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {% generation %}
        {{- " " + message["content"] | trim + eos_token }}
        {% endgeneration %}
    {%- endif %}
{%- endfor %}
"""
TRICKS = """{%- macro show(x) %}{{ x | tojson }}{% endmacro %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
{{ loop.index0 }}:{{ show(m) }}|{{ [m.role, m.content] | tojson(indent=2) }}
    {%- if loop.index > 2 %}{% break %}{% endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ tools is none }}"""

CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Häl\"lo <b>'you'</b> 世界 🦙"},
    {"role": "assistant", "content": " Hi!\n"},
    {"role": "user", "content": "Bye & so on"},
]

ADDED_TOKEN = {"__type": "AddedToken", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def make_tokenizer(kind, directory, **config):
    return getattr(tokenizers_made, kind)(directory, **config)


@pytest.fixture(scope="module", params=["byte_level", "metaspace"])
def model_dir(request, tmp_path_factory):
    return make_tokenizer(request.param, tmp_path_factory.mktemp(request.param), chat_template=CHATML)


@pytest.fixture(scope="module")
def ours(model_dir):
    return Tokenizer.from_dir(model_dir)


@pytest.fixture(scope="module")
def theirs(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_transformers(ours, theirs, text, special):
    assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_equals_transformers(ours, theirs, text):
    ids = theirs.encode(text)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert len(ours.tokens_from(0)) == len(theirs)


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": False},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"bos_token": ADDED_TOKEN | {"content": "<bos>"}},
        {"extra_special_tokens": ["<|extra|>"]},
        {"eos_token": None},
    ],
    ids=lambda config: ",".join(config),
)
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_tokenizer_config_says_which_special_tokens_there_are(tmp_path, kind, config):
    directory = make_tokenizer(kind, tmp_path, chat_template="{{ bos_token }}|{{ eos_token }}", **config)
    ours, theirs = Tokenizer.from_dir(directory), AutoTokenizer.from_pretrained(directory)
    for text in [*TEXTS, "a<|extra|>b <bos> c"]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.render_chat(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False)


def test_tokens_only_listed_in_tokenizer_config_are_added(tmp_path):
    listed = {str(i): {"content": f"<x{i}>", "rstrip": True, "special": bool(i % 2)} for i in (401, 402)}
    directory = tokenizers_made.byte_level(tmp_path, added_tokens_decoder=listed)
    ours, theirs = Tokenizer.from_dir(directory), AutoTokenizer.from_pretrained(directory)
    ids = theirs.encode("a<x401> b<x402> c")
    assert ours.encode("a<x401> b<x402> c") == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, TRICKS], ids=["chatml", "llama3", "mistral", "tricks"])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:2], CHAT[:2]], ids=["four", "one", "system"])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "date_string": "1813"}], ids=["", "variables"])
def test_chats_are_rendered_as_by_transformers(tmp_path, template, messages, variables):
    directory = tokenizers_made.byte_level(tmp_path, chat_template=template)
    ours, theirs = Tokenizer.from_dir(directory), AutoTokenizer.from_pretrained(directory)
    for prompted in (True, False):
        text = ours.render_chat(messages, add_generation_prompt=prompted, **variables)
        options = {"add_generation_prompt": prompted, "return_dict": False} | variables
        assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.encode(text, add_special_tokens=False) == theirs.apply_chat_template(messages, **options)


@pytest.mark.parametrize("where", ["list", "jinja", "json"])
def test_a_template_is_found_wherever_it_may_be(tmp_path, where):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    directory = tokenizers_made.byte_level(tmp_path, chat_template=named if where == "list" else None)
    if where == "jinja":
        (directory / "chat_template.jinja").write_text(CHATML)
    if where == "json":
        (directory / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    expected = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert Tokenizer.from_dir(directory).render_chat([{"role": "user", "content": "x"}]) == expected


def test_a_template_may_refuse_a_conversation(tmp_path):
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path, chat_template=MISTRAL))
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        tokenizer.render_chat([CHAT[2]])


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "{{ messages[0].nothing.at.all }}", "{{ 1 + 'a' }}"],
)
def test_a_template_that_fails_is_a_chat_template_error(tmp_path, template):
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path, chat_template=template))
    with pytest.raises(ChatTemplateError):
        tokenizer.render_chat(CHAT)


def test_no_template(tmp_path):
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat(CHAT)


def test_broken_files_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    tokenizers_made.byte_level(tmp_path, chat_template="{% if %}")
    with pytest.raises(ChatTemplateError, match="not valid Jinja"):
        Tokenizer.from_dir(tmp_path)
    for broken in (
        "[",
        '{"bos_token": 5}',
        '{"added_tokens_decoder": {"1": {}}}',
        '{"added_tokens_decoder": {"x": "a"}}',
        '{"added_tokens_decoder": [1]}',
    ):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
            Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("special", [True, False])
def test_a_tokenizer_that_cannot_encode_is_refused(tmp_path, special):
    """The Rust library panics where a post processor names a token that is not in its table, and fails without the
    token for unknown characters."""
    path = tokenizers_made.byte_level(tmp_path) / "tokenizer.json"
    raw = json.loads(path.read_text())
    if special:
        pieces = [{"SpecialToken": {"id": "<no>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        raw["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}
    else:
        raw["model"] |= {"vocab": {"B": 0}, "merges": [], "unk_token": "<no>"}
    path.write_text(json.dumps(raw))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokenizer cannot encode a text: "):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    "file", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer_config.json"]
)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ " + "not " * 5000 + "1 }}", "the chat template is nested too deeply"),
        ("{% for i in messages %}" * 30 + "{% endfor %}" * 30, "the chat template is nested too deeply"),
        ("{% if %}", "the chat template is not valid Jinja: line 1"),
    ],
    ids=["deep", "loops", "invalid"],
)
def test_the_file_of_a_broken_template_is_named(tmp_path, file, template, message):
    if file == "tokenizer_config.json":
        tokenizers_made.byte_level(tmp_path, chat_template=template)
    else:
        tokenizers_made.byte_level(tmp_path, chat_template=CHATML)
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(template)
    with pytest.raises(ChatTemplateError, match=f"/{file}: {message}"):
        Tokenizer.from_dir(tmp_path)


def test_a_template_file_that_is_not_text_is_named(tmp_path):
    (tokenizers_made.byte_level(tmp_path) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"/chat_template\.jinja is not UTF-8"):
        Tokenizer.from_dir(tmp_path)


def stream(tokenizer, ids, prompt=()):
    detokenizer = Detokenizer.make(tokenizer, prompt)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_decoded_whole(ours, theirs, text):
    ids = theirs.encode(text)
    assert "".join(stream(ours, ids)) == theirs.decode(ids, skip_special_tokens=True)


def test_a_piece_never_holds_a_part_of_a_character(ours, theirs):
    text = "x她说🦙🧑‍🚀 y안é…"
    pieces = stream(ours, theirs.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""  # no character is later than its last byte


def test_tokens_that_end_within_characters_one_after_another(tmp_path):
    """世 is E4 B8 96. With the tokens E4 and B8 96 E4 the text never ends on a whole character, and must still come."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("世")[0][0]
    vocab = {alphabet[0]: 0, alphabet[1:] + alphabet[0]: 1, alphabet[1:]: 2}
    backend = BackendTokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    ours = Tokenizer.from_dir(tokenizers_made.save(tmp_path, backend))
    assert stream(ours, [0, *[1] * 200, 2]) == ["", *["世"] * 201, ""]


@pytest.mark.parametrize("seed", range(10))
def test_random_token_ids(ours, theirs, seed):
    """Random ids: broken bytes, special tokens, ids beyond the vocabulary."""
    rng = random.Random(seed)
    ids = [rng.randrange(len(theirs) + 5) for _ in range(300)]
    if theirs.convert_tokens_to_ids("<0xE4>") is not None:  # see the next test
        ids = [i for i in ids if len(ours.token_bytes(i)) != 1 or ours.token_bytes(i) < b"\x80"]
    assert "".join(stream(ours, ids)) == theirs.decode(ids, skip_special_tokens=True)


def test_a_broken_byte_spares_the_characters_before_it(tmp_path):
    """If each byte is a token, one broken byte makes the library's decoder replace the whole run of byte tokens.

    A stream has already sent the first characters of the run, and cannot take them back.
    """
    ours = Tokenizer.from_dir(tokenizers_made.metaspace(tmp_path))
    byte = {ours.token_bytes(i): i for i in range(len(ours.tokens_from(0)))}
    ids = [byte[bytes([b])] for b in "世".encode() + b"\xe4"]
    assert stream(ours, ids) == ["", "", "世", "", "\ufffd\ufffd\ufffd"]
    assert stream(ours, ids + ids)[-1] != "世"


@pytest.mark.parametrize("cut", range(1, 30))
def test_text_that_continues_a_prompt(ours, cut):
    ids = ours.encode("a café  世界 and 🦙 some more words", add_special_tokens=False)
    before, after = (b"".join(map(ours.token_bytes, part)) for part in (ids[:cut], ids[cut:]))
    known = before.decode(errors="ignore")  # a character that the cut divides belongs to the continuation
    assert "".join(stream(ours, ids[cut:], ids[:cut])) == (before + after).decode()[len(known) :]


def test_token_bytes_joined_are_the_text(ours, theirs):
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert b"".join(map(ours.token_bytes, ids)).decode().lstrip(" ") == theirs.decode(ids).lstrip(" ")
    assert ours.token_bytes(len(theirs) + 1) == b""


# -- what a text takes at least ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_a_text_never_has_fewer_tokens_than_it_is_said_to_have_at_least(tmp_path, normalizer):
    directory = tokenizers_made.byte_level(tmp_path)
    backend = BackendTokenizer.from_file(str(directory / "tokenizer.json"))
    if normalizer is not None:
        backend.normalizer = normalizer
    tokenizer = Tokenizer(backend, {})
    decomposed = unicodedata.normalize("NFD", "안녕하세요 세계 é ệ ᾂ")
    texts = ["the " * 5000, " " * 9000, "a" * 9000, decomposed * 300, "<|im_start|>" * 700, "\n" * 4000 + "x"]
    for text in texts:
        fewest = tokenizer.fewest_tokens(text)
        assert 0 < fewest <= len(tokenizer.encode(text, add_special_tokens=False))


def test_nothing_is_said_of_a_tokenizer_that_may_swallow_text(tmp_path):
    assert Tokenizer.from_dir(tokenizers_made.metaspace(tmp_path / "metaspace")).fewest_tokens("x" * 10**6) == 0
    directory = tokenizers_made.byte_level(tmp_path)
    backend = BackendTokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_tokens([AddedToken("<gap>", rstrip=True)])  # takes any amount of white space with it
    assert Tokenizer(backend, {}).fewest_tokens(" " * 10**6) == 0
