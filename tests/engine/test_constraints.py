"""The tokens that a request allows, in the rows of a mask."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from fastdecode.engine.state.constraints import TokenConstraints
from fastdecode.engine.state.request import SamplingParams

pytestmark = pytest.mark.quick


def allowed(constraints, vocab_size):
    """The tokens that may come next."""
    row = np.full(-(-vocab_size // 32), -1, np.int32)
    constraints.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size]))


@pytest.mark.parametrize("seed", range(50))
def test_no_bad_word_can_be_ended(seed):
    draw = random.Random(seed)
    size = draw.choice([7, 33, 64])
    words = {tuple(draw.choices(range(size), k=draw.randint(1, 4))) for _ in range(draw.randint(1, 30))}
    constraints, text = TokenConstraints(SamplingParams(bad_words=tuple(words)), [2], size), []
    for _ in range(12):
        bad = {token for token in range(size) for word in words if tuple([*text, token][-len(word) :]) == word}
        assert allowed(constraints, size) == set(range(size)) - bad
        text.append(draw.randrange(size))
        constraints.generated(text[-1])


@pytest.mark.parametrize("length", [1, 2])
def test_many_bad_words_cost_a_step_little(length):
    """Each sequence of a step has a mask, and all clients wait for the step."""
    words = tuple(tuple(range(i, i + length)) for i in range(1000, 3000))
    constraints, row = TokenConstraints(SamplingParams(bad_words=words), [2], 49152), np.full(1536, -1, np.int32)
    constraints.generated(5)
    begin = time.thread_time()
    for _ in range(100):
        constraints.fill(row)
    assert time.thread_time() - begin < 0.02
