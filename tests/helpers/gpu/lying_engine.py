"""A real engine whose S-Part runs on a lying device (lying_device.py) with the bypass, and two R-nodes, of which one is
lost in the middle of a captured step, when the device is about to ask it for the second layer, or of a step of prompts,
when it is about to append the second layer.

Arguments: "shm" or "tcp"; "kill", "stall" or "append" (killed in a step of prompts); a model directory. Prints a JSON
object: "equal", whether every stream has the tokens of an engine on the CPU that loses no R-node; "alive", of each
R-node; "reason", why the link of the lost one has ended; "after", whether a step was captured and run for the other
R-node alone.

Each mini-batch's stream runs in a thread of its own, as a GPU would run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engines.make_engine import make_engine
from engines.token_stream import submit
from nodes.rnode_process import RNodeProcess

from fastdecode.engine.engine import Engine
from fastdecode.engine.runner import Runner
from fastdecode.engine.scheduling import deadline
from fastdecode.engine.state.request import SamplingParams
from fastdecode.region.contract import REQUEST_OFFSET
from fastdecode.spart import SPart, load_model
from fastdecode.spart.exchange.bypass import Bypass
from fastdecode.spart.exchange.chosen import ChosenExchange
from fastdecode.spart.exchange.streamed import Streamed
from fastdecode.transports.base import Link
from fastdecode.transports.registry import connect
from gpu.lying_device import NAME, LyingDevice, LyingStream, take_torchs_place
from gpu.lying_driver import LyingDriver

ROWS = 64
LOST = 1  # the R-node, by its place
AFTER = 6  # tokens that every stream has when it is lost
N_NEW = 24
STALL_S = 3.0  # that an R-node may take for a layer


class ThreadedStream(LyingStream):
    """Runs what it was given once its step is complete, in a thread."""

    def __init__(self, device: LyingDevice):
        super().__init__(device, len(device.streams))
        self._thread = ThreadPoolExecutor(1)
        self._fault: BaseException | None = None
        device.streams.append(self)

    def start(self) -> Any:
        return self._thread.submit(self._run_all, self.mark())

    def _run_all(self, mark: int) -> None:
        try:
            self.run_to(mark)
        except BaseException as error:
            self._fault = error
            raise

    def check(self) -> None:
        """Raise the error with which an operation has failed, as torch raises that of a kernel."""
        if self._fault is not None:
            raise self._fault

    def synchronize(self) -> None:
        self.start().result()


class ThreadedDriver(LyingDriver):
    """Starts a stream when it has been given a completion word. Before the stream asks for a layer, it calls
    `before_asking` with the word's address and the layer."""

    requests: frozenset[int] = frozenset()  # the words that ask for layers
    before_asking: Callable[[int, int], None] = staticmethod(lambda address, layer: None)

    def write_word(self, stream: int, address: int, value: int) -> None:
        completion = address not in self.requests
        if not completion:
            self._device.streams[stream].put(lambda: self.before_asking(address, value - 1))
        super().write_word(stream, address, value)
        if completion:
            started: Any = self._device.streams[stream]
            started.start()


class OnDevice(Runner):
    """A Runner in whose thread torch uses the device."""

    device: LyingDevice

    def _run(self) -> None:
        with self.device:
            super()._run()


@contextlib.asynccontextmanager
async def started(spart: SPart, start_runner: Callable[[], Runner], **options: Any) -> AsyncIterator[Engine]:
    """A started engine; `options`: see make_engine."""
    engine = make_engine(
        spart,
        spart.links,
        mini_batches=2,
        max_batch_tokens=ROWS,
        max_batch_size=8,
        prompts_apart=spart.model.device.type != "cpu",
        start_runner=start_runner,
        **options,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def requests() -> list[tuple[list[int], SamplingParams]]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 384, (n,), generator=generator).tolist() for n in (10, 90, 30, 77, 64, 3, 20, 40)]
    ways = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"repetition_penalty": 1.2}, {"top_k": 40}]
    return [
        (prompt, SamplingParams(max_tokens=N_NEW, ignore_eos=True, seed=i, **ways[i % len(ways)]))
        for i, prompt in enumerate(prompts)
    ]


async def generate(engine: Engine, halfway: Callable[[], None] = lambda: None) -> list[list[int]]:
    """The tokens of all requests. `halfway` is called once every stream has AFTER of them."""
    streams = [submit(engine, prompt, params) for prompt, params in requests()]
    firsts = [[(await anext(stream)).token for _ in range(AFTER)] for stream in streams]
    halfway()

    async def rest(stream: Any) -> list[int]:
        return [event.token async for event in stream]

    rests = await asyncio.gather(*map(rest, streams))
    return [first + tokens for first, tokens in zip(firsts, rests, strict=True)]


async def links_to(nodes: Sequence[RNodeProcess], model: Any) -> list[Link]:
    return [await connect(node.url, model.hello(3, ROWS, "fp32", 16 << 20, 32), None) for node in nodes]


async def undisturbed(directory: Path, node: RNodeProcess) -> list[list[int]]:
    model = load_model(directory, dtype="fp32")
    links = await links_to([node], model)
    async with started(SPart(model, links), Runner) as engine:
        tokens = await generate(engine)
    await links[0].close()
    return tokens


async def with_loss(directory: Path, nodes: Sequence[RNodeProcess], how: str) -> tuple[list[list[int]], dict[str, Any]]:
    device = OnDevice.device = LyingDevice()
    with device:
        model = load_model(directory, device=NAME, dtype="fp32")
        driver = ThreadedDriver(device)
        bypass = Bypass(driver.kernels(), lambda: ThreadedStream(device), most_rows=8)
        links = await links_to(nodes, model)
        regions = [bypass._region(link) for link in links]
        driver.requests = frozenset(
            region.device + region.layout.slot(slot) + REQUEST_OFFSET for region in regions for slot in (0, 1)
        )
        with torch.inference_mode():  # torch makes no view of another tensor of the device in that mode
            spart = SPart(model, links, ChosenExchange("bypass", bypass=bypass))
            bypass.prepare(spart, 2, least=4)
    of_lost = {regions[LOST].gate(slot).request for slot in (0, 1)}
    report: dict[str, Any] = {}
    armed, once = threading.Event(), threading.Lock()

    def lose(address: int, layer: int) -> None:
        if not armed.is_set() or address not in of_lost or layer != 1 or not once.acquire(blocking=False):
            return
        report["waits"] = driver.waited
        nodes[LOST].stop() if how == "stall" else nodes[LOST].end(signal.SIGKILL)

    append = Streamed._append

    def lose_and_append(exchange: Streamed, layer: int, timeout: float) -> None:
        if layer == 1 and any(rows.views.link is links[LOST] for rows in exchange._link_rows):
            lose(min(of_lost), layer)
        append(exchange, layer, timeout)

    if how == "append":
        armed.set()
    else:
        driver.before_asking = lose
    with mock.patch.object(Streamed, "_append", lose_and_append if how == "append" else append):
        async with started(spart, OnDevice) as engine:
            tokens = await generate(engine, armed.set)
            assert not bypass.fault, bypass.fault
            report["alive"] = [node.alive for node in engine.stats.nodes]
            report["reason"] = str(await links[LOST].closed())
            graphs = [key for one in bypass._mini_batches.values() for key in one.graphs]
            report["after"] = any(key[0] == (links[0],) for key in graphs) and driver.waited > report.pop("waits")
    for link in links:
        await link.close()
    return tokens, report


async def lose_one(scheme: str, how: str, directory: Path, folder: str) -> None:
    urls = ["tcp://127.0.0.1:0"] * 2 if scheme == "tcp" else [f"shm://{folder}/r{i}" for i in range(2)]
    deadline.SLACK_S = STALL_S
    with contextlib.ExitStack() as stack:
        nodes = []
        for url in urls:
            nodes.append(RNodeProcess(url, kv_bytes=64 << 20))
            stack.callback(nodes[-1].end, signal.SIGKILL)
        want = await undisturbed(directory, nodes[0])
        got, report = await with_loss(directory, nodes, how)
        print(json.dumps({"equal": got == want, **report}))


def main() -> None:
    take_torchs_place()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(lose_one(sys.argv[1], sys.argv[2], Path(sys.argv[3]), folder))


if __name__ == "__main__":
    main()
