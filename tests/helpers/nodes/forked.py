"""Python processes that begin with the modules they need, because these take seconds to import and a fork takes
milliseconds.

Each process of the tests starts a *forker* when it first needs one: this file, run as a script that imports modules and
then forks a process for each request. A request is a command line, a working directory and an environment, with
descriptors for the standard output, the standard error and a pipe. Through the pipe come the new process's id and, at
its end, its exit status. The forker has one thread and ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Of an R-node, and of the S side of a link.
LINKS = ("numpy", "uvloop", "fastdecode.daemon.rnode", "wire.link_driver")
#: Of an S-node.
S_NODE = ("fastdecode.daemon.snode_start", "fastdecode.engine.engine", "fastdecode.spart")
#: Of a script with an S-Part that has transformers compute the same.
MODELS = (
    *S_NODE,
    "torch._dynamo",  # which torch imports for tensors on its meta device
    "torch._meta_registrations",
    "transformers.models.llama.modeling_llama",
)
_NUMBER = struct.Struct("q")


class Forked:
    """A process that runs `command`: a script or "-m" and a module, with arguments. It has the methods of
    subprocess.Popen that tests use."""

    def __init__(
        self,
        command: list[str],
        modules: tuple[str, ...],
        *,
        stdout: int,
        stderr: int = 2,
        env: dict[str, str] | None = None,
        own_group: bool = False,
    ):
        reading, writing = os.pipe()
        request = {"command": command, "cwd": os.getcwd(), "env": env or dict(os.environ), "own_group": own_group}
        network = os.readlink("/proc/thread-self/ns/net")
        socket.send_fds(_forker(modules, network)[0], [json.dumps(request).encode()], [stdout, stderr, writing])
        os.close(writing)
        self._told = reading
        self.pid: int = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        data = os.read(self._told, _NUMBER.size)
        assert data, "the forker has ended"
        number: int = _NUMBER.unpack(data)[0]
        return number

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(self._number())
            os.close(self._told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run(*command: str, seconds: float = 380, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a process with a model to its end, as subprocess.run does with captured output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Forked(list(command), MODELS, stdout=out.fileno(), stderr=err.fileno(), env=env)
        try:
            status = process.wait(seconds)
        finally:
            process.kill()
        written = [(file.seek(0), file.read())[1] for file in (out, err)]
        return subprocess.CompletedProcess(command, status, *written)


def run_script(script: Path, *arguments: str, seconds: float = 380, env: dict[str, str] | None = None) -> Any:
    """The JSON that a script with a model prints. Fails with the script's standard error."""
    done = run(str(script), *arguments, seconds=seconds, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@functools.cache
def _forker(modules: tuple[str, ...], network: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A socket to the forker that has imported `modules` in this thread's network namespace, and the forker."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = [sys.executable, "-W", "ignore", __file__, *modules]
        forker = subprocess.Popen(command, stdin=its.fileno())
    atexit.register(_end, ours, forker)  # else Python warns of both at its end
    return ours, forker


def _end(requests: socket.socket, forker: subprocess.Popen[bytes]) -> None:
    requests.close()
    forker.kill()
    forker.wait()


def _fork_on_demand(requests: socket.socket) -> None:
    """Returns in the new processes, and once nobody can send a request any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a parent is waited for by nobody
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 17, 3)
        if not request:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            wanted = json.loads(request)
            if pid := os.fork():
                _tell_of(pid, descriptors, wanted["own_group"])
            requests.close()
            _become(wanted, descriptors)
        for fd in descriptors:
            os.close(fd)


def _tell_of(pid: int, descriptors: list[int], own_group: bool) -> None:
    """Tell the id of this process's child, and its exit status when it has ended. Does not return."""
    stdout, stderr, pipe = descriptors
    if own_group:
        os.setpgid(pid, pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(pipe, _NUMBER.pack(pid))
    for fd in (0, 1, 2, stdout, stderr):
        os.close(fd)
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, _NUMBER.pack(os.waitpid(pid, 0)[1]))
    os._exit(0)


def _become(wanted: dict[str, Any], descriptors: list[int]) -> None:
    """Run the command, and exit as Python does."""
    for number, fd in enumerate(descriptors[:2], 1):
        os.dup2(fd, number)
    for fd in descriptors:
        os.close(fd)
    os.chdir(wanted["cwd"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    tempfile.tempdir = None
    if wanted["own_group"]:
        os.setpgid(0, 0)
    option, *rest = wanted["command"]
    if option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = wanted["command"]
        runpy.run_path(option, run_name="__main__")
    sys.exit()


def _load_verbs() -> None:
    from fastdecode.transports.base import TransportError
    from fastdecode.transports.rdma_endpoint import load

    with contextlib.suppress(TransportError):
        load()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if "FASTDECODE_SLOW" in os.environ:
        _load_verbs()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    with socket.socket(fileno=os.dup(0)) as requests, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        _fork_on_demand(requests)
