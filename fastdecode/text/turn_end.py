"""The tokens that end a model's turn.

The eos of config.json, generation_config.json or a GGUF file is often only the end of a document, so everything that a
model says about its ends counts: these files, tokenizer_config.json, the chat template, and the names of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from fastdecode.text.chat_template import ChatTemplateError, EndlessTemplate
from fastdecode.text.gguf_tokenizer import END_OF_TURN
from fastdecode.text.tokenizer import Tokenizer

#: If a vocabulary has all of the former tokens, the latter ends something else: gpt-oss's and Solar's `<|end|>` stands
#: between two messages of a turn.
_EXCEPT = (
    ({"<|return|>", "<|call|>"}, "<|end|>"),
    ({"<|calls|>", "<|flush|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)
_ANSWER = "An answer."


def end_of_turn(tokenizer: Tokenizer, declared: Iterable[int], vocab_size: int) -> frozenset[int]:
    """The ids of the tokens that end a turn: those `declared` by the model's configuration, the tokenizer's eos_token,
    the token with which the chat template ends an answer, and those whose names tell it. Raises ChatTemplateError for
    a template that does not come to an end."""
    ids = {name: token for name in END_OF_TURN if (token := tokenizer.token_id(name)) is not None}
    names = {name for name, token in ids.items() if tokenizer.is_added(token)}
    exceptions = {ids[name] for others, name in _EXCEPT if others <= names and name in ids}
    shown = {_end_of_answer(tokenizer), *(ids[name] for name in names)} - exceptions
    found = (*declared, tokenizer.eos_token_id, *shown)
    return frozenset(token for token in found if token is not None and 0 <= token < vocab_size)


def _end_of_answer(tokenizer: Tokenizer) -> int | None:
    """The special token directly behind an answer that the chat template has written."""
    chat = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        _, shown, behind = tokenizer.render_chat(chat, add_generation_prompt=False).rpartition(_ANSWER)
    except EndlessTemplate as error:
        raise ChatTemplateError(f"{error.where}{error}") from None
    except ChatTemplateError:
        return None
    tokens = tokenizer.encode(behind.lstrip(" "), add_special_tokens=False)
    return tokens[0] if shown and tokens and tokenizer.is_special(tokens[0]) else None
