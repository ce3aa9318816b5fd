"""Greedy tokens of models of transformers."""

from __future__ import annotations

from typing import Any

import torch


def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether a model of transformers answers a prompt so. One pass over all tokens shows it: each token of the answer
    is the likeliest one behind those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
