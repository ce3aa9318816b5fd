"""A process that only holds idle links to an R-node, so that all CPU time of the process is theirs.

    python idle_links.py URL LINKS

Each link runs one step. The process then prints "idle", and SIGTERM ends it.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from wire.link_driver import Driver, hello, in_thread

from fastdecode.transports.registry import connect
from nodes.script_process import ScriptProcess


class IdleLinks(ScriptProcess):
    """A process with `count` idle links to the R-node at `url`."""

    def __init__(self, url: str, count: int):
        super().__init__(__file__, url, str(count))
        assert self.read_line() == "idle"


async def main(url: str, count: int) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    links = [await connect(url, hello(), None) for _ in range(count)]
    for link in links:
        await in_thread(Driver(link, hello()).step, 0, [(0, 1, True)])
    print("idle", flush=True)
    await ended.wait()
    for link in links:
        await link.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
