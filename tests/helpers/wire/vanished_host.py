"""An R-node and two links to it over a network that goes away, as when a host loses power or a cable is pulled.

A script: it makes a network namespace and takes the loopback interface down there. It prints, as JSON, the seconds
until the idle link had ended, the busy link had ended, and the R-node had freed the leases. Exit status 77: it may not
make a namespace.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import socket
import struct
import sys
import time

NOT_ALLOWED = 77
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
KV_BYTES = 16 << 20


def loopback(flags: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


async def main() -> None:
    import numpy as np

    from fastdecode.daemon.rnode import RNode
    from fastdecode.region.contract import ROW_ATTEND, ROW_DTYPE
    from fastdecode.transports.registry import connect
    from wire.link_driver import hello

    node = RNode(threads=1, kv_bytes=KV_BYTES)
    (url,) = await node.serve(["tcp://127.0.0.1:0"], None)
    idle, busy = [await connect(url, hello(), None) for _ in range(2)]
    loopback(0)
    gone = time.monotonic()
    busy.arm(0, np.array([(0, 1, 0, 1, ROW_ATTEND, 0)], ROW_DTYPE))

    async def noticed(link) -> float:
        assert await link.closed() is not None
        return time.monotonic() - gone

    times = await asyncio.gather(noticed(idle), noticed(busy))
    while node.kv_free < KV_BYTES:
        await asyncio.sleep(0.02)
    print(json.dumps([*times, time.monotonic() - gone]))
    loopback(_IFF_UP)
    await node.close()


if __name__ == "__main__":
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET | (_CLONE_NEWUSER if os.getuid() else 0)):
        sys.exit(NOT_ALLOWED)
    loopback(_IFF_UP)
    asyncio.run(asyncio.wait_for(main(), 30))
