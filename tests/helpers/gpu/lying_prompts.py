"""Prompts whose K and V stream out behind the layers (fastdecode.spart.exchange.streamed), on a lying device.

Argument: a model directory. The R-nodes are processes, which are stopped or killed while prompts are computed. Prints a
JSON object; test_streamed_prompts.py explains its entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from models.spart_steps import GREEDY, run, text
from nodes.rnode_process import RNodeProcess

from fastdecode.spart import SPart, load_model
from fastdecode.spart.exchange import streamed
from fastdecode.spart.exchange.base import StepLinks
from fastdecode.spart.exchange.streamed import Streamed
from fastdecode.spart.step.batch import Chunk, StepBatch
from fastdecode.transports.base import Link, LinkDown
from fastdecode.transports.registry import connect
from gpu.lying_device import NAME, LyingDevice, LyingEvent, SideStream, take_torchs_place

N_PROMPT, N_NEW = 50, 4
TIMEOUT_S = 5.0
FEW_BUFFERS = 2  # less than the model has layers
#: The waits of a streamed prompt; `without` explains them.
WAITS = ("written", "overwritten", "copied", "room", "end", "verdict")


def prompt_step(spart: SPart, links: Sequence[int] = (0,)) -> Generator[Any, Any, Any]:
    """A step of one prompt for each of some links, in one chunk."""
    chunks = [Chunk(link, 0, 1, 0, text(N_PROMPT, link), True, GREEDY, N_PROMPT) for link in links]
    return spart.step(StepBatch(0, chunks, TIMEOUT_S))


def decode(spart: SPart, link: int, first: int) -> list[int]:
    """The first token after a link's prompt, and the tokens that follow."""
    tokens = [first]
    for i in range(N_NEW):
        chunk = Chunk(link, 0, 1, N_PROMPT + i, tokens[-1:], False, GREEDY)
        tokens.append(run(spart.step(StepBatch(0, [chunk], TIMEOUT_S))).sampled[0].token)
    return tokens


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0.0)[0])


def pass_layers(step: Generator[Any, Any, Any], device: LyingDevice) -> int:
    """Resume a step until it would wait, and let the device compute all that it was given. Returns how often the step
    was resumed."""
    n = 1
    pending = next(step)
    while readable(pending):
        pending, n = next(step), n + 1
        device.streams[0].synchronize()
    return n


@contextlib.asynccontextmanager
async def linked_to(nodes: Sequence[RNodeProcess], model: Any) -> AsyncIterator[list[Link]]:
    links = [await connect(node.url, model.hello(1, 2 * N_PROMPT, "fp32", 16 << 20, 4), None) for node in nodes]
    try:
        yield links
    finally:
        for link in links:
            await link.close()


def on_device(model: Any, links: Sequence[Link]) -> SPart:
    with torch.inference_mode():  # torch makes no view of another tensor of the device in that mode
        return SPart(model, links)


async def held_up(directory: Path, node: RNodeProcess, left_out: str = "none") -> dict[str, Any]:
    """A prompt whose R-node stands still until no layer goes on: how often the step was resumed until then, and the
    tokens."""
    with LyingDevice() as device, without(left_out):
        model = load_model(directory, device=NAME, dtype="fp32")
        async with linked_to([node], model) as links:
            spart = on_device(model, links)
            node.stop()
            try:
                step = prompt_step(spart)
                resumed = pass_layers(step, device)
                output = run(step) if left_out == "end" else None
            finally:
                node.go_on()
            output = output or run(step)
            return {"resumed": resumed, "tokens": decode(spart, 0, output.sampled[0].token)}


async def killed(directory: Path, nodes: Sequence[RNodeProcess]) -> dict[str, Any]:
    """A step of a prompt for each R-node, of which the last one is killed before it has appended."""
    with LyingDevice() as device:

        def in_thread(step: Generator[Any, Any, Any]) -> Any:
            with device.in_thread():
                return run(step)

        model = load_model(directory, device=NAME, dtype="fp32")
        async with linked_to(nodes, model) as links:
            spart = on_device(model, links)
            nodes[-1].stop()
            step = prompt_step(spart, range(len(nodes)))
            pass_layers(step, device)
            nodes[-1].end(9)
            try:
                output = await asyncio.to_thread(in_thread, step)  # the event loop sees the end of the link
            except LinkDown as error:
                return {"lost": error.link is links[-1]}
            tokens = decode(spart, 0, output.sampled[0].token)
            return {"lost": [*output.failures] == links[-1:], "tokens": tokens}


@contextlib.contextmanager
def without(what: str) -> Iterator[None]:
    """Leave out a wait of Streamed: "written", of the copies for a layer's rows; "overwritten", of the next layer for
    the copies; "copied", of the thread for the copies; "room", of a layer for a free buffer; "end", of the step for the
    appends; "verdict", of the thread for the R-nodes that are to take the step."""
    wait, synchronize, eventfd = LyingEvent.wait, LyingEvent.synchronize, streamed.os.eventfd

    def unless_beside(event: LyingEvent) -> None:
        assert LyingDevice.current is not None
        if not isinstance(LyingDevice.current.stream, SideStream):
            wait(event)

    def unless_of_copies(event: LyingEvent) -> None:
        if not isinstance(event._stream, SideStream):
            synchronize(event)

    def always_free(n: int, flags: int) -> int:
        return eventfd(n << 16, flags)

    patches = {
        "none": [],
        "written": [mock.patch.object(LyingEvent, "wait", unless_beside)],
        "overwritten": [mock.patch.object(Streamed, "wait", lambda exchange, timeout: None)],
        "copied": [mock.patch.object(LyingEvent, "synchronize", unless_of_copies)],
        "room": [mock.patch.object(streamed.os, "eventfd", always_free)],
        "end": [
            mock.patch.object(Streamed, "finish", lambda exchange: None),
            mock.patch.object(Streamed, "finished", lambda exchange: None),
        ],
        "verdict": [mock.patch.object(StepLinks, "judge", lambda links, timeout: None)],
    }
    with contextlib.ExitStack() as stack:
        for patch in patches[what]:
            stack.enter_context(patch)
        yield


async def on_cpu(directory: Path, node: RNodeProcess) -> list[int]:
    """The tokens after the prompt of the first link."""
    model = load_model(directory, dtype="fp32")
    async with linked_to([node], model) as links:
        spart = SPart(model, links)
        return decode(spart, 0, run(prompt_step(spart)).sampled[0].token)


def results(directory: Path, nodes: Sequence[RNodeProcess]) -> dict[str, Any]:
    """What main prints. All R-nodes but the first are killed."""
    want = asyncio.run(on_cpu(directory, nodes[0]))

    def judged(work: Any) -> dict[str, Any]:
        result = asyncio.run(work)
        return result | ({"tokens": result["tokens"] == want} if "tokens" in result else {})

    found: dict[str, Any] = {"all buffers": judged(held_up(directory, nodes[0]))}
    with mock.patch.object(streamed, "BUFFERS", FEW_BUFFERS):
        found["few buffers"] = judged(held_up(directory, nodes[0]))
    for left_out in WAITS:
        n = streamed.BUFFERS if left_out == "end" else FEW_BUFFERS
        with mock.patch.object(streamed, "BUFFERS", n):
            try:
                found[left_out] = judged(held_up(directory, nodes[0], left_out))["tokens"]
            except Exception as error:
                print(left_out, error, file=sys.stderr)
                found[left_out] = False
    return found | {"killed": [judged(killed(directory, some)) for some in (nodes[1:2], nodes[:3:2])]}


def main() -> None:
    take_torchs_place()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        nodes = []
        for i in range(3):
            nodes.append(RNodeProcess(f"shm://{folder}/r{i}", 64 << 20))
            stack.callback(nodes[-1].end, 9)
        print(json.dumps(results(Path(sys.argv[1]), nodes)))


if __name__ == "__main__":
    main()
