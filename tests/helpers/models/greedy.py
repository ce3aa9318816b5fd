"""Random prompts, and greedy tokens of models of transformers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch

from models.checkpoints import VOCAB_SIZE


def prompts(lengths: Iterable[int], seed: int = 0, vocabulary: int = VOCAB_SIZE) -> list[list[int]]:
    """Random prompts of these lengths, without the first three tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(n)] for n in lengths]


def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether a model of transformers answers a prompt so. One pass over all tokens shows it: each token of the answer
    is the likeliest one behind those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
