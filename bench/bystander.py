"""The cost of one tenant's load to another tenant of the same R-node: `fastdecode-bench transport --bystander`.

The bystander makes an empty call (one row, appended) each millisecond, over shm and over tcp in turn, while another
process forks thousands of sequences, sends the longest legal calls or drips its frames. Each load is compared with the
same calls undisturbed, right before it. A load lasts until that process has done a round of its work, within limits.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
from tqdm import tqdm

from fastdecode.bench.hog import HOGS, Hog, kv_bytes_of
from fastdecode.bench.rnode_child import RNodeChild
from fastdecode.kernels._native import page_bytes
from fastdecode.region.contract import KV_DTYPES, ROW_DTYPE
from fastdecode.region.geometry import Geometry, geometry_tuple
from fastdecode.transports import registry
from fastdecode.transports.base import Hello, Link

_GEOMETRY = Geometry(1, 1, 1, 1, 1, 8, "fp16")
_PAUSE_S = 0.001
_TIMEOUT = 60.0
_LONGER = 10  # a load lasts at most this many times as long as asked, to let it do a round
_MIB = 1 << 20
#: Bytes for the links' activation regions and the bystander's leases, beside a hog's lease.
_ROOM = 512 * _MIB


def measure(threads: int, spin_us: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of an empty call, by load and transport. Raises RuntimeError, TransportError."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastdecode-"))
        for kind in tqdm(HOGS, desc="loads", unit="load"):
            urls = f"shm://{directory}/{kind}.sock tcp://127.0.0.1:0"
            with closing(RNodeChild(urls, spin_us, kv_bytes_of(kind) + _ROOM, None, threads)) as node:
                rows += asyncio.run(_beside(kind, dict(zip(("shm", "tcp"), node.urls, strict=True)), spin_us, seconds))
    return {"threads": threads, "spin_us": spin_us, "seconds": seconds, "rows": rows}


async def _beside(kind: str, urls: dict[str, str], spin_us: int, seconds: float) -> list[dict[str, Any]]:
    one_page = page_bytes(geometry_tuple(_GEOMETRY), KV_DTYPES.index("fp16"))
    hello = Hello(_GEOMETRY, "fp16", (0,), 1.0, one_page, 1)
    links = {name: await registry.connect(url, hello, None, spin_us=spin_us) for name, url in urls.items()}
    hog = await asyncio.to_thread(Hog, kind, urls["tcp" if kind == "drip" else "shm"])
    try:
        alone = await _calls(links, lambda elapsed: elapsed < seconds)
        hog.begin()
        disturbed = await _calls(
            links, lambda elapsed: elapsed < seconds or (not hog.rounds and elapsed < _LONGER * seconds)
        )
        rounds = hog.rounds
    finally:
        await asyncio.to_thread(hog.stop)
        for link in links.values():
            await link.close()
    rows = []
    for name in links:
        for load, ms in (("none", alone[name]), (kind, disturbed[name])):
            p50, p99 = np.percentile(ms, [50, 99]).tolist()
            row = {"load": load, "beside": kind, "transport": name, "calls": len(ms)}
            rows.append(
                row | {"p50_ms": p50, "p99_ms": p99, "max_ms": max(ms), "rounds": 0 if load == "none" else rounds}
            )
    return rows


async def _calls(links: dict[str, Link], go_on: Callable[[float], bool]) -> dict[str, list[float]]:
    """Milliseconds of each call, over each link. `go_on` is called with the seconds since the first one."""
    taken: dict[str, list[float]] = {name: [] for name in links}
    begin = time.perf_counter()
    while go_on(time.perf_counter() - begin):
        for name, link in links.items():
            start = time.perf_counter()
            _empty_step(link)
            taken[name].append((time.perf_counter() - start) * 1e3)
            await link.trim(0, 1, 0)
            await asyncio.sleep(_PAUSE_S)
    return taken


def _empty_step(link: Link) -> None:
    table = np.zeros(1, ROW_DTYPE)
    table["tag"], table["n_rows"] = 1, 1
    link.arm(0, table)
    link.wait(0, _TIMEOUT)
    link.ring(0, 0)
    link.wait(0, _TIMEOUT)
    link.disarm(0)


def print_table(result: dict[str, Any]) -> None:
    print(
        f"an empty call, ms, while another tenant loads an R-node of {result['threads']} threads; "
        f"{result['seconds']:g} s or more each"
    )
    print(f"{'the other tenant':52} {'over':5} {'calls':>7} {'p50':>8} {'p99':>8} {'max':>8}")
    for row in result["rows"]:
        if row["load"] == "none":
            does = "is idle"
        else:
            does = f"{HOGS[row['load']][1]} ({row['rounds']} x)"
        print(
            f"{does:52} {row['transport']:5} {row['calls']:7} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f}"
            f" {row['max_ms']:8.3f}"
        )
