"""What an RDMA link costs beside perftest's numbers for the same device; prints one JSON object.

    python tests/rdma/guest.py run python tests/rdma/measure.py

Calls that the R-engine refuses at once (no sequence has that tag) carry bytes without attention. Of a round trip, less
the R-engine's own time, a reply's way is taken to be half of one with next to nothing in it, and the rest is the way of
4 KiB. Four slots in flight with 1 MiB each give the bandwidth.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from link_driver import hello
from rnode_process import RNodeProcess

from fastdecode.transports.base import ROW_DTYPE, CallRefused, Geometry, Link
from fastdecode.transports.registry import connect

DEVICE, GID, HOST = "rxe0", "1", "127.0.0.1"
CALLS = 400
MIB = 1 << 20

#: A Q row of 4 KiB, and a KV row of 128 bytes; a KV row of 64 KiB.
SMALL = Geometry(n_slots=1, max_rows=1, n_layers=1, n_q_heads=64, n_kv_heads=1, head_size=16, act_dtype="fp32")
BULK = Geometry(n_slots=4, max_rows=16, n_layers=1, n_q_heads=32, n_kv_heads=32, head_size=256, act_dtype="fp32")


def perftest(tool: str, size: int, n: int) -> list[float]:
    """The figures in the last line of its table."""
    command = [tool, "-d", DEVICE, "-x", GID, "-F", "-s", str(size), "-n", str(n)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(2)
    printed = subprocess.run([*command, HOST], capture_output=True, text=True, check=True).stdout
    server.wait(20)
    rows = [line.split() for line in printed.splitlines() if re.match(rf"\s*{size}\s", line)]
    return [float(x) for x in rows[-1]]


def call(link: Link, slot: int, rows: int, attend: int) -> None:
    link.post(slot, 0, 1, rows, attend, True)


def reply(link: Link, slot: int) -> None:
    try:
        link.wait(slot, 60.0)
    except CallRefused:
        return
    raise AssertionError("the R-engine should have refused this call")


async def measure(url: str, geometry: Geometry, rows: int, attend: int) -> tuple[float, float, float]:
    """Seconds: a typical round trip less the R-engine's time, a typical post, and a call with all slots in flight."""
    link = await connect(url, hello(geometry, kv_bytes=16 * MIB), None)
    for slot in range(geometry.n_slots):
        link.write_table(slot, np.array([(0, 7, 3, rows, 1 if attend else 0, 0)], ROW_DTYPE))

    def run() -> tuple[list[float], list[float], float]:
        trips, posts = [], []
        for _ in range(CALLS if rows == 1 else 10):
            started = time.perf_counter()
            call(link, 0, rows, attend)
            posted = time.perf_counter()
            reply(link, 0)
            trips.append(time.perf_counter() - started)
            posts.append(posted - started)
        n = CALLS if rows == 1 else 40
        started = time.perf_counter()
        for i in range(n + geometry.n_slots):
            slot = i % geometry.n_slots
            if i >= geometry.n_slots:
                reply(link, slot)
            if i < n:
                call(link, slot, rows, attend)
        return trips, posts, (time.perf_counter() - started) / n

    trips, posts, each = await asyncio.to_thread(run)
    stats = await link.stats()
    await link.close()
    busy = stats["busy_ns"] / stats["calls"] * 1e-9
    return statistics.median(trips) - busy, statistics.median(posts), each


async def main() -> None:
    node = RNodeProcess(f"shm://{tempfile.mkdtemp()}/r.sock", 64 * MIB)
    try:
        _, python, _ = await measure(node.url, SMALL, 1, 1)  # this transport's own part of a post is a store
    finally:
        node.end()
    node = RNodeProcess(f"rdma://{HOST}:0", 64 * MIB)
    try:
        empty, _, _ = await measure(node.url, SMALL, 1, 0)
        trip, post, _ = await measure(node.url, SMALL, 1, 1)
        _, _, bulk = await measure(node.url, BULK, 16, 0)
    finally:
        node.end()
    found = {
        "call_and_reply_with_128_B_us": empty * 1e6,
        "write_4KiB_one_way_us": (trip - empty / 2) * 1e6,
        "of_it_in_post_us": post * 1e6,
        "of_it_in_python_us": python * 1e6,
        "bandwidth_1MiB_MB_s": MIB / bulk * 1e-6,
        "ib_write_lat_4KiB_typical_us": perftest("ib_write_lat", 4096, 500)[4],
        "ib_write_bw_1MiB_MB_s": perftest("ib_write_bw", MIB, 40)[3] * 1.048576,
    }
    print(json.dumps({name: round(value, 1) for name, value in found.items()}))


asyncio.run(main())
