"""Captured steps over real links: packed, asked for, waited for and unpacked by a stream, with no thread of the host.

Their O rows are those of the same steps driven by the host, bit for bit. FASTDECODE_STEPS=100000 makes as many steps on
each transport. Where the driver is simulated (tests/gpu/driver), this shows nothing of a GPU's order of memory accesses
or its speed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from gpu.captured_steps import GEOMETRY, HOST_SLOT, MAX_SEQS, MINI_BATCHES, TURNS, CapturedStep, Payload, by_host
from gpu.cuda_driver import Cuda
from wire.link_driver import FEWER, HANG_S, LAYER_REPLY, hello, in_thread

from fastdecode.spart.exchange.stream_rows import MappedRegion
from fastdecode.transports._native import Proxy
from fastdecode.transports.base import Link
from fastdecode.transports.registry import connect

pytestmark = pytest.mark.tools

STEPS = int(os.environ.get("FASTDECODE_STEPS", 300 // FEWER))
PAYLOADS = 16
SOON_S = 0.05


@asynccontextmanager
async def linked(cuda: Cuda, url: str, n: int) -> AsyncIterator[tuple[list[Link], list[MappedRegion]]]:
    """`n` links to an R-node, and their regions."""
    links = [await connect(url, hello(GEOMETRY, kv_bytes=24 << 20, max_seqs=MAX_SEQS), None) for _ in range(n)]
    try:
        yield links, [MappedRegion(cuda.product, link) for link in links]
    finally:
        cuda.use_here()  # regions are unregistered wherever they go away
        for link in links:
            await link.close()


async def expected(links: list[Link], payload: Payload, tag: int) -> np.ndarray:
    """The O rows of a step that the host drives; its sequences are gone afterwards."""
    o = await in_thread(by_host, links, payload, tag)
    for i, link in enumerate(links):
        await link.free(payload.handles(i, HOST_SLOT, tag))
    return o


@pytest.mark.timeout(FEWER * (120 + STEPS / 25))
@pytest.mark.parametrize("queues", [1, 8, 32])
async def test_replayed_steps_are_bit_for_bit_those_of_the_host(cuda, shared_node, queues):
    """Eight mini-batches, each on a stream of its own, over two links; each step has other rows and another number of
    them."""
    cuda.reset(queues, delay_us=20 if STEPS > 10_000 else 100, seed=queues)
    loop, proxy = asyncio.get_running_loop(), Proxy()
    async with linked(cuda, shared_node.url, 2) as (links, regions):
        payloads = [Payload.random(len(links), seed) for seed in range(PAYLOADS)]
        want = [await expected(links, payload, 1 + i) for i, payload in enumerate(payloads)]
        steps = [CapturedStep(cuda, links, regions, slot) for slot in range(MINI_BATCHES)]
        chance = np.random.default_rng(queues)
        handles: list[list[tuple[int, int]]] = [[] for _ in links]

        def run(tag: int) -> None:
            picked = chance.integers(0, PAYLOADS, len(steps)).tolist()
            for step, which in zip(steps, picked, strict=True):
                step.arm(payloads[which], tag)
            for step, which in zip(steps, picked, strict=True):
                step.begin(proxy)
                step.launch(payloads[which])
            for step, which in zip(steps, picked, strict=True):
                assert step.finish()
                assert step.o(payloads[which]).tobytes() == want[which].tobytes(), f"step {tag}"
                assert all(times is not None and times.kv_bytes for times in step.end(proxy))
                for i in range(len(links)):
                    handles[i] += payloads[which].handles(i, step.slot, tag)
            if tag % TURNS == TURNS - 1:  # the next tag has the indices of one of these sequences
                for link, ended in zip(links, handles, strict=True):
                    asyncio.run_coroutine_threadsafe(link.free(ended), loop).result(HANG_S)
                    ended.clear()

        def run_all() -> None:
            cuda.use_here()
            for i in range(-(-STEPS // len(steps))):
                run(PAYLOADS + 1 + i)

        await asyncio.to_thread(run_all)
        assert (await links[0].stats())["calls"] >= STEPS * GEOMETRY.n_layers


async def test_the_result_is_poison_until_the_event_and_the_stream_waits_for_the_r_node(cuda, node):
    """Beside a stream that does not wait: it takes rows that no R-node has written."""
    proxy, payload = Proxy(), Payload.random(1, 1)
    async with linked(cuda, node.url, 2) as (links, regions):
        want = await expected(links[:1], payload, 1)
        step = CapturedStep(cuda, links[:1], regions[:1], 0)
        hasty = CapturedStep(cuda, links[1:], regions[1:], 0, left_out="wait")
        step.gate[0] = hasty.gate[0] = 0
        for each in (step, hasty):
            each.arm(payload, 2)
            each.begin(proxy)
            each.launch(payload)
        node.stop()
        step.gate[0] = hasty.gate[0] = GEOMETRY.n_layers
        assert hasty.finish()
        assert hasty.o(payload).tobytes() != want.tobytes()
        assert not cuda.finish(step.stream, SOON_S)
        assert np.isnan(step.o(payload)).all()
        node.send_signal(signal.SIGCONT)
        assert step.finish()
        assert step.o(payload).tobytes() == want.tobytes()
        step.end(proxy)
        links[1].port.kill("its step makes no sense")
        with pytest.raises(ConnectionError):
            hasty.end(proxy)


@pytest.mark.parametrize("layer", range(GEOMETRY.n_layers))
async def test_a_stream_outlives_an_r_node_that_is_killed_at_a_layer(cuda, node, layer):
    """Its gates are opened with poison, again and again; the step has failed, and the stream takes the next one."""
    proxy, payload = Proxy(), Payload.random(1, layer)
    async with linked(cuda, node.url, 1) as (links, regions):
        step = CapturedStep(cuda, links, regions, 0)
        memory, y = np.frombuffer(links[0].region, np.uint8), links[0].layout
        reply = memory[y.slot(0) + LAYER_REPLY :][:4].view(np.uint32)
        step.gate[0] = layer
        step.arm(payload, 1)
        step.begin(proxy)
        step.launch(payload)
        async with asyncio.timeout(HANG_S):
            while reply[0] < layer:
                await asyncio.sleep(0.001)
        node.stop()
        step.gate[0] = GEOMETRY.n_layers
        assert not cuda.finish(step.stream, SOON_S)
        node.end(signal.SIGKILL)
        while not cuda.is_done(step.stream):
            reply[0] = min(reply[0], layer)  # a late reply, which overwrites the poison
            await asyncio.sleep(0.001)
        with pytest.raises(ConnectionError):
            step.end(proxy)
        cuda.call("cuStreamWriteValue32", step.stream, regions[0].device + y.slot(1), 77, 0)
        assert step.finish() and memory[y.slot(1)] == 77
        del memory, reply
