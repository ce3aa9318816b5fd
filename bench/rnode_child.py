"""An R-node in a process of its own for a benchmark.

`python -m fastdecode.bench.rnode_child URLS SPIN_US KV_BYTES THREADS PREFAULT [CPU]` prints the URLs that it listens
on. It ends when its standard input is closed, so at the latest with its parent. URLs are separated by spaces; PREFAULT
is 0 or 1.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

from fastdecode.daemon.process import freeze
from fastdecode.daemon.rnode import RNode


class RNodeChild:
    """An R-node process; its attention thread is pinned to `cpu` if that is not None.

    The attribute `urls` lists the URLs that it listens on, and `url` is the first. Raises RuntimeError if it does not
    start.
    """

    def __init__(
        self, url: str, spin_us: int, kv_bytes: int, cpu: int | None, threads: int = 1, prefault: bool = False
    ):
        argv = [sys.executable, "-m", __name__, url, str(spin_us), str(kv_bytes), str(threads), str(int(prefault))]
        if cpu is not None:
            argv.append(str(cpu))
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.urls = self._process.stdout.readline().split()
        if not self.urls:
            self.close()
            raise RuntimeError(f"no R-node could be started at {url}")
        self.url = self.urls[0]

    def close(self) -> None:
        end_child(self._process)


def end_child(process: subprocess.Popen[Any]) -> None:
    """End a child that ends with its standard input; kill it if it has not ended after 10 seconds."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _serve(urls: list[str], spin_us: int, kv_bytes: int, threads: int, prefault: int, *cpus: int) -> None:
    node = RNode(
        threads=threads,
        kv_bytes=kv_bytes,
        cpus=cpus or None,
        spin_us=spin_us,
        name="benchmark",
        prefault=bool(prefault),
    )
    try:
        listening = await node.serve(urls, None)
        freeze()
        print(*listening, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await node.close()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1].split(), *map(int, sys.argv[2:])))
