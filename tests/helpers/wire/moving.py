"""Links to R-nodes of this process between which sequences move."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator

from nodes.rnode_process import KV_BYTES

from fastdecode.daemon.rnode import RNode
from fastdecode.transports.registry import connect
from wire.link_driver import Driver, hello

SECRET = b"a secret that is long enough"


def token() -> str:
    return secrets.token_hex(32)


@contextlib.asynccontextmanager
async def two_links(
    first: str, second: str, wanted=None, secret: bytes | None = None
) -> AsyncIterator[tuple[Driver, Driver]]:
    """Links with the same Hello to two R-nodes."""
    wanted = wanted or hello(kv_bytes=4 << 20)
    drivers = []
    try:
        for seed, url in enumerate((first, second)):
            drivers.append(Driver(await connect(url, wanted, secret), wanted, seed))
        yield drivers[0], drivers[1]
    finally:
        for driver in drivers:
            await driver.link.close()


@contextlib.asynccontextmanager
async def r_nodes(*urls: str, secret: bytes | None = None) -> AsyncIterator[list[str]]:
    """R-nodes in this process."""
    async with contextlib.AsyncExitStack() as stack:
        bound = []
        for i, url in enumerate(urls):
            node = RNode(threads=1, kv_bytes=KV_BYTES, name=f"r{i}", spin_us=20)
            stack.push_async_callback(node.close)
            bound += await node.serve([url], secret)
        yield bound
