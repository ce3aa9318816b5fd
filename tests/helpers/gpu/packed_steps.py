"""Prints the greedy tokens of models on the lying device, as a JSON list with the prompts and the tokens of each model.

Arguments: what --weights is, then the models' paths. Prompts are staged, and decode steps are captured, but for a model
with experts, whose rows the host must count where there are no kernels. The device has none, so packed matrices are
converted block by block, as on a GPU without them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch

from gpu import lying_steps
from gpu.lying_device import NAME, LyingDevice, LyingEvent


def run(model: str, weights: str) -> list[list[list[int]]]:
    """The prompts of lying_steps and the tokens behind them."""
    from fastdecode.spart import load_model

    with LyingDevice() as device:
        loaded = load_model(model, device=NAME, dtype="fp32", weights=weights)
        bypass = None if loaded.config.experts else lying_steps.make_bypass(device, "none")
        tokens = asyncio.run(lying_steps.with_links(loaded, 1, bypass))
        assert bypass is None or (bypass._driver.waited and not bypass.fault), bypass.fault
    return [lying_steps.texts(loaded.config.vocab_size), tokens]


def main() -> None:
    from fastdecode.spart.step.batch import SampleSpec

    def greedy(*_: Any) -> SampleSpec:
        return SampleSpec(temperature=0.0)

    torch.Event = LyingEvent  # type: ignore[misc,assignment]
    torch.set_num_threads(1)
    lying_steps.how_to_draw = greedy
    weights, *models = sys.argv[1:]
    print(json.dumps([run(model, weights) for model in models]))


if __name__ == "__main__":
    main()
