"""A checkpoint with random weights, its model of transformers, and the API over a real engine with it."""

from __future__ import annotations

import pytest
from engines.api_client import served
from engines.real_engine import real_engine
from models.checkpoints import make_checkpoint, reference

from fastdecode.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def checkpoint():
    return make_checkpoint("llama-gqa")


@pytest.fixture(scope="session")
def model(checkpoint):
    return reference(checkpoint)


@pytest.fixture(scope="session")
def tokenizer(checkpoint):
    return Tokenizer.from_dir(checkpoint)


@pytest.fixture(scope="module")
def spell(tokenizer):
    """A function: text -> token ids, one for each byte."""
    ids = {tokenizer.token_bytes(i): i for i in range(len(tokenizer.tokens_from(0)))}
    return lambda text: [ids[bytes([b])] for b in text.encode()]


@pytest.fixture
async def engine(checkpoint, tmp_path):
    async with real_engine(checkpoint, tmp_path) as engine:
        yield engine


@pytest.fixture
async def client(engine, tokenizer):
    async with served(engine, tokenizer) as client:
        yield client
