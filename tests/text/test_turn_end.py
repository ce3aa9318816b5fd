"""Which tokens end a turn, for the vocabularies and templates of model families, by their published files."""

from __future__ import annotations

import pytest
from models import tokenizers_made
from models.checkpoints import write_tokenizer
from models.tokenizers_made import CHATML

from fastdecode.text.tokenizer import Tokenizer
from fastdecode.text.turn_end import end_of_turn

pytestmark = pytest.mark.quick

PHI3 = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
)
COHERE = "{% for m in messages %}<|START|>{{ m.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
LLAMA2 = "{% for m in messages %}{{ m.content }} </s>{% endfor %}"
#: Opens a channel behind the messages in any case: this is the beginning of an answer and not its end.
OPENING = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}<|channel|>"
REFUSING = "{{ raise_exception('no') }}"
HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|endoftext|>")


@pytest.mark.parametrize(
    ("specials", "template", "declared", "ends"),
    [
        (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), CHATML, ["<|endoftext|>"], ["<|endoftext|>", "<|im_end|>"]),
        (("<|im_start|>", "<|im_end|>", "<|endoftext|>"), CHATML, [], ["<|endoftext|>", "<|im_end|>"]),
        (("<|user|>", "<|end|>", "<|endoftext|>"), PHI3, ["<|endoftext|>"], ["<|endoftext|>", "<|end|>"]),
        (
            ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
            REFUSING,
            [],
            ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
        ),
        (("<end_of_turn>", "<eos>"), REFUSING, ["<eos>"], ["<end_of_turn>", "<eos>"]),
        (HARMONY_TOKENS, HARMONY, ["<|return|>"], ["<|return|>", "<|call|>", "<|endoftext|>"]),
        (HARMONY_TOKENS, HARMONY, ["<|end|>"], ["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]),
        (("<|START|>", "<|END_OF_TURN_TOKEN|>"), COHERE, [], ["<|END_OF_TURN_TOKEN|>"]),
        (("<|channel|>",), OPENING, [], []),
        (("<turn|>", "<|tool_response>"), REFUSING, [], ["<turn|>", "<|tool_response>"]),
        ((), LLAMA2, [], []),
    ],
    ids=str,
)
def test_the_ends_of_a_turn(tmp_path, specials, template, declared, ends):
    directory = write_tokenizer(tmp_path, specials=specials, chat_template=template)
    tokenizer = Tokenizer.from_dir(directory)
    found = end_of_turn(tokenizer, map(tokenizer.token_id, declared), 384)
    assert {tokenizer.token_text(token) for token in found} == {*ends, "</s>"}  # the eos_token of write_tokenizer


def test_ids_beyond_the_vocabulary_and_names_that_are_plain_text_end_nothing(tmp_path):
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path, eos_token=None))
    assert {tokenizer.token_text(t) for t in end_of_turn(tokenizer, (), 400)} == {"<|end|>", "<|im_end|>"}
    assert end_of_turn(tokenizer, (2**32 - 1, 7), 2) == {1}  # <|end|>


@pytest.mark.parametrize("kind", [1, 3, 4, None])
def test_a_gguf_file_ends_turns_whatever_kind_of_token_it_calls_the_end(tmp_path, kind):
    gguf = pytest.importorskip("gguf")
    from models.gguf_made import tokenizer_fields

    fields = tokenizer_fields(tokenizers_made.byte_level(tmp_path / "hf", chat_template=CHATML))
    end = fields["tokenizer.ggml.tokens"].index("<|im_end|>")
    if kind is None:
        del fields["tokenizer.ggml.token_type"]
    else:
        fields["tokenizer.ggml.token_type"][end] = kind
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    for key, value in (fields | {"tokenizer.chat_template": CHATML}).items():
        (writer.add_array if isinstance(value, list) else writer.add_string)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_dir(tmp_path / "t.gguf")
    assert end in end_of_turn(tokenizer, (), 400)
    assert tokenizer.encode("Hi<|im_end|>")[-1] == end and tokenizer.decode([end]) == ""
