"""The logits of a quantised checkpoint against transformers with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fastdecode.spart import SPart, load_model
from fastdecode.spart.linears.grouped import GroupedEmbedding, GroupedLinear
from fastdecode.spart.step.batch import Chunk, StepBatch
from models.spart_steps import GREEDY, linked, run, text

#: Largest error in standard deviations of the logits, against transformers with the dequantised weights, if activations
#: have 15 bits.
EXACT = 5e-3
#: The bound on most_of_four of a transformed matrix: AVX2 sums four products with numbers up to 64 in 16 bits.
MOST_OF_FOUR = 255


def stored_numbers(linear: GroupedLinear) -> torch.Tensor:
    """The matrix [out, in] fp32 that a linear has stored."""
    return GroupedEmbedding([linear], torch.float32, shared=False)(torch.arange(linear.outs))


def most_of_four(numbers: torch.Tensor) -> torch.Tensor:
    """numbers [out, in] -> [out, in / 32] the largest sum, by magnitude, of the positive or of the negative numbers
    among four that AVX2 multiplies in one 16-bit sum: inputs 8i, 8i + 1, 8i + 4 and 8i + 5, or the 4 others of 8."""
    fours = numbers.view(len(numbers), -1, 4, 2, 2, 2)
    positive, negative = (side.sum((3, 5)).amax((2, 3)) for side in (fours.clamp_min(0), (-fours).clamp_min(0)))
    return torch.maximum(positive, negative)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


async def error_of_logits(directory: Path, theirs: Any, tmp_path: Path) -> float:
    tokens = text(40)
    model = load_model(directory, dtype="fp32")
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=1)
        prompt = Chunk(0, 0, 1, 0, tokens[:-1], True, GREEDY, state=0)
        last = Chunk(0, 0, 1, len(tokens) - 1, tokens[-1:], False, GREEDY, state=0)
        got = torch.cat([run(spart.step(StepBatch(0, [c]), keep_logits=True)).logits for c in (prompt, last)])
    with torch.no_grad():
        want = theirs(torch.tensor([tokens])).logits[0, -2:]
    return ((got - want).abs().max() / want.std()).item()
