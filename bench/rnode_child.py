"""An R-node in a process of its own for a benchmark.

`python -P -m fastdecode.bench.rnode_child URL SPIN_US KV_BYTES THREADS [CPU]` prints the URL that it listens on. It
ends with its standard input, so at the latest with its parent. Unlike fastdecode-node it does not time the memory.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

from fastdecode.daemon.process import freeze
from fastdecode.daemon.rnode import RNode


class RNodeChild:
    """An R-node process; its attention thread is pinned to `cpu` if that is not None.

    The attribute `url` is the URL that it listens on. Raises RuntimeError if it does not start.
    """

    def __init__(self, url: str, spin_us: int, kv_bytes: int, cpu: int | None, threads: int = 1):
        argv = [sys.executable, "-P", "-m", __name__, url, str(spin_us), str(kv_bytes), str(threads)]
        if cpu is not None:
            argv.append(str(cpu))
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            self.close()
            raise RuntimeError(f"no R-node could be started at {url}")

    def close(self) -> None:
        """End the process; kill it if it has not ended 10 seconds after its standard input was closed."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def _serve(url: str, spin_us: int, kv_bytes: int, threads: int, *cpus: int) -> None:
    node = RNode(threads=threads, kv_bytes=kv_bytes, cpus=cpus or None, spin_us=spin_us, name="benchmark")
    try:
        (listening,) = await node.serve([url], None)
        freeze()
        print(listening, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await node.close()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], *map(int, sys.argv[2:])))
