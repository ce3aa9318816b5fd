"""When the bypass captures steps, on a lying device (lying_device.py): before there is work, and beside it.

Argument: a model directory. Prints a JSON object; test_captures.py explains its entries.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from models.spart_steps import linked

from fastdecode.spart import SPart, load_model
from fastdecode.spart.exchange import bypass as bypass_module
from fastdecode.spart.exchange.bypass import Bypass
from fastdecode.spart.exchange.chosen import ChosenExchange
from fastdecode.spart.step.batch import Chunk, SampleSpec, StepBatch
from gpu.lying_device import NAME, LyingDevice, LyingStream, take_torchs_place
from gpu.lying_driver import LyingDriver
from gpu.lying_steps import in_turn

_GATE_S = 60.0


def step(spart: Any, pos: int, tokens: list[int]) -> list[int]:
    """The tokens of a step of one row a sequence."""
    chunks = [Chunk(0, i, 1, pos, [token], False, SampleSpec(temperature=0.0)) for i, token in enumerate(tokens)]
    [output] = in_turn([spart.step(StepBatch(0, chunks))])
    return [sampled.token for sampled in output.sampled]


def on_device(model: Any, device: LyingDevice, links: Any) -> tuple[Any, Any]:
    """An S-Part and its bypass, whose steps have up to 4 rows."""
    bypass: Any = Bypass(LyingDriver(device).kernels(), device.make_stream, most_rows=4)
    return SPart(model, links, ChosenExchange("bypass", bypass=bypass)), bypass


def classes(bypass: Any, links: Any) -> list[list[Any]]:
    """The size classes of each mini-batch's graphs for all links, in the order of their capture."""
    return [[key[1] for key in lane.graphs if key[0] == tuple(links)] for lane in bypass._mini_batches.values()]


async def at_start(model: Any, device: LyingDevice, links: Any) -> dict[str, Any]:
    spart, bypass = on_device(model, device, links)
    bypass.prepare(spart, 2)
    captured = classes(bypass, links)
    step(spart, 0, [5, 6])
    return {"classes": captured, "waited": bypass._driver.waited}


async def with_little_memory(model: Any, device: LyingDevice, links: Any) -> dict[str, Any]:
    """Each capture takes a sixth of the memory that the driver may need beside the tensors."""
    capture = LyingStream.capture

    def expensive(stream: Any, work: Any) -> Any:
        device.free_bytes -= bypass_module._NODE_BYTES // 6
        return capture(stream, work)

    spart, bypass = on_device(model, device, links)
    with mock.patch.object(LyingStream, "capture", expensive):
        bypass.prepare(spart, 2)
    captured = classes(bypass, links)
    step(spart, 0, [5])
    return {"classes": captured, "waited": bypass._driver.waited, "fault": bypass.fault}


async def beside_steps(model: Any, device: LyingDevice, links: Any) -> dict[str, Any]:
    """The graph of the first step is not captured before that step has ended."""
    gate, capture = threading.Event(), LyingStream.capture

    def held_up(stream: Any, work: Any) -> Any:
        assert gate.wait(_GATE_S)
        return capture(stream, work)

    spart, bypass = on_device(model, device, links)
    with mock.patch.object(LyingStream, "capture", held_up):
        tokens, waited = [step(spart, 0, [5, 6])], []
        for pos in (1, 2):
            waited.append(bypass._driver.waited)
            tokens.append(step(spart, pos, tokens[-1]))
            gate.set()
            bypass.settle()
    tokens.append(step(spart, 3, tokens[-1]))
    return {"tokens": tokens, "waited": [*waited, bypass._driver.waited]}


def main() -> None:
    take_torchs_place()
    torch.set_num_threads(1)
    directory, found = Path(sys.argv[1]), {}

    async def on_cpu() -> list[list[int]]:
        model, tokens = load_model(directory, dtype="fp32"), [[5, 6]]
        with tempfile.TemporaryDirectory() as folder:
            async with linked(model, Path(folder), max_rows=128) as links:
                for pos in range(4):
                    tokens.append(step(SPart(model, links), pos, tokens[-1]))
        return tokens[1:]

    async def run(part: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder, LyingDevice() as device:
            model = load_model(directory, device=NAME, dtype="fp32")
            async with linked(model, Path(folder), max_rows=128) as links:
                with torch.inference_mode():  # torch makes no view of another tensor of the device in that mode
                    return await part(model, device, links)

    for part in (at_start, with_little_memory, beside_steps):
        found[part.__name__] = asyncio.run(run(part))
    print(json.dumps(found | {"cpu": asyncio.run(on_cpu())}))


if __name__ == "__main__":
    main()
