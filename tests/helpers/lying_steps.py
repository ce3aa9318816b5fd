"""Runs steps on a lying device and on the CPU, over links to real R-nodes, and prints whether their tokens are equal.

Arguments: the exchanges ("staged", "bypass" or "staged,bypass"), the number of links, a wait to leave out ("none",
"verdict", or one of those that lying_device.py and lying_driver.py name), model directories.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lying_device import NAME, LyingDevice, LyingEvent


def texts() -> list[list[int]]:
    """Eight prompts: four for each mini-batch."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 384, (n,), generator=generator).tolist() for n in (3, 40, 17, 70, 1, 55, 8, 30)]


def generate(spart: Any, n_links: int, n_new: int = 4, chunk: int = 24) -> list[list[int]]:
    """Tokens of eight prompts in two interleaved mini-batches, prefilled in chunks; half of them are drawn."""
    from fastdecode.spart.batch import Chunk, SampleSpec, StepBatch

    prompts = texts()
    done: list[list[int]] = [[] for _ in prompts]
    cached = [0] * len(prompts)
    while any(len(tokens) < n_new for tokens in done):
        steps, groups = [], []
        for slot in (0, 1):
            work = []
            for i in range(slot, len(prompts), 2):
                everything = prompts[i] + done[i]
                if len(done[i]) == n_new:
                    continue
                tokens = everything[cached[i] : cached[i] + chunk]
                more = cached[i] + len(tokens) < len(everything)
                spec = SampleSpec(temperature=float(i % 4 < 2), top_k=50, seed=i, index=len(done[i]))
                prefill = cached[i] < len(prompts[i])
                link = i // 2 % n_links
                piece = Chunk(link, i, 1, cached[i], tokens, prefill, None if more else spec, len(prompts[i]))
                work.append((i, piece))
                cached[i] += len(tokens)
            work.sort(key=lambda pair: (pair[1].prefill, pair[1].link))
            if work:
                groups.append([i for i, _ in work])
                steps.append(spart.step(StepBatch(slot, [piece for _, piece in work])))
        for group, output in zip(groups, in_turn(steps), strict=True):
            for i, sampled in zip(group, output.sampled, strict=True):
                if sampled is not None:
                    done[i].append(sampled.token)
    return done


def in_turn(steps: list[Any]) -> list[Any]:
    """Run the steps of several slots in turn; their outputs. The last stream of the device runs first, once every step
    waits."""
    outputs: list[Any] = [None] * len(steps)
    try:
        while None in outputs:
            for i, step in enumerate(steps):
                if outputs[i] is None:
                    try:
                        pending = next(step)
                    except StopIteration as end:
                        outputs[i] = end.value
            if LyingDevice.current is not None and isinstance(pending, int):
                for stream in reversed(LyingDevice.current.streams[1:]):
                    stream.synchronize()
    finally:
        for step in steps:
            step.close()
    return outputs


def make_bypass(device: LyingDevice, left_out: str) -> Any:
    from lying_driver import LyingDriver

    from fastdecode.spart.exchange.bypass import Bypass
    from fastdecode.spart.exchange.stream_rows import Kernels

    driver: Any = LyingDriver(device, left_out)
    return Bypass(Kernels.load(driver, b""), device.make_stream, most_rows=64)


async def with_links(model: Any, n_links: int, bypass: Any = None) -> list[list[int]]:
    from spart_steps import linked

    from fastdecode.spart import SPart
    from fastdecode.spart.exchange.choice import Choice

    with tempfile.TemporaryDirectory() as folder:
        async with linked(model, Path(folder), n_links, max_rows=128) as links:
            with torch.inference_mode():  # torch makes no view of another tensor of the device in that mode
                spart = SPart(model, links, Choice("bypass", bypass=bypass) if bypass else None)
            return generate(spart, n_links)


def main() -> None:
    torch.Event = LyingEvent  # type: ignore[misc,assignment]
    from fastdecode.spart import load_model

    torch.set_num_threads(1)
    exchanges, n_links, left_out, directories = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    equal = []
    for directory in map(Path, directories):
        want = asyncio.run(with_links(load_model(directory, dtype="fp32"), n_links))
        equal += [tokens(exchange, directory, n_links, left_out) == want for exchange in exchanges]
    print(json.dumps(equal))


def tokens(exchange: str, directory: Path, n_links: int, left_out: str) -> list[list[int]] | None:
    """The tokens of a model on the device; None if a wait is left out and something has failed."""
    from fastdecode.spart import load_model
    from fastdecode.spart.exchange.base import StepLinks

    with LyingDevice(left_out) as device:
        model = load_model(directory, device=NAME, dtype="fp32")
        loading = device.waits
        if left_out == "verdict":
            StepLinks.judge = lambda links, timeout: None  # type: ignore[method-assign]
        bypass = make_bypass(device, left_out) if exchange == "bypass" else None
        try:
            got = asyncio.run(with_links(model, n_links, bypass))
        except Exception:
            if left_out == "none":
                raise
            return None
        assert left_out != "none" or device.waits > loading
        assert left_out != "none" or bypass is None or bypass._driver.waited > 0, "no step was bypassed"
        return got


if __name__ == "__main__":
    main()
