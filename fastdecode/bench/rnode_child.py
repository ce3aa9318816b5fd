"""An R-node in a process of its own for a benchmark.

`python -m fastdecode.bench.rnode_child URL SPIN_US KV_BYTES [CPU]` prints the URL that it listens on. It ends when its
standard input is closed, so at the latest with its parent.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

from fastdecode.daemon.rnode import RNode


class RNodeChild:
    """An R-node process with one attention thread, pinned to `cpu` if that is not None.

    The attribute `url` is the URL that it listens on. Raises RuntimeError if it does not start.
    """

    def __init__(self, url: str, spin_us: int, kv_bytes: int, cpu: int | None):
        argv = [sys.executable, "-m", __name__, url, str(spin_us), str(kv_bytes)]
        if cpu is not None:
            argv.append(str(cpu))
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            self.close()
            raise RuntimeError(f"no R-node could be started at {url}")

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def _serve(url: str, spin_us: int, kv_bytes: int, *cpus: int) -> None:
    node = RNode(threads=1, kv_bytes=kv_bytes, cpus=cpus or None, spin_us=spin_us, name="benchmark")
    try:
        print(*await node.serve([url], None), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await node.close()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], *map(int, sys.argv[2:])))
