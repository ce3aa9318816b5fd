"""An S-Part's links to real R-engines in this process, and its steps run to their ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from fastdecode.daemon.rnode import RNode
from fastdecode.daemon.rnode_gpu import RNodeGpu
from fastdecode.spart.prefill.prompt import PromptCache
from fastdecode.spart.served import ServedModel
from fastdecode.spart.step.batch import SampleSpec, StepOutput
from fastdecode.transports.base import Link
from fastdecode.transports.registry import connect

GREEDY = SampleSpec(temperature=0.0)

#: Budget in standard deviations of the logits. Everything in fp32: rounding alone.
EXACT = 5e-5


@asynccontextmanager
async def linked(
    model: ServedModel,
    tmp_path: Path,
    n: int = 1,
    kv_dtype: str = "fp32",
    scheme: str = "shm",
    max_rows: int = 700,
    n_slots: int = 2,
    stand_in: bool = False,
    gpu: RNodeGpu | None = None,
) -> AsyncIterator[list[Link]]:
    """Links to `n` R-nodes of one thread each; with `stand_in`, waiters stand in for that thread. `gpu`: theirs."""
    nodes, links = [], []
    hello = model.hello(n_slots=n_slots, max_rows=max_rows, kv_dtype=kv_dtype, kv_bytes=1 << 25, max_seqs=16)
    try:
        for i in range(n):
            nodes.append(RNode(threads=1, kv_bytes=1 << 25, stand_in=stand_in, gpu=gpu))
            url = f"shm://{tmp_path}/r{i}" if scheme == "shm" else "tcp://127.0.0.1:0"
            links.append(await connect((await nodes[-1].serve([url], None))[0], hello, None))
        yield links
    finally:
        for link in links:
            await link.close()
        for node in nodes:
            await node.close()


def staged_bytes(prompts: PromptCache) -> int:
    """Bytes of memory that the staged K and V of unfinished prompts take."""
    # The S-Part's thread may add a prompt while another thread asks; a list is made without giving up the GIL.
    return sum(layer.nbytes for prompt in list(prompts._prompts.values()) for layer in prompt._layers.values())


def run(step) -> StepOutput:
    """Run a step to its end, without a deadline."""
    while True:
        try:
            next(step)
        except StopIteration as end:
            return end.value


def interleaved(steps: Sequence[Generator[None, None, StepOutput]]) -> list[StepOutput]:
    """Run the steps of several slots in turn, a layer each; their outputs."""
    outputs: list[StepOutput | None] = [None] * len(steps)
    while None in outputs:
        for i, step in enumerate(steps):
            if outputs[i] is None:
                try:
                    next(step)
                except StopIteration as end:
                    outputs[i] = end.value
    return outputs


def text(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 384, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
