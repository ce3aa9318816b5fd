"""The S side of a link as a process, which a test kills or stops.

    python snode_process.py URL WHAT [SECRET]

The process prints a line once its link is open, and the reason once the link has ended. WHAT is one of: idle; load,
which makes calls without end and checks every byte; large, whose calls are larger than a socket's buffer; or a number
n: the process kills itself before the n-th control frame, counted from 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from nodes.script_process import ScriptProcess


class SNodeProcess(ScriptProcess):
    """Starts the script."""

    def __init__(self, url: str, what: object, secret: str = ""):
        super().__init__(__file__, url, str(what), *([secret] if secret else []))

    def end(self, number: int = signal.SIGKILL) -> int:
        """End the process with SIGKILL. Returns the exit status."""
        return super().end(number)


@contextlib.contextmanager
def before_frame(n: int, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` before this task reads or writes its n-th control frame."""
    from fastdecode.transports.frames import FrameSocket

    task, seen, originals = asyncio.current_task(), 0, (FrameSocket.read, FrameSocket.write)

    def counted(original):
        async def read_or_write(*args):
            nonlocal seen
            if asyncio.current_task() is task:
                if seen == n:
                    act()
                seen += 1
            return await original(*args)

        return read_or_write

    FrameSocket.read, FrameSocket.write = map(counted, originals)
    try:
        yield
    finally:
        FrameSocket.read, FrameSocket.write = originals


def large_hello():
    """The Hello of a link whose calls and replies, of 64 KiB per row, are larger than the buffers of two sockets."""
    from wire.link_driver import hello

    from fastdecode.region.geometry import Geometry

    held = sum(int(Path(f"/proc/sys/net/ipv4/tcp_{x}mem").read_text().split()[2]) for x in "rw")
    rows = (held >> 16) + 16
    return hello(Geometry(1, rows, 1, 64, 1, 256, "fp32"), windows=(1,), kv_bytes=4 << 20, max_seqs=1)


async def main(url: str, what: str, secret: bytes | None) -> None:
    from wire.link_driver import Payloads, hello

    from fastdecode.region.contract import ROW_DTYPE
    from fastdecode.transports.base import LinkDown
    from fastdecode.transports.registry import connect

    wanted = {"load": Payloads.HELLO, "large": large_hello()}.get(what, hello())
    dies = before_frame(int(what), lambda: os.kill(os.getpid(), signal.SIGKILL)) if what.isdigit() else None
    with dies or contextlib.nullcontext():
        link = await connect(url, wanted, secret)
    if what == "load":
        payloads = Payloads(link)
        await asyncio.to_thread(payloads.run, 1)
    print("open", flush=True)
    try:
        if what == "load":
            await asyncio.to_thread(payloads.run, sys.maxsize)
        elif what == "large":
            rows = wanted.geometry.max_rows
            for tag in itertools.count():
                link.arm(0, np.array([(0, tag, 0, rows, 1, 0)], ROW_DTYPE))
                await asyncio.to_thread(link.wait, 0, 60.0)
                link.ring(0, 0)
                await asyncio.to_thread(link.wait, 0, 60.0)
                await link.free([(0, tag)])
    except LinkDown:
        pass
    print(await link.closed(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3].encode() if len(sys.argv) > 3 else None))
