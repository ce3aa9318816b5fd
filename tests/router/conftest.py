"""The tokenizer of the scripted S-nodes behind routers: a token for each byte, and a chat template."""

from __future__ import annotations

import pytest
from models.tokenizers_made import CHATML, byte_level

from fastdecode.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(byte_level(tmp_path_factory.mktemp("tokenizer"), chat_template=CHATML))


@pytest.fixture(scope="session")
def spell(tokenizer):
    """The tokens of a text."""
    ids = {tokenizer.token_bytes(i): i for i in range(len(tokenizer.tokens_from(0)))}
    return lambda text: [ids[bytes([b])] for b in text.encode()]
