"""The embedded R-node: a child process over shared memory, for an S-node that was given none."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fastdecode.daemon.config import EMBEDDED, NodeConfig
from fastdecode.daemon.machine import numa_nodes, usable_cpus

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Split:
    """How one machine's cores are shared out between the S-Part and an embedded R-node, if it has one."""

    s_threads: int
    r_threads: int
    mini_batches: int


def split_machine(config: NodeConfig, *, s_on_gpu: bool) -> Split:
    """Choose what the command line left open.

    On a CPU both parts take turns on all cores, with one mini-batch: two of half the size would read the weights twice,
    and each part on half of the cores takes twice as long (`fastdecode-bench decode` shows either). Where the command
    line gives one of them cores of its own or asks for more mini-batches, and beside a GPU, they work side by side: the
    R-node gets half of the cores (rounded down, at least one), beside a GPU all but one. An R-node that is bound to a
    NUMA node has no more threads than that has cores.
    """
    cores = len(usable_cpus())
    if config.r_node:
        return Split(config.s_threads or cores, 0, config.mini_batches or 2)
    apart = config.threads or config.cpus or config.s_threads or config.numa_node is not None
    if not s_on_gpu and not apart and (config.mini_batches or 1) == 1:
        return Split(cores, cores, 1)
    r_threads = config.threads or (len(config.cpus) if config.cpus else None)
    if r_threads is None:
        r_threads = max(1, cores - 1 if s_on_gpu else cores // 2)
        if config.numa_node is not None:
            r_threads = min(
                [r_threads, *(len(n.cpus) for n in numa_nodes() if n.number == config.numa_node and n.cpus)]
            )
    s_threads = config.s_threads or max(1, cores - r_threads)
    return Split(s_threads, r_threads, config.mini_batches or 2)


class EmbeddedRNode:
    """A child `fastdecode-node --role r`; it dies with this process, however that ends."""

    def __init__(self, config: NodeConfig, split: Split):
        """Where the command line leaves it open, the KV-cache gets a share of the memory that is free when the child
        starts, so this comes after the weights are loaded.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="fastdecode-"))  # 0700, so nobody else reaches the socket
        self._process: asyncio.subprocess.Process | None = None
        self._threads = split.r_threads
        self.url = f"shm://{self._directory}/r.sock"
        self._argv = ["--role", "r", "--listen", self.url, "--threads", str(split.r_threads)]
        self._argv += config.to_args([name for name in EMBEDDED if name != "threads"])
        self._argv += config.to_args(["spin_us", "secret_file", "log_level"])

    async def start(self) -> None:
        """Start the child and wait until it listens. Raises RuntimeError if it does not."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # whatever lies in the working directory, the child is this package
            "-m",
            "fastdecode.daemon.node",
            *self._argv,
            stdin=asyncio.subprocess.DEVNULL,
            # ^C in a terminal is for the parent alone: its running requests need this node until it ends it.
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            await self._until_listening()
        except BaseException:
            await self.stop()
            raise
        log.info("embedded R-node: %d thread(s), pid %d", self._threads, self._process.pid)

    async def restart(self) -> None:
        """Start another child in the place of one that is dead or does not answer. Raises RuntimeError, OSError."""
        await self.stop()
        self._directory.mkdir(mode=0o700)
        await self.start()

    async def _until_listening(self) -> None:
        socket = self._directory / "r.sock"
        deadline = time.monotonic() + _START_SECONDS
        while not socket.exists():
            if self._process.returncode is not None:
                raise RuntimeError(f"the embedded R-node ended at start (exit status {self._process.returncode})")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the embedded R-node does not listen after {_START_SECONDS:.0f} s")
            await asyncio.sleep(0.02)

    def hide(self) -> None:
        """Remove the socket, once the S-node has connected: nobody else may, and a kill leaves no file behind."""
        shutil.rmtree(self._directory, ignore_errors=True)

    async def stop(self) -> None:
        """End the child: SIGTERM, and SIGKILL if it does not listen. Idempotent."""
        if self._process is not None:
            await self._end()
        self.hide()

    async def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), 5.0)
        except TimeoutError:
            log.warning("the embedded R-node does not end; killing it")
            self._process.kill()
            await self._process.wait()


def _die_with_parent() -> None:
    """In the child before exec: SIGKILL when the parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
