"""Waiters that stand in for thread 0 of an R-engine in their own process (region/stand_in.h)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from nodes.rnode_process import KV_BYTES, r_threads
from wire.link_driver import HANG_S, LARGE, Driver, Payloads, hello, in_thread, until

from fastdecode.daemon.rnode import RNode
from fastdecode.region.contract import ROW_ATTEND, ROW_DTYPE
from fastdecode.region.geometry import geometry_tuple
from fastdecode.region.region import Region
from fastdecode.transports._native import Port
from fastdecode.transports.base import DataPath, LinkDown
from fastdecode.transports.registry import connect


def switches(thread: int) -> int:
    """How often a thread has gone to sleep."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


class StandInNode(RNode):
    """An R-node in this process that lets waiters stand in."""

    def __init__(self, threads: int, stand_in: bool):
        before = r_threads()
        super().__init__(threads=threads, kv_bytes=4 * KV_BYTES, spin_us=0, stand_in=stand_in)
        started = {name: thread for thread, name in r_threads().items() if thread not in before}
        self.thread_ids = [started[f"fd-r{i}"] for i in range(threads)]


@pytest.fixture(params=[1, 3])
async def node(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StandInNode]:
    node = StandInNode(request.param, stand_in=True)
    [node.url] = await node.serve([f"shm://{tmp_path}/r.sock"], None)
    yield node
    await node.close()


@pytest.mark.parametrize("stand_in", [True, False])
async def test_thread_0_sleeps_while_a_waiter_serves_the_calls(stand_in: bool, tmp_path: Path):
    node = StandInNode(1, stand_in)
    [url] = await node.serve([f"shm://{tmp_path}/r.sock"], None)
    wanted = hello()
    link = await connect(url, wanted, None)
    driver = Driver(link, wanted)
    n = 30

    def steps() -> tuple[int, float]:
        driver.step(0, [(0, 1, True)])
        before, start = switches(node.thread_ids[0]), time.monotonic()
        for _ in range(n):
            driver.step(0, [(0, 1, True)])
        return switches(node.thread_ids[0]) - before, time.monotonic() - start

    slept, seconds = await in_thread(steps)
    stats = await link.stats()
    assert stats["rows"] == (n + 1) * wanted.geometry.n_layers
    if stand_in:
        assert slept <= 3 + 30 * seconds  # thread 0 looks after the arenas ten times a second
    else:
        assert slept >= n
    await link.close()
    await node.close()


async def test_long_calls_are_shared_with_the_other_threads(node: StandInNode):
    wanted = hello(LARGE, kv_bytes=None)
    link = await connect(node.url, wanted, None)
    driver = Driver(link, wanted)
    others = node.thread_ids[1:]

    def steps() -> list[int]:
        before = [switches(thread) for thread in others]
        for i in range(4):
            driver.step(i % 2, [(0, 100, True), (2 + i, 80, True), (1, 60, False)])
        return [switches(thread) - n for thread, n in zip(others, before, strict=True)]

    assert all(n > 0 for n in await in_thread(steps))
    await link.close()


async def test_waiters_of_several_links_stand_in_by_turns(node: StandInNode):
    links = [await connect(node.url, Payloads.HELLO, None) for _ in range(3)]
    await asyncio.gather(*(asyncio.to_thread(Payloads(link, seed).run, 1500) for seed, link in enumerate(links)))
    for link in links:
        await link.close()


async def test_a_neighbour_over_tcp_is_served_too(node: StandInNode):
    [url] = await node.serve(["tcp://127.0.0.1:0"], None)
    links = [await connect(at, Payloads.HELLO, None) for at in (node.url, url)]
    await asyncio.gather(*(asyncio.to_thread(Payloads(link, seed).run, 1000) for seed, link in enumerate(links)))
    for link in links:
        await link.close()


async def test_a_call_is_served_though_its_waiter_comes_late(node: StandInNode):
    wanted = hello()
    link = await connect(node.url, wanted, None)
    link.arm(0, np.array([(0, 1, 0, 1, ROW_ATTEND, 0)], ROW_DTYPE))

    async def armed() -> bool:
        return (await link.stats())["pages_used"] > 0

    await until(armed, HANG_S)
    link.wait(0, HANG_S)
    for layer in range(wanted.geometry.n_layers):
        link.ring(0, layer)
        link.wait(0, HANG_S)
    await link.close()


async def test_a_waiter_learns_that_the_r_node_has_ended(node: StandInNode):
    link = await connect(node.url, Payloads.HELLO, None)
    calling = asyncio.create_task(in_thread(Payloads(link).run, 10**9))
    await asyncio.sleep(0.2)
    await node.close()
    with pytest.raises(LinkDown):
        await calling
    await link.close()


async def test_a_link_that_is_closed_ends_the_wait(node: StandInNode):
    other = await connect(node.url, Payloads.HELLO, None)
    link = await connect(node.url, Payloads.HELLO, None)
    calls = [asyncio.create_task(in_thread(Payloads(at).run, n)) for at, n in ((link, 10**9), (other, 1000))]
    await asyncio.sleep(0.1)
    await link.close()
    with pytest.raises(LinkDown):
        await calls[0]
    await calls[1]
    await other.close()


async def test_a_stand_in_outlives_its_r_engine_and_does_nothing(tmp_path: Path):
    node = StandInNode(1, stand_in=True)
    wanted = hello()
    region = Region.create(wanted.geometry)
    port = Port(region.view, geometry_tuple(wanted.geometry), 0, wake_fd=0, stand_in=node.stand_in)
    await node.close()
    path = DataPath("shm://r-node", region, port)
    path.arm(0, np.array([(0, 1, 0, 1, ROW_ATTEND, 0)], ROW_DTYPE))
    with pytest.raises(LinkDown, match="has not come within"):
        path.wait(0, 0.05)
    port.close()
    region.close()


def test_only_shared_memory_takes_a_stand_in():
    wanted = hello()
    region = Region.create(wanted.geometry)
    engine = RNode(threads=1, kv_bytes=KV_BYTES, stand_in=True)
    with pytest.raises(TypeError, match="stand_in is for shared memory"):
        Port(region.view, geometry_tuple(wanted.geometry), 0, loopback=True, stand_in=engine.stand_in)
    with pytest.raises(ValueError, match="PyCapsule"):
        Port(region.view, geometry_tuple(wanted.geometry), 0, wake_fd=0, stand_in=object())
    region.close()
    asyncio.run(engine.close())
