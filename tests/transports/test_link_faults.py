"""Part of the conformance suite of the transports: an S-node or an R-node dies, at every phase and many times.

Each time, the other end reports it within NOTICED_S, no resource is left behind, and no other link notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from nodes.rnode_process import (
    KV_BYTES,
    Held,
    RNodeProcess,
    allocated_bytes,
    resident_bytes,
    start_executor_threads,
)
from nodes.snode_process import SNodeProcess, before_frame, large_hello
from wire import cut_wire
from wire.link_driver import CYCLES, HANG_S, NOTICED_S, Payloads, hello, in_thread, until

from fastdecode.daemon.rnode import RNode
from fastdecode.region.geometry import region_layout
from fastdecode.transports.base import LinkDown, LinkRefused
from fastdecode.transports.registry import connect

#: The S-node's reasons for a link that has ended because its R-node is gone.
GONE = r"(closed|reset) the (data )?connection|connection broke|within a frame|retry exceeded|remote access error"

#: Bytes by which a process may have grown after all cycles. Each cycle writes more than 100 KiB of a region and 4 MiB
#: of KV-cache.
GROWTH = 4 << 20

pytestmark = pytest.mark.timeout(290 + 10 * CYCLES)


@contextlib.asynccontextmanager
async def untouched(url: str) -> AsyncIterator[None]:
    """Meanwhile, make calls on another link, check every byte, and require progress at the end."""
    link = await connect(url, Payloads.HELLO, None)
    payloads = Payloads(link)
    running = asyncio.create_task(asyncio.to_thread(payloads.run, sys.maxsize))
    try:
        yield
        seen = payloads.calls
        while payloads.calls == seen:
            assert not running.done(), running.exception()
            await asyncio.sleep(0.01)
    finally:
        await link.close()
        with pytest.raises(LinkDown):
            await running


@pytest.fixture
def other_node(node: RNodeProcess, tmp_path: Path) -> Iterator[RNodeProcess]:
    """Another R-node over the same transport as `node`."""
    (tmp_path / "other").mkdir()
    other = RNodeProcess.over(node.url.partition(":")[0], tmp_path / "other")
    yield other
    assert other.end() == 0


async def whole_cache_is_free(url: str, kv_bytes: int = KV_BYTES) -> bool:
    try:
        link = await connect(url, hello(kv_bytes=None), None)
    except LinkRefused:
        return False
    assert link.lease.n_pages == (kv_bytes - link.layout.region_bytes) // link.lease.page_bytes
    await link.close()
    return True


async def holds(pid: int, what: Held) -> bool:
    return Held.by(pid) == what


# ---- at every phase ----


async def test_r_node_killed_during_the_hand_shake(node):
    start_executor_threads()
    before = None
    for n in itertools.count():
        if node.process.poll() is not None:
            node.start()
        before = before or Held.by(os.getpid())
        await until(partial(holds, os.getpid(), before), HANG_S)
        with contextlib.suppress(LinkDown):
            async with asyncio.timeout(NOTICED_S):
                with before_frame(n, lambda: node.end(signal.SIGKILL)):
                    link = await connect(node.url, hello(), None)
                if node.process.poll() is None:
                    await link.close()
                    break
                # The R-node had sent its last frame before it was killed.
                assert isinstance(await link.closed(), LinkDown)
                await link.close()
    assert n >= 6  # CHALLENGE, HELLO, WELCOME; CHALLENGE, ATTACH, OK


async def test_s_node_killed_during_the_hand_shake_or_idle(shared_node):
    assert await whole_cache_is_free(shared_node.url)
    before = Held.by(shared_node.pid)
    for n in itertools.count():
        s_node = SNodeProcess(shared_node.url, n)
        opened = await in_thread(s_node.read_line)
        s_node.end()
        await until(lambda: holds(shared_node.pid, before), NOTICED_S)
        assert await whole_cache_is_free(shared_node.url)
        if opened:
            break
    assert n >= 6


#: Room for the activation region of large_hello(), which counts too.
LARGE_KV_BYTES = KV_BYTES + region_layout(large_hello().geometry).region_bytes


@pytest.fixture
def tcp_node() -> Iterator[RNodeProcess]:
    node = RNodeProcess("tcp://127.0.0.1:0", LARGE_KV_BYTES)
    yield node
    node.end()


def unsent(port: int, of_r_node: bool) -> int:
    """The largest number of unacknowledged bytes at one end of the R-node's TCP connections."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return max(int(x[4].split(":")[0], 16) for x in lines if int(x[1 if of_r_node else 2].split(":")[1], 16) == port)


async def stop_within_a_frame(peer: RNodeProcess | SNodeProcess, port: int, to_r_node: bool) -> None:
    """Stop `peer` in the middle of a frame that is larger than the buffers of both sockets."""

    async def caught() -> bool:
        peer.stop()
        await asyncio.sleep(0.02)
        if unsent(port, not to_r_node):
            return True
        peer.go_on()
        return False

    await until(caught, HANG_S)


async def test_s_node_killed_within_a_call(tcp_node):
    port = int(tcp_node.url.rpartition(":")[2])
    before = Held.by(tcp_node.pid)
    s_node = SNodeProcess(tcp_node.url, "large")
    assert await in_thread(s_node.read_line) == "open"
    await stop_within_a_frame(tcp_node, port, True)
    s_node.end()
    tcp_node.go_on()
    await until(lambda: holds(tcp_node.pid, before), NOTICED_S)
    assert await whole_cache_is_free(tcp_node.url, LARGE_KV_BYTES)


async def test_r_node_killed_within_a_reply(tcp_node):
    port = int(tcp_node.url.rpartition(":")[2])
    s_node = SNodeProcess(tcp_node.url, "large")
    assert await in_thread(s_node.read_line) == "open"
    await stop_within_a_frame(s_node, port, False)
    tcp_node.end(signal.SIGKILL)
    s_node.go_on()
    async with asyncio.timeout(NOTICED_S):
        assert re.search(GONE, await asyncio.to_thread(s_node.read_line))
    s_node.end()


# ---- under load, again and again ----


async def least_growth(cycle: Callable[[], Awaitable[None]], resident: Callable[[], int]) -> int:
    """The bytes by which memory grows in CYCLES cycles, the least of up to eight times: a leak grows every time, what
    malloc and the kernel keep for threads does not."""
    grown = []
    while len(grown) < 8 and (not grown or grown[-1] >= GROWTH):
        before = resident()
        for _ in range(CYCLES):
            await cycle()
        grown.append(resident() - before)
    print("bytes grown:", grown)  # for a failure's report
    return min(grown)


async def test_r_node_killed_under_load(node, other_node):
    start_executor_threads()
    node.end(signal.SIGKILL)

    async def cycle(before: Held) -> None:
        node.start()
        idle = await connect(node.url, hello(), None)
        loaded = await connect(node.url, Payloads.HELLO, None)
        load = asyncio.create_task(asyncio.to_thread(Payloads(loaded).run, sys.maxsize))
        while (await loaded.stats())["calls"] < 100:
            assert not load.done(), load.exception()
        node.end(signal.SIGKILL)
        async with asyncio.timeout(NOTICED_S):
            with pytest.raises(LinkDown, match=GONE):
                await load
            for link in (loaded, idle):
                assert re.search(GONE, str(await link.closed()))
        del load, link, loaded, idle
        await until(lambda: holds(os.getpid(), before), NOTICED_S)

    async with untouched(other_node.url):
        before = Held.by(os.getpid())
        await cycle(before)
        allocated = allocated_bytes()
        for _ in range(CYCLES):
            await cycle(before)
        assert allocated_bytes() - allocated < GROWTH


async def test_s_node_killed_under_load(shared_node):
    async def cycle(before: Held) -> None:
        s_node = SNodeProcess(shared_node.url, "load")
        assert await in_thread(s_node.read_line) == "open"
        s_node.end()
        await until(lambda: holds(shared_node.pid, before), NOTICED_S)

    async with untouched(shared_node.url):
        before = Held.by(shared_node.pid)
        await cycle(before)
        assert await least_growth(partial(cycle, before), partial(resident_bytes, shared_node.pid)) < GROWTH
    await until(lambda: whole_cache_is_free(shared_node.url), NOTICED_S)


def test_wires_that_go_down():
    """A wire that is down carries no FIN and no RST. Both ends notice, on idle links and on links under load."""
    done = subprocess.run([sys.executable, cut_wire.__file__, str(CYCLES)], stdout=subprocess.PIPE, text=True)
    if done.returncode == cut_wire.NOT_HERE:
        pytest.skip(done.stdout)
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert max(result["given_up"], result["freed"]) < NOTICED_S
    r_before, r_after, s_before, s_after = result["held"]
    assert (r_after, s_after) == (r_before, s_before)
    assert max(result["grown"]) < GROWTH


async def test_link_closed_while_an_answer_comes(tmp_path):
    """Once the link is closed the R-node has freed its memory, however much of the answer has been read."""
    node = RNode(threads=1, kv_bytes=KV_BYTES)
    try:
        (url,) = await node.serve([f"shm://{tmp_path}/r.sock"], None)
        for iterations in [*range(20)] * 2:
            link = await connect(url, hello(kv_bytes=None), None)
            asking = asyncio.create_task(link.stats())
            for _ in range(iterations):  # one iteration of the event loop each
                await asyncio.sleep(0)
            await link.close()
            assert node.kv_free == KV_BYTES, iterations
            await asyncio.gather(asking, return_exceptions=True)
    finally:
        await node.close()
