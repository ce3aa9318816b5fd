"""Shared by all tests: `tests/` itself is importable, for helper modules such as checkpoints.py."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fastdecode.rnode import RNode

sys.path.insert(0, str(Path(__file__).parent))
# In children, too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))

# One torch thread here and in every process a test starts: with more, OpenMP's spinning waiters and the R-engine's
# threads take the cores from each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No child finds the source folder `fastdecode/` in its working directory instead of the installed package.
os.environ["PYTHONSAFEPATH"] = "1"

R_NODE_KV_BYTES = 64 << 20


@pytest.fixture
async def r_node(tmp_path: Path) -> AsyncIterator[RNode]:
    """An R-node within this process; its addresses are `shm` and `tcp`."""
    from fastdecode.rnode import RNode

    node = RNode(threads=1, kv_bytes=R_NODE_KV_BYTES, name="test", spin_us=20)
    node.shm, node.tcp = await node.serve([f"shm://{tmp_path}/r.sock", "tcp://127.0.0.1:0"], None)
    yield node
    await node.close()


@pytest.fixture
async def bystander(r_node: RNode) -> AsyncIterator[None]:
    """Another S-node, over TCP, that goes on decoding, checked against float64, while a test does what it does."""
    from link_driver import Driver, hello

    from fastdecode.transports.registry import connect

    asks = hello()
    link = await connect(r_node.tcp, asks, None)
    driver = Driver(link, asks)
    stop, steps = threading.Event(), [0]

    def decode() -> None:
        while not stop.is_set():
            driver.step(0, [(0, 1, True)])
            steps[0] += 1
            if driver.shadows[0].length == 60:
                future = asyncio.run_coroutine_threadsafe(driver.free_seq(0), loop)
                future.result(20.0)
            time.sleep(0.001)

    loop = asyncio.get_running_loop()
    work = asyncio.create_task(asyncio.to_thread(decode))
    yield
    before = steps[0]
    async with asyncio.timeout(20.0):
        while steps[0] < before + 10:
            assert not work.done() or work.result()
            await asyncio.sleep(0.01)
        stop.set()
        await work
    await link.close()
    assert r_node.kv_free == R_NODE_KV_BYTES  # nobody has left a lease behind
