"""cut: a text's tokens in sequences of one length."""

from __future__ import annotations

import numpy as np

from fastdecode.text.tokenizer import Tokenizer


def cut(tokenizer: Tokenizer, text: str, sequences: int, length: int) -> np.ndarray:
    """The text's first tokens as ids [sequences, length], int. Each row begins with the tokenizer's begin token if it
    has one.

    Raises ValueError if the text is too short.
    """
    opening = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)
    body = length - len(opening)
    if len(ids) < sequences * body:
        raise ValueError(f"the text has {len(ids)} tokens; {sequences} sequences of {length} need {sequences * body}")
    rows = np.array(ids[: sequences * body]).reshape(sequences, body)
    return np.hstack([np.tile(np.array(opening, dtype=rows.dtype), (sequences, 1)), rows])
