"""The child process of a peer, seen from a benchmark: every question of the decode benchmark has a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

from fastdecode.bench import worker
from fastdecode.daemon.process import die_with_parent


class CutOffError(Exception):
    """The time is over, or the run is to end."""


class PeerError(Exception):
    """The peer cannot do what it was asked to do."""


def worker_file(name: str) -> Path:
    """The file of a worker. It is not imported, because it needs packages that this process may lack."""
    return Path(__file__).with_name(f"{name}_worker.py")


def worker_command(python: str, file: Path, arguments: dict[str, Any]) -> list[str]:
    """The command line of an interpreter that runs worker.py with the `Worker` of a file."""
    return [python, "-P", worker.__file__, str(file), json.dumps(arguments)]


class PeerProcess:
    """A process that runs worker.py with the `Worker` of a file. It ends with this process, whatever the
    cause."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    @classmethod
    async def start(cls, python: str, file: Path, arguments: dict[str, Any], env: dict[str, str]) -> PeerProcess:
        """Start a process of the interpreter `python`, with `env` beside this process's environment."""
        process = await asyncio.create_subprocess_exec(
            *worker_command(python, file, arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | env,
            start_new_session=True,  # so that ^C does not reach it
            preexec_fn=die_with_parent,
        )
        return cls(process)

    async def answer(self, seconds: float, stop: asyncio.Event) -> dict[str, Any]:
        """The next answer; the first says that the model is loaded. Raises PeerError, and CutOffError if it has not
        come after `seconds` or when `stop` is set."""
        assert self._process.stdout
        reading = asyncio.ensure_future(self._process.stdout.readline())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            done, _ = await asyncio.wait([reading, stopping], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if reading not in done:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            raise CutOffError
        line = reading.result()
        if not line:
            raise PeerError(f"ended with status {await self._process.wait()}")
        value: dict[str, Any] = json.loads(line)
        if "error" in value:
            raise PeerError(value["error"])
        return value

    async def ask(self, seconds: float, stop: asyncio.Event, **question: object) -> dict[str, Any]:
        """Ask, and wait for the answer; errors as in `answer`."""
        assert self._process.stdin
        with contextlib.suppress(ConnectionError):  # `answer` reports the process that has ended
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            await self._process.stdin.drain()
        return await self.answer(seconds, stop)

    async def kill(self) -> None:
        """End the process and its own children, which are in its session. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
