"""The API in processes of its own, the children of the engine's process.

The engine's process binds the sockets on which the API listens and keeps them open, so connections that come while an
API process is started again wait for it. It talks to each API process over a pair of sockets without a name; whichever
of the two ends, the other one reads the end of the connection at once. An API process that does not answer for some
seconds is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
from collections.abc import Sequence

from fastdecode.daemon.child import child_environment, module_command
from fastdecode.daemon.config import NodeConfig
from fastdecode.service.client import EngineClient
from fastdecode.service.host import EngineHost

log = logging.getLogger(__name__)

_END_SECONDS = 10.0  # within which a process ends that has been asked to, or that has closed its connection
_DRAIN_SECONDS = 5.0  # by which the end of a drain may be late before the process counts as hung
_PAUSE_SECONDS = 5.0  # before the next start after a process that ended before it served, or that could not be started


class _ApiProcess:
    """One API process and this process's end of the connection to it."""

    def __init__(self, config: NodeConfig, listening: Sequence[socket.socket]):
        self.socket, theirs = socket.socketpair()
        fds = [theirs.fileno(), *(sock.fileno() for sock in listening)]
        try:
            self.process = subprocess.Popen(
                module_command("fastdecode.daemon.api_process", ",".join(map(str, fds)), *config.to_args()),
                stdin=subprocess.DEVNULL,
                env=child_environment(),
                pass_fds=fds,
            )
        except OSError:
            self.socket.close()
            raise
        finally:
            theirs.close()

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
        self._children = [_ApiProcess(config, listening) for _ in range(config.api_processes)]
        self._hosts: set[EngineHost] = set()
        self._tasks: list[asyncio.Task[None]] = []  # each keeps the child with its number alive
        self._ending = asyncio.Event()  # no child is started any more
        self.port: int = listening[0].getsockname()[1]

    async def serve(self, engine: EngineClient) -> None:
        """Serve `engine`, and return once all processes listen. Raises RuntimeError if one ends before."""
        for number, child in enumerate(self._children):
            host = await EngineHost.open(child.socket, engine)
            self._tasks.append(asyncio.create_task(self._keep(number, host, engine)))
            if not await host.serving:
                self._ending.set()
                raise RuntimeError(f"API process {child.process.pid} ended {await child.ended()} before it served")

    async def _keep(self, number: int, host: EngineHost, engine: EngineClient) -> None:
        """Serve the engine to the child with a number, and to its successors."""
        while True:
            self._hosts.add(host)
            await host.run()
            self._hosts.discard(host)
            if self._ending.is_set() and not host.hung:
                return
            child = self._children[number]
            if host.hung:
                log.error("API process %d hangs; killing it", child.process.pid)
                child.process.kill()
            how = await child.ended()
            if self._ending.is_set():
                return
            log.error("API process %d ended %s, and with it its requests; starting another", child.process.pid, how)
            if (started := await self._start(pause=not host.serving.result())) is None:
                return
            self._children[number] = started
            host = await EngineHost.open(started.socket, engine)
            if self._ending.is_set():
                host.close()

    async def _start(self, *, pause: bool) -> _ApiProcess | None:
        """Start a child, after a pause if the last attempt failed; None: the node ends meanwhile."""
        while True:
            if pause:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), _PAUSE_SECONDS)
                    return None
            try:
                return _ApiProcess(self._config, self._listening)
            except OSError as error:
                log.error("an API process cannot be started: %s", error)
                pause = True

    async def drain(self, seconds: float) -> None:
        """Let the processes refuse new requests, with /health at 503 while they still listen, and wait up to `seconds`
        for the running requests; then they end the others with an error. A process that dies is not started again."""
        self._ending.set()
        try:
            async with asyncio.timeout(seconds + _DRAIN_SECONDS):
                await asyncio.gather(*(host.drain(seconds) for host in self._hosts))
        except TimeoutError:
            log.warning("an API process has not ended its requests within %.0f s", seconds + _DRAIN_SECONDS)

    async def close(self) -> None:
        """End the processes, and kill each that does not end by itself. Idempotent."""
        self._ending.set()
        for host in self._hosts:
            host.close()
        for child in self._children[len(self._tasks) :]:  # no engine was served to them
            child.socket.close()
        await asyncio.gather(*(child.ended() for child in self._children))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sock in self._listening:
            sock.close()
