"""An R-node as a process, which a test kills, stops or blocks; and a count of the resources that a process holds.

    python rnode_process.py URL KV_BYTES [SECRET]

The process prints the URL that it listens at. SIGTERM ends it. On SIGUSR1 it prints a pipe's number and holds its GIL
until a byte comes through that pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from fastdecode.daemon.migrations import fault_thread
from nodes.script_process import ScriptProcess

KV_BYTES = 64 << 20  # the default
#: The transports that the conformance suite tests, by URL scheme, each with the URL that a test's R-node listens at.
#: "{folder}" is a folder of the test's own.
LISTEN_URLS = {
    "shm": "shm://{folder}/r.sock",
    "tcp": "tcp://127.0.0.1:0",
    "rdma": f"rdma://{os.environ.get('FASTDECODE_RDMA_HOST', '127.0.0.1')}:0",
}
#: A test prints this when it expects the R-node's host to lose power.
PULL_THE_PLUG = "now pull the plug of the R-node's host"


def r_threads() -> dict[int, str]:
    """The threads of R-engines in this process: their names by id."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[int(thread.name)] = (thread / "comm").read_text().strip()
    return {thread: name for thread, name in found.items() if name.startswith("fd-r")}


class RNodeProcess(ScriptProcess):
    """An R-node process that listens at `url`."""

    def __init__(self, url: str, kv_bytes: int, secret: str = ""):
        self.url = url
        self._rest = [str(kv_bytes), *([secret] if secret else [])]
        self.start()

    @classmethod
    def over(cls, transport: str, folder: Path) -> RNodeProcess:
        """An R-node that listens at LISTEN_URLS[transport]."""
        return cls(LISTEN_URLS[transport].format(folder=folder), KV_BYTES)

    def start(self) -> None:
        """Start the process, or start it again at the same address after its end."""
        super().__init__(__file__, self.url, *self._rest)
        self.url = self.read_line()
        assert self.url, "the R-node did not start"

    def stick(self) -> None:
        """Let the process hold its GIL from now on, until `unstick`."""
        self.send_signal(signal.SIGUSR1)
        self._stuck_pipe = Path(f"/proc/{self.pid}/fd/{int(self.read_line())}")

    def unstick(self) -> None:
        self._stuck_pipe.write_bytes(b"!")


@contextlib.contextmanager
def r_node_processes(*urls: str, kv_bytes: int = 256 << 20) -> Iterator[list[RNodeProcess]]:
    """R-nodes that listen at these URLs."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for url in urls:
            nodes.append(RNodeProcess(url, kv_bytes))
            stack.callback(nodes[-1].end)
        yield nodes


class FarRNode:
    """An R-node on another host, of which only the URL is known."""

    def __init__(self, url: str):
        self.url = url

    @property
    def pid(self) -> int:
        import pytest

        pytest.skip("the R-node is on another host")


@dataclass(frozen=True)
class Held:
    """The resources of a process that a link could leave behind."""

    fds: int
    threads: int
    regions: int  # mapped activation regions
    registered: int  # bytes of memory registered with RDMA devices
    shm: int  # files in /dev/shm, of all processes
    verbs: str  # queue pairs, completion queues, registrations and so on, of all processes

    @classmethod
    def by(cls, pid: int) -> Held:
        if pid == os.getpid():
            gc.collect()
        fds, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
        regions = Path(f"/proc/{pid}/maps").read_text().count("memfd:fastdecode-region")
        return cls(fds, threads, regions, _status_bytes(pid, "VmPin"), len(os.listdir("/dev/shm")), _verbs())


def _verbs() -> str:
    """The kernel's count of RDMA objects, a line for each device."""
    if not any(Path("/sys/class").glob("infiniband/*")):
        return ""
    return subprocess.run(["rdma", "resource"], stdout=subprocess.PIPE, text=True, check=True).stdout


def _status_bytes(pid: int, *names: str) -> int:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) for name in names) << 10


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, without mapped files."""
    return _status_bytes(pid, "RssAnon", "RssShmem")


def needed_bytes() -> int:
    """Resident memory of this process that it needs: without objects that nobody reaches, and without what malloc keeps
    for each thread, which depends on the threads of an executor that had work."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes(os.getpid())


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc: ten sizes, among them hblkhd (bytes in mappings) and uordblks (bytes in use)."""

    _fields_ = [("sizes", ctypes.c_size_t * 10)]


def allocated_bytes() -> int:
    """Memory that this process holds from malloc and from Python's allocator, each of whose blocks counts as 512 bytes,
    its largest. Resident memory says less: the kernel makes huge pages around pages in use, and counts them whole."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallocInfo
    sizes = mallinfo2().sizes
    return sizes[4] + sizes[7] + 512 * sys.getallocatedblocks()


def start_executor_threads() -> None:
    """Start all threads of the running loop's executor and the one that faults in memory, so that any thread that
    appears later belongs to a link."""
    n = 4
    loop, barrier = asyncio.get_running_loop(), threading.Barrier(n + 1)
    executor = ThreadPoolExecutor(n)
    loop.set_default_executor(executor)
    for _ in range(n):
        executor.submit(barrier.wait)
    barrier.wait()
    fault_thread.submit(int).result()


def hold_the_gil(*_: object) -> None:
    reading, writing = os.pipe()
    os.write(1, f"{writing}\n".encode())
    ctypes.PyDLL(None).read(reading, ctypes.create_string_buffer(1), 1)


async def main(url: str, kv_bytes: int, secret: bytes | None) -> None:
    from fastdecode.daemon.rnode import RNode

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    signal.signal(signal.SIGUSR1, hold_the_gil)
    start_executor_threads()
    node = RNode(threads=1, kv_bytes=kv_bytes, name="test", spin_us=20)
    print(*await node.serve([url], secret, insecure=True), flush=True)
    await ended.wait()
    await node.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3].encode() if len(sys.argv) > 3 else None))
