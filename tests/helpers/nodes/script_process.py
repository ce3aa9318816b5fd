"""A script of the tests as a process, which a test kills or stops.

Where Python takes ten seconds to start (FASTDECODE_SLOW), such a process is forked from a *forker*, which has imported
the modules that the scripts need. The forker is this module run as a script, with a socket as its standard input: it
receives a command line and a descriptor for the standard output, and answers with a process id. The new process becomes
a child of the test's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


class ScriptProcess:
    """A process that runs the Python file `script` with `arguments`."""

    def __init__(self, script: str, *arguments: str):
        slow = "FASTDECODE_SLOW" in os.environ
        command = [script, *arguments]
        self.process = (
            _Forked(command)
            if slow
            else subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_line(self) -> str:
        """The next line that the process prints; empty at the end."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """Stop the process (SIGSTOP). Returns when all its threads have stopped."""
        self.send_signal(signal.SIGSTOP)
        while any(
            f.read_text().rpartition(")")[2].split()[0] != "T" for f in Path(f"/proc/{self.pid}/task").glob("*/stat")
        ):
            time.sleep(0.001)

    def go_on(self) -> None:
        self.send_signal(signal.SIGCONT)

    def end(self, number: int = signal.SIGTERM) -> int:
        """End the process. Returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(number)
            self.send_signal(signal.SIGCONT)
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout
            self.process.stdout.close()


class _Forked:
    """The part of subprocess.Popen that ScriptProcess uses, for a process that the forker starts."""

    def __init__(self, command: list[str]):
        reading, writing = os.pipe()
        forker, _ = _forker()
        socket.send_fds(forker, [json.dumps(command).encode()], [writing])
        os.close(writing)
        self.stdout = os.fdopen(reading)
        self.pid = int(forker.recv(64))
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float = float("inf")) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _forker() -> tuple[socket.socket, subprocess.Popen]:
    """A socket to the forker, and the forker, which ends with this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        return ours, subprocess.Popen([sys.executable, __file__], stdin=its.fileno())


def _fork_on_demand(requests: socket.socket) -> None:
    import numpy  # noqa: F401
    from wire import link_driver  # noqa: F401

    import fastdecode.daemon.rnode  # noqa: F401
    from fastdecode.transports.base import TransportError
    from fastdecode.transports.rdma_endpoint import load

    with contextlib.suppress(TransportError):
        load()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 1)
        if not request:
            return
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:  # its child becomes an orphan at once, and so a child of the test's process
            pid = os.fork()
            if pid:
                os.write(writing, str(pid).encode())
                os._exit(0)
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            os.dup2(descriptors[0], 1)
            for fd in (reading, writing, descriptors[0]):
                os.close(fd)
            _become(json.loads(request))
        os.waitpid(between, 0)
        requests.send(os.read(reading, 64))
        for fd in (reading, writing, descriptors[0]):
            os.close(fd)


def _become(command: list[str]) -> None:
    """Run the script. Does not return."""
    status = 1
    try:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    _fork_on_demand(socket.socket(fileno=0))
