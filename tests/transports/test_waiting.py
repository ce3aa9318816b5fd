"""The CPU time that idle links cost. Unlike elapsed time, it depends little on how busy the machine is: busy neighbours
that empty the caches may double it, and a thread that spins multiplies it by a hundred."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes.idle_links import IdleLinks
from nodes.rnode_process import RNodeProcess
from wire.link_driver import Payloads, hello

from fastdecode.transports.registry import connect

IDLE_S = 1.6  # two PINGs of every link


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU time that each thread of a process has used."""
    return {x.name: int((x / "schedstat").read_text().split()[0]) / 1e9 for x in Path(f"/proc/{pid}/task").iterdir()}


def used_in(pids: tuple[int, ...], seconds: float) -> list[float]:
    """CPU time that each process uses in the next `seconds`."""
    before = [sum(cpu_seconds(pid).values()) for pid in pids]
    time.sleep(seconds)
    return [sum(cpu_seconds(pid).values()) - x for pid, x in zip(pids, before, strict=True)]


def test_the_ends_of_idle_links_spin_no_threads(shared_node):
    node = shared_node.pid
    client = IdleLinks(shared_node.url, 6)
    time.sleep(0.2)
    used = used_in((node, client.pid), IDLE_S)
    assert client.end() == 0
    assert max(used) < 0.1 * IDLE_S, used


@pytest.fixture
def tcp_node(tmp_path: Path) -> Iterator[RNodeProcess]:
    node = RNodeProcess.over("tcp", tmp_path)
    yield node
    assert node.end() == 0


async def test_tcp_links_that_are_idle_spin_no_threads_while_another_is_busy(tcp_node):
    """The R-engine's thread reads all sockets; the threads of each link sleep."""
    links = [await connect(tcp_node.url, hello(), None) for _ in range(12)]
    busy = await connect(tcp_node.url, Payloads.HELLO, None)
    before = cpu_seconds(tcp_node.pid)
    await asyncio.to_thread(Payloads(busy).run, 5000)
    after = cpu_seconds(tcp_node.pid)
    used = sorted((after[thread] - seconds for thread, seconds in before.items()), reverse=True)
    assert len(used) > 2 * len(links)
    assert used[0] > 0.05  # the R-engine's thread
    assert sum(used[4:]) < 0.1 * used[0], used  # all but the R-engine's, the busy link's two and Python's threads
    for link in (*links, busy):
        await link.close()
