"""The processes of a soak: one R-node and several S-nodes, and the resources that an R-node holds."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdecode.region.contract import ACT_DTYPES
from fastdecode.region.geometry import Geometry
from fastdecode.transports.base import Hello
from fastdecode.transports.registry import connect

_START_SECONDS = 120.0
_END_SECONDS = 60.0
_SMALLEST = Geometry(1, 1, 1, 1, 1, 8, ACT_DTYPES[0])
_LINKS_AT_ONCE = 24


class LoggedProcess:
    """A process whose output goes to the end of a log file."""

    def __init__(self, log: Path, argv: Sequence[str], env: dict[str, str], start_seconds: float = _START_SECONDS):
        """`env`: beside this process's environment. `start_seconds`: the longest that `read` waits."""
        self.log, self._name, self._start_seconds = log, Path(argv[0]).name, start_seconds
        with log.open("ab") as out:
            self._since = out.tell()
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=os.environ | env
            )

    async def read(self, pattern: str) -> str:
        """Wait until the process has written a line with `pattern`, and return its group. Raises RuntimeError."""
        deadline = time.monotonic() + self._start_seconds
        while time.monotonic() < deadline:
            written = self.log.read_bytes()[self._since :].decode(errors="replace")
            if match := re.search(pattern, written):
                return match[1]
            if self.process.poll() is not None:
                raise RuntimeError(f"{self._name} ended at start, see {self.log}:\n{written[-2000:]}")
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{self._name} did not start within {self._start_seconds:.0f} s, see {self.log}")

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.process.kill()
        self.process.wait()

    async def end(self) -> int:
        """End the process with SIGTERM. Returns its exit status. Raises RuntimeError if it does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self.process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            late = f"{self._name} did not end within {_END_SECONDS:.0f} s of SIGTERM, see {self.log}"
            raise RuntimeError(late) from None


class Node(LoggedProcess):
    """A fastdecode-node process."""

    def __init__(self, log: Path, *argv: str):
        super().__init__(log, [sys.executable, "-P", "-m", "fastdecode.daemon.node", *argv], {"OMP_NUM_THREADS": "1"})
        self._name = "a node"


@dataclass(frozen=True, slots=True)
class Held:
    """The resources that a process holds, and the number of files in /dev/shm, of all processes."""

    rss: int  # bytes
    descriptors: int
    threads: int
    shm: int

    @classmethod
    def by(cls, pid: int) -> Held:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return cls(
            int(status["VmRSS"].split()[0]) * 1024,
            len(os.listdir(f"/proc/{pid}/fd")),
            int(status["Threads"]),
            len(os.listdir("/dev/shm")),
        )


async def start_threads(url: str) -> None:
    """Let an R-node start the threads that its Python keeps for the ends of links: many links end at once."""
    hellos = [Hello(_SMALLEST, "fp32", (0,), 1.0, 1 << 14, 1)] * _LINKS_AT_ONCE
    links = await asyncio.gather(*(connect(url, hello, None) for hello in hellos))
    await asyncio.gather(*(link.close() for link in links))


async def free_memory(url: str) -> int:
    """Bytes of an R-node's KV-cache memory that nobody holds while nobody but this call is connected to it."""
    link = await connect(url, Hello(_SMALLEST, "fp32", (0,), 1.0, 1 << 14, 1), None)
    try:
        stats = await link.stats()
        return stats["kv_free"] + stats["pages_total"] * link.lease.page_bytes + stats["region_bytes"]
    finally:
        await link.close()
