"""The API in processes of its own, the children of the engine's process.

The engine's process binds the sockets on which the API listens and keeps them open, so connections that come while an
API process is started again wait for it. It talks to each API process over a pair of sockets without a name; whichever
of the two ends, the other one reads the end of the connection at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields

from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.config_sources import without_options
from fastdecode.service.client import EngineClient
from fastdecode.service.host import EngineHost

log = logging.getLogger(__name__)

_END_SECONDS = 10.0  # within which a process ends that has been asked to, or that has closed its connection
_PAUSE_SECONDS = 5.0  # before the next start after a process that ended before it served


class _Child:
    """One API process and this process's end of the connection to it."""

    def __init__(self, config: NodeConfig, listening: Sequence[socket.socket]):
        self.socket, theirs = socket.socketpair()
        fds = [theirs.fileno(), *(sock.fileno() for sock in listening)]
        options = config.to_args([f.name for f in fields(config) if f.name != "config"])
        with theirs:
            self.process = subprocess.Popen(
                # -P: the child must not import a folder `fastdecode` in the working directory
                [sys.executable, "-P", "-m", "fastdecode.daemon.api_process", ",".join(map(str, fds)), *options],
                stdin=subprocess.DEVNULL,
                env=without_options(fields(NodeConfig), os.environ),
                pass_fds=fds,
            )

    async def ended(self) -> str:
        """Wait for the end of the process, kill it if that does not come, and say how it ended."""
        try:
            status = await asyncio.to_thread(self.process.wait, _END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("API process %d does not end; killing it", self.process.pid)
            self.process.kill()
            status = await asyncio.to_thread(self.process.wait)
        return f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"


class ApiProcesses:
    """Starts the API processes, starts one again when it dies, and ends them."""

    def __init__(self, config: NodeConfig, listening: Sequence[socket.socket]):
        """Start `config.api_processes` processes, which wait for an engine. `listening` are bound sockets, which the
        object then owns."""
        self._config, self._listening = config, list(listening)
        self._children = [_Child(config, listening) for _ in range(config.api_processes)]
        self._hosts: set[EngineHost] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()
        self.port: int = listening[0].getsockname()[1]

    async def serve(self, engine: EngineClient) -> None:
        """Serve `engine`, and return once all processes listen. Raises RuntimeError if one ends before."""
        for child in self._children:
            host = await EngineHost.over(child.socket, engine)
            self._tasks.append(asyncio.create_task(self._keep(child, host, engine)))
            if not await host.served():
                raise RuntimeError(f"API process {child.process.pid} ended {await child.ended()} before it served")

    async def _keep(self, child: _Child, host: EngineHost, engine: EngineClient) -> None:
        """Serve the engine to a child, and to its successors."""
        while True:
            self._hosts.add(host)
            await host.run()
            self._hosts.discard(host)
            how = await child.ended()
            if self._closing.is_set():
                return
            log.error("API process %d ended %s, and with it its requests; starting another", child.process.pid, how)
            if not host.serving.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), _PAUSE_SECONDS)
                    return
            child = _Child(self._config, self._listening)
            host = await EngineHost.over(child.socket, engine)

    async def drain(self, seconds: float) -> None:
        """Let the processes refuse new requests, with /health at 503 while they still listen, and wait up to `seconds`
        for the running requests; then they end the others with an error."""
        await asyncio.gather(*(host.drain(seconds) for host in self._hosts))

    async def close(self) -> None:
        """End the processes. Idempotent."""
        self._closing.set()
        for host in self._hosts:
            host.close()
        if not self._tasks:  # no engine was served
            for child in self._children:
                child.socket.close()
                await child.ended()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sock in self._listening:
            sock.close()
