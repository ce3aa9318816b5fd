"""Tokenizers in GGUF files, against the tokenizer.json that they were made from."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
from models.gguf_made import tokenizer_fields
from models.tokenizers_made import CHATML, CORPUS, byte_level, metaspace
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import GemmaTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from fastdecode.gguf.file import GGUFFile, ModelSource
from fastdecode.text.chat_template import ChatTemplateError
from fastdecode.text.gguf_tokenizer import read_tokenizer
from fastdecode.text.tokenizer import Tokenizer, TokenizerError

pytestmark = pytest.mark.quick

TEXTS = [
    *CORPUS,
    "",
    " ",
    "12 345 6789",
    "\n 123\n\n x",
    "don't WE'LL",
    "a<|im_start|>b<think>c",
    "Größe\u0301",
    "a\u0331\u0331\u0331 नमस्ते",
    "helloWorld's NASAs IT'S ǅabc1234 //\n/x",
    "x=(y) 中文abc かな12カナ、 中 [a]\\b",
]
_PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)
_REST = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
#: In Kimi's own code, which makes a tokenizer of tiktoken with these alternatives.
_KIMI_K2 = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
#: `tokenizer.ggml.pre` -> the pre-tokenizer of the tokenizer.json that models of this name are published with.
PRE = {
    "gpt-2": _PLAIN,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _PLAIN]),
    "glm4": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _REST]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _REST]),
    "qwen2": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")), "isolated"), _REST]
    ),
    "seed-coder": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_SEED_CODER), "isolated"), _REST]),
    "deepseek-v3": pre_tokenizers.Sequence(
        [*(pre_tokenizers.Split(Regex(words), "isolated") for words in _DEEPSEEK_V3), _REST]
    ),
    "kimi-k2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("|".join(_KIMI_K2)), "isolated"), _REST]),
    "qwen35": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"), _REST]),
    **{
        name: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated"), _REST])
        for name in ("gpt-4o", "minimax-m2", "tekken")
    },
}


def write(path: Path, fields: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_tokenizers(pre, tmp_path):
    directory = byte_level(tmp_path / "hf", chat_template=CHATML)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.pre_tokenizer = PRE[pre]
    if pre.startswith("qwen"):
        backend.normalizer = normalizers.NFC()
    backend.save(str(directory / "tokenizer.json"))
    fields = tokenizer_fields(directory, pre) | {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": CHATML,
    }
    theirs = Tokenizer.from_dir(directory)
    ours = Tokenizer.from_dir(write(tmp_path / "t.gguf", fields))
    cut, _, _ = read_tokenizer(GGUFFile(tmp_path / "t.gguf"))
    for text in TEXTS:
        assert cut.pre_tokenizer.pre_tokenize_str(text) == PRE[pre].pre_tokenize_str(text)
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.render_chat(messages) == theirs.render_chat(messages)


def test_sentence_piece_tokenizers(tmp_path):
    """Scores that rank tokens as the merges do give the same tokens."""
    directory = metaspace(tmp_path / "hf")
    raw = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in raw["model"]["merges"]]
    scores = dict.fromkeys(tokens, -1e6)
    for i, (left, right) in enumerate(merges):
        scores[left + right] = max(scores[left + right], -float(i))
    bos = [token["content"] for token in raw["added_tokens"]]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [scores[token] for token in tokens],
        "tokenizer.ggml.token_type": [3 if token in bos else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.unknown_token_id": tokens.index("<unk>"),
        "tokenizer.ggml.add_bos_token": True,
    }
    theirs, ours = Tokenizer.from_dir(directory), Tokenizer.from_dir(write(tmp_path / "t.gguf", fields))
    for text in TEXTS[:-2]:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == [tokens.index("<s>"), *ids]
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
@pytest.mark.parametrize("pre", ["deepseek-llm", "deepseek-v3"])
def test_words_are_those_of_llama_cpp(pre, tmp_path):
    """The vocabulary has all pairs of bytes, so where pairs begin and end tells how a text is cut."""
    import llama_cpp

    source = random.Random(0)
    pieces = [*"aBcé12 3\n中文かな가.,!/'ǅƻ\u0331𝐀", "  ", "\n\n", " x", "'s", "don't", "ABc", " 中", "。", "。 "]
    texts = [*TEXTS[len(CORPUS) + 6 :], *("".join(source.choices(pieces, k=12)) for _ in range(200))]
    characters = sorted({c for word, _ in _PLAIN.pre_tokenize_str("".join(texts)) for c in word})
    pairs = [(a, b) for a in characters for b in characters if not (a + b).isdecimal()]
    tokens = [*characters, *map("".join, pairs)]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [*map(" ".join, pairs)],
        "tokenizer.ggml.add_bos_token": False,
    }
    path = write(tmp_path / "t.gguf", fields)
    ours, theirs = Tokenizer.from_dir(path), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in texts:
        assert ours.encode(text) == theirs.tokenize(text.encode(), add_bos=False, special=False), text
    theirs.close()


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_sentence_piece_without_a_space_before_texts_is_that_of_llama_cpp(tmp_path):
    """As Gemma's: tokens of several spaces and line breaks that the user has defined, and bytes of other characters."""
    import llama_cpp

    kinds = dict.fromkeys(("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"), 3)
    kinds |= {"<unk>": 2, **dict.fromkeys(("\n\n", "  ", "   ", "<h1>"), 4), **{f"<0x{i:02X}>": 6 for i in range(256)}}
    pieces = ["th", "the", "▁the", "▁t", "he", "▁q", "qu", "▁qu", "ic", "ick", "▁quick", "uick", "▁b", "ro", "wn", "▁▁"]
    tokens = [*kinds, *pieces, *"\n▁abcdefghijklmnopqrstuvwxyz.,!ü"]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) if token not in kinds else 0.0 for i, token in enumerate(tokens)],
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.bos_token_id": tokens.index("<bos>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<eos>"),
        "tokenizer.ggml.unknown_token_id": tokens.index("<unk>"),
        "tokenizer.ggml.add_space_prefix": False,
    }
    path = write(tmp_path / "t.gguf", fields)
    ours, theirs = Tokenizer.from_dir(path), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in (
        *("the quick brown", " the", "the  quick\n\nbrown", "   <h1>ü the", "    quick", "日本 the", "a\nb", "▁▁the"),
        *("<start_of_turn>the\n\n\n", "<end_of_turn>\n<start_of_turn>the\n", "The.,!  ", "the \n\n  the"),
    ):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert ours.encode(text) == [tokens.index("<bos>"), *ids]
        assert ours.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")
    theirs.close()


@pytest.fixture
def gemma4(tmp_path):
    """A tokenizer of Gemma's class in transformers, and a GGUF file that llama.cpp's converter would make of it."""
    marks, visible = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"], ["<|channel>", "<channel|>"]
    trained = Backend(models.BPE(byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁+[^▁\n]*|\n+|[^▁\n]+"), "isolated")
    kept = [*marks, *visible, *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=kept, show_progress=False)
    trained.train_from_iterator([*CORPUS[:-1], "\n\n x", "\n\n\n y", "z    t", "  r", "\n\n"] * 2, trainer)
    raw = json.loads(trained.to_str())["model"]
    theirs = GemmaTokenizer(raw["vocab"], [tuple(merge) for merge in raw["merges"]])
    theirs.add_special_tokens({"additional_special_tokens": marks[5:]})
    theirs.add_tokens([AddedToken(token, normalized=False) for token in visible])
    tokens = sorted(raw["vocab"], key=raw["vocab"].__getitem__)
    kinds = dict.fromkeys(marks, 3) | dict.fromkeys(visible, 4) | dict.fromkeys(kept[len(marks) + 2 :], 6)
    fields = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in raw["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return theirs, write(tmp_path / "t.gguf", fields)


_GEMMA4_TEXTS = [
    *TEXTS,
    " the",
    "the    man  \n\n\n\nif",
    "<|turn>user\n<|channel> a <channel|><turn|>\n",
    "日本 the",
    "▁▁x",
]


def test_gemma_4(gemma4):
    theirs, path = gemma4
    ours = Tokenizer.from_dir(path)
    assert len(theirs.encode(CORPUS[0], add_special_tokens=False)) < len(CORPUS[0]) / 2
    for text in _GEMMA4_TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == [2, *ids]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_gemma_4_is_that_of_llama_cpp(gemma4):
    import llama_cpp

    ours, theirs = Tokenizer.from_dir(gemma4[1]), llama_cpp.Llama(str(gemma4[1]), vocab_only=True, verbose=False)
    for text in _GEMMA4_TEXTS:
        assert ours.encode(text) == theirs.tokenize(text.encode(), add_bos=True, special=True)
    theirs.close()


_SENTENCE_PIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["a", "b"],
    "tokenizer.ggml.scores": [0.0, 0.0],
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no tokenizer"),
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "'bert' is not known; known are gpt2"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "poro-chat"},
            "'poro-chat', is not known",
        ),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b"]}, "2 tokens and 0 scores"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": 1},
            r"/t\.gguf is damaged: 'tokenizer\.ggml\.token_type' is no list of whole numbers",
        ),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": [1, 2]},
            r"'tokenizer\.ggml\.merges' is no list of texts",
        ),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a b"]},
            r"the tokenizer in /[^ ]*/t\.gguf cannot be read",
        ),
        (_SENTENCE_PIECE | {"tokenizer.ggml.unknown_token_id": 2}, "the unknown token is 2, and the tokenizer has 2"),
        (_SENTENCE_PIECE | {"tokenizer.ggml.tokens": ["a", "b" * 5000]}, "has a token of 5000 characters"),
    ],
)
def test_tokenizers_that_are_not_understood_are_named(fields, message, tmp_path):
    path = write(tmp_path / "t.gguf", fields)
    for model in (path, ModelSource.open(path)):
        with pytest.raises(TokenizerError, match=message):
            Tokenizer.from_dir(model)


def test_the_file_of_a_broken_template_is_named(tmp_path):
    fields = tokenizer_fields(byte_level(tmp_path / "hf")) | {"tokenizer.chat_template": "{% if %}"}
    with pytest.raises(ChatTemplateError, match=r"/t\.gguf: the chat template is not valid Jinja: line 1"):
        Tokenizer.from_dir(write(tmp_path / "t.gguf", fields))


def test_damaged_metadata_end_in_a_sentence(tmp_path):
    """Whatever byte is wrong: a tokenizer, or one of the errors that the S-node tells its user."""
    directory = byte_level(tmp_path / "hf", chat_template=CHATML)
    path = write(tmp_path / "t.gguf", tokenizer_fields(directory) | {"tokenizer.chat_template": CHATML})
    whole, rng = path.read_bytes(), random.Random(0)
    refused = set()
    for _ in range(400):
        data = bytearray(whole)
        data[rng.randrange(4, len(data))] = rng.choice([rng.randrange(256), 0, 255])
        path.write_bytes(data)
        try:
            Tokenizer.from_dir(path)
        except (TokenizerError, ChatTemplateError) as error:
            refused.add(str(error))
    assert len(refused) > 20
