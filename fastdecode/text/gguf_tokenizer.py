"""The tokenizer and the chat templates in a GGUF file's metadata (`tokenizer.ggml.*`, `tokenizer.chat_template`, and
`tokenizer.chat_template.NAME`).

Three kinds of models are read: "gpt2", byte-level BPE, whose way of cutting text into words has a name in
`tokenizer.ggml.pre`; "llama", SentencePiece BPE with a score for each token; and "gemma4", which has merges in place of
scores, and no space before a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fastdecode.gguf.file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # values in tokenizer.ggml.token_type
#: Keys with lists, and what these hold.
_LISTS: dict[str, type] = {
    "tokenizer.ggml.tokens": str,
    "tokenizer.ggml.token_type": int,
    "tokenizer.ggml.merges": str,
    "tokenizer.ggml.scores": float,
}
_KINDS = {str: "texts", int: "whole numbers", float: "floating-point numbers"}
_SPACE = "tokenizer.ggml.add_space_prefix"
_LONGEST_TOKEN = 4096  # characters; a longer one means a damaged file
#: Tokens that end a turn wherever a vocabulary has them, as llama.cpp knows them (src/llama-vocab.cpp).
END_OF_TURN = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<|return|>", "<|call|>"),
        *("<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>"),
    }
)
#: Words of Llama 3, with up to `digits` digits in one.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Words of Qwen3.5, whose letters may have marks.
_QWEN35_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _BEHIND = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#: Words in which a capital behind a small letter begins another one. %s: what may end a word (twice), and how many
#: digits are one word.
_CASED_WORDS = (
    f"{_BEFORE}{_UPPER}*{_LOWER}+%s|{_BEFORE}{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Words of DeepSeek-V3, in three steps: numbers, Chinese and Japanese, and the rest.
_DEEPSEEK_V3_WORDS = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
#: Letters that are capital or small, as DeepSeek-LLM and V2 have them; those of younger alphabets are not among them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
#: Words of DeepSeek-LLM and V2, in six steps.
_DEEPSEEK_LLM_WORDS = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u0800-\u9fa5\uac00-\ud7ff]+",
    r"\p{N}",
)
#: Words of Kimi K2: Chinese ones are apart from others.
_KIMI_WORDS = rf"\p{{Han}}+|{_CASED_WORDS % (_BEHIND, _BEHIND, '{1,3}')}"
_KIMI_WORDS = _KIMI_WORDS.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*")
#: Names in `tokenizer.ggml.pre`, grouped by the way in which a tokenizer cuts text into words.
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_GPT2 = ("gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion")
_LLAMA3 = ("llama-bpe", "llama-v3", "llama3", "dbrx", "smaug-bpe", "falcon3", "pixtral")
_GLM4 = ("glm4", "chatglm-bpe")
_QWEN2 = ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan-dense")
_QWEN35 = "qwen35"
#: The tokenizers that keep a word whole if the vocabulary has it, and put a token before a text.
_WHOLE = (*_LLAMA3, "tekken")
#: The expression that cuts a text into words, or several that do so one after another, by the tokenizer's name.
_WORDS: dict[str, str | tuple[str, ...]] = {
    **dict.fromkeys((*_LLAMA3, *_GLM4), _LLAMA3_WORDS % "{1,3}"),
    **dict.fromkeys(_QWEN2, _LLAMA3_WORDS % ""),
    _QWEN35: _QWEN35_WORDS,
    "seed-coder": (_LLAMA3_WORDS % "").replace(r"[\r\n]*", ""),  # signs take no ends of lines with them
    **dict.fromkeys(("gpt-4o", "minimax-m2"), _CASED_WORDS % (_BEHIND, _BEHIND, "{1,3}")),
    "tekken": _CASED_WORDS % ("", "", ""),
    "deepseek-llm": _DEEPSEEK_LLM_WORDS,
    "deepseek-v3": _DEEPSEEK_V3_WORDS,
    "kimi-k2": _KIMI_WORDS,
}


class GGUFTokenizerError(ValueError):
    """The file has no tokenizer, or one of a kind that is not known; the message says which."""


def read_tokenizer(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any], dict[str, str]]:
    """The tokenizer, its named special tokens as tokenizer_config.json has them, and the chat templates by name.

    Raises GGUFTokenizerError.
    """
    fields = file.fields
    kind, tokens = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise GGUFTokenizerError(f"{file.path} has no tokenizer")
    for key, each in _LISTS.items():
        entries = fields.get(key, [])
        if not isinstance(entries, list) or not all(isinstance(entry, each) for entry in entries):
            raise GGUFTokenizerError(f"{file.path} is damaged: {key!r} is no list of {_KINDS[each]}")
    vocabulary = {token: i for i, token in reversed(list(enumerate(tokens)))}
    if kind == "gpt2":
        tokenizer = _byte_level(fields, vocabulary)
    elif kind == "llama":
        merges = _merges_of_scores(tokens, fields.get("tokenizer.ggml.scores", []), vocabulary)
        tokenizer = _sentence_piece(fields, tokens, vocabulary, merges)
    elif kind == "gemma4":
        tokenizer = _sentence_piece({**fields, _SPACE: False}, tokens, vocabulary, _merges(fields))
    else:
        raise GGUFTokenizerError(
            f"{file.path}: a tokenizer of the kind {kind!r} is not known; known are gpt2, llama and gemma4"
        )
    types = [*fields.get("tokenizer.ggml.token_type", []), *repeat(None, len(tokens))]
    # Some files call the end of a turn an ordinary token.
    types = [_CONTROL if token in END_OF_TURN else its for token, its in zip(tokens, types, strict=False)]
    for number, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        marked = [token for token, its in zip(tokens, types, strict=False) if its == number]
        added = [AddedToken(token, normalized=False, special=special) for token in marked]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    config = {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    _add_ends(tokenizer, fields, config, kind)
    return tokenizer, config, _templates(fields)


def _templates(fields: dict[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in fields.items() if name.startswith(f"{key}.")}
    return {name: text for name, text in {**named, "default": fields.get(key)}.items() if isinstance(text, str)}


def _byte_level(fields: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre", "gpt-2")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(fields), ignore_merges=pre in _WHOLE))
    if pre in _DIGIT_BY_DIGIT:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    elif pre in _GPT2:
        tokenizer.pre_tokenizer = plain
    elif pre in _WORDS:
        words = _WORDS[pre]
        words = (words,) if isinstance(words, str) else words
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in words]
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, rest])
        if pre in ("qwen2", _QWEN35):
            tokenizer.normalizer = normalizers.NFC()
    else:
        raise GGUFTokenizerError(f"the file's way of cutting text into words, {pre!r}, is not known")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(fields: dict[str, Any]) -> list[Any]:
    return [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]


def _sentence_piece(
    fields: dict[str, Any], tokens: Sequence[str], vocabulary: dict[str, int], merges: list[Any]
) -> Tokenizer:
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise GGUFTokenizerError(f"the unknown token is {unknown!r}, and the tokenizer has {len(tokens)} tokens")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    space = fields.get(_SPACE, True)
    steps: list[Any] = [normalizers.Prepend("▁")] if space else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of_scores(
    tokens: Sequence[str], scores: Sequence[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """The merges of a SentencePiece model, which stores none: it always merges the pair whose token has the best
    score."""
    if len(scores) != len(tokens):
        raise GGUFTokenizerError(f"the tokenizer has {len(tokens)} tokens and {len(scores)} scores")
    if (longest := max(map(len, tokens))) > _LONGEST_TOKEN:  # merges take time with the square of it
        raise GGUFTokenizerError(f"the tokenizer has a token of {longest} characters")
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_ends(tokenizer: Tokenizer, fields: dict[str, Any], config: dict[str, Any], kind: str) -> None:
    """Let the tokenizer put the begin and end tokens around a text, where the file says so."""
    begins = fields.get("tokenizer.ggml.add_bos_token", kind != "gpt2" or fields.get("tokenizer.ggml.pre") in _WHOLE)
    first = config.get("bos_token") if begins else None
    last = config.get("eos_token") if fields.get("tokenizer.ggml.add_eos_token", False) else None
    if first is None and last is None:
        return
    ends = [token for token in (first, last) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(part for part in (first, "$A", last) if part),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(ends)],
    )
