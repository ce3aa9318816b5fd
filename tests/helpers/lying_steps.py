"""Runs steps on a lying device and on the CPU, over links to real R-nodes, and prints whether their tokens are equal.

Arguments: the number of links, a wait to leave out ("event", "download" or "none"), model directories.
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


def generate(spart: Any, n_links: int, n_new: int = 6, chunk: int = 24) -> list[list[int]]:
    """Tokens of eight prompts in two interleaved mini-batches, prefilled in chunks; half of them are drawn."""
    from spart_steps import interleaved

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
        for group, output in zip(groups, interleaved(steps), strict=True):
            for i, sampled in zip(group, output.sampled, strict=True):
                if sampled is not None:
                    done[i].append(sampled.token)
    return done


async def with_links(model: Any, n_links: int) -> list[list[int]]:
    from spart_steps import linked

    from fastdecode.spart import SPart

    with tempfile.TemporaryDirectory() as folder:
        async with linked(model, Path(folder), n_links, max_rows=128) as links:
            return generate(SPart(model, links), n_links)


def main() -> None:
    torch.Event = LyingEvent  # type: ignore[misc,assignment]
    from fastdecode.spart import load_model

    torch.set_num_threads(1)
    n_links, left_out, directories = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    equal = []
    for directory in map(Path, directories):
        want = asyncio.run(with_links(load_model(directory, dtype="fp32"), n_links))
        with LyingDevice(left_out) as device:
            model = load_model(directory, device=NAME, dtype="fp32")
            loading = device.waits
            try:
                got = asyncio.run(with_links(model, n_links))
            except Exception as error:
                got = [[repr(error)]]
            assert device.waits > loading or left_out != "none"
        equal.append(got == want)
    print(json.dumps(equal))


if __name__ == "__main__":
    main()
