"""Peers of the transport benchmark: other ways to carry the same bytes between two processes and back.

`python -P -m fastdecode.bench.transport_peers NAME ADDRESS [CPU]` runs the other process.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

_ORDER = struct.Struct("<qqqq")  # bytes out, bytes back, nanoseconds of work, number of round trips; 0 of these: end
_WORK_BYTES = 64 << 20  # an R-node works on its KV-cache; the other end works on memory of this size
_WORK_LINES = 64  # cache lines that it touches before it reads the clock
_TIMEOUT_S = 60
_UP = "up\n"  # the first line that the other process prints
_Buffer = TypeVar("_Buffer")  # what a peer sends from and receives into


class Wire(Protocol[_Buffer]):
    """One end of a connection that carries messages whose length both ends know. An empty message is sent as one
    byte."""

    module: str  # the module that must be importable
    address: str

    def __init__(self, address: str | None):
        """The end that chooses an address (`address` None), or the end that connects to `address`."""

    def open(self) -> None:
        """Finish connecting. The other process is running."""

    def buffer(self, n: int) -> _Buffer: ...
    def send(self, buffer: _Buffer) -> None: ...
    def receive(self, buffer: _Buffer) -> None: ...
    def close(self) -> None: ...


class RawSocket:
    """Blocking TCP sockets over loopback, without framing."""

    module = "socket"

    def __init__(self, address: str | None):
        self._server: socket.socket | None = None
        self._socket: socket.socket  # from `open` on
        self._ends: list[socket.socket] = []
        if address is None:
            self._server = socket.create_server(("127.0.0.1", 0))
            self._ends.append(self._server)
            self.address = str(self._server.getsockname()[1])
        else:
            self.address = address

    def open(self) -> None:
        if self._server:
            self._server.settimeout(_TIMEOUT_S)
            self._socket, _ = self._server.accept()
            self._server.close()
            self._socket.settimeout(None)
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(self.address)))
        self._ends.append(self._socket)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def buffer(self, n: int) -> memoryview:
        return memoryview(bytearray(max(1, n)))

    def send(self, buffer: memoryview) -> None:
        self._socket.sendall(buffer)

    def receive(self, buffer: memoryview) -> None:
        got = 0
        while got < len(buffer):
            n = self._socket.recv_into(buffer[got:], 0, socket.MSG_WAITALL)
            if not n:
                raise ConnectionError("the other end is gone")
            got += n

    def close(self) -> None:
        for end in self._ends:
            end.close()


class Gloo:
    """torch.distributed's point-to-point operations over gloo."""

    module = "torch.distributed"

    def __init__(self, address: str | None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._rank = int(address is not None)
        self._dist: Any = None  # the module torch.distributed, from `open` on
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        if address is None:
            self._directory = tempfile.TemporaryDirectory(prefix="fastdecode-")
            self.address = f"{self._directory.name}/store"
        else:
            self.address = address

    def open(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{self.address}", rank=self._rank, world_size=2)
        self._dist = dist

    def buffer(self, n: int) -> torch.Tensor:
        import torch

        return torch.zeros(max(1, n), dtype=torch.uint8)

    def send(self, buffer: torch.Tensor) -> None:
        self._dist.send(buffer, 1 - self._rank)

    def receive(self, buffer: torch.Tensor) -> None:
        self._dist.recv(buffer, 1 - self._rank)

    def close(self) -> None:
        if self._dist:
            self._dist.destroy_process_group()
        if self._directory:
            self._directory.cleanup()


class ZeroMQ:
    """pyzmq: a PAIR socket over loopback TCP, without copies of large messages."""

    module = "zmq"

    def __init__(self, address: str | None):
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        if address is None:
            self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        else:
            self.address = address
            self._socket.connect(address)

    def open(self) -> None:
        pass

    def buffer(self, n: int) -> memoryview:
        return memoryview(bytearray(max(1, n)))

    def send(self, buffer: memoryview) -> None:
        self._socket.send(buffer, copy=len(buffer) < 65536)

    def receive(self, buffer: memoryview) -> None:
        frame = self._socket.recv(copy=len(buffer) < 65536)
        assert len(frame) == len(buffer)
        buffer[:] = memoryview(frame)  # in place, as the other peers receive

    def close(self) -> None:
        self._socket.close()
        self._context.term()


PEERS: dict[str, type[Wire[Any]]] = {"raw": RawSocket, "gloo": Gloo, "zmq": ZeroMQ}


def installed(wanted: Iterable[str] = PEERS) -> list[str]:
    """The names among `wanted` whose modules can be imported."""
    names = []
    for name in wanted:
        with suppress(ModuleNotFoundError):
            if find_spec(PEERS[name].module):
                names.append(name)
    return names


class EchoProcess:
    """A peer and the process of its other end, which is pinned to `cpu` if that is not None.

    Raises RuntimeError if the process does not start.
    """

    def __init__(self, name: str, cpu: int | None = None):
        self._wire = PEERS[name](None)
        argv = [sys.executable, "-P", "-m", __name__, name, self._wire.address]
        if cpu is not None:
            argv.append(str(cpu))
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        try:
            assert self._process.stdout is not None
            with self._process.stdout as up:
                if up.readline() != _UP:  # else `open` of some peers would wait for ever
                    raise RuntimeError(f"the other end of {name} did not start")
            self._wire.open()
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._wire.close()
            raise

    def round_trips(self, out: int, back: int, n: int, work_ns: int = 0) -> list[int]:
        """Nanoseconds of each of `n` round trips of `out` bytes there and `back` bytes back. Between the two, the other
        end works for `work_ns` nanoseconds, which are included, on memory that displaces the bytes from its caches."""
        wire = self._wire
        wire.send(_order(wire, out, back, work_ns, n))
        there, here = wire.buffer(out), wire.buffer(back)
        taken = []
        for _ in range(n):
            start = perf_counter_ns()
            wire.send(there)
            wire.receive(here)
            taken.append(perf_counter_ns() - start)
        return taken

    def close(self) -> None:
        with suppress(OSError):
            self._wire.send(_order(self._wire, 0, 0, 0, 0))
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._wire.close()


def _order(wire: Wire[Any], *numbers: int) -> Any:
    buffer = wire.buffer(_ORDER.size)
    memoryview(buffer.numpy() if hasattr(buffer, "numpy") else buffer)[:] = _ORDER.pack(*numbers)
    return buffer


def _work(lines: np.ndarray, work_ns: int) -> None:
    end = perf_counter_ns() + work_ns
    first, apart = 0, len(lines) // _WORK_LINES
    while perf_counter_ns() < end:
        lines[first % apart :: apart, 0] += 1
        first += 1


def _echo(name: str, address: str, *cpus: int) -> None:
    if cpus:
        os.sched_setaffinity(0, cpus)
    wire = PEERS[name](address)
    lines = np.zeros((_WORK_BYTES // 64, 64), np.uint8)
    print(_UP, end="", flush=True)
    wire.open()
    while True:
        message = wire.buffer(_ORDER.size)
        wire.receive(message)
        out, back, work_ns, n = _ORDER.unpack(memoryview(message.numpy() if hasattr(message, "numpy") else message))
        if not n:
            break
        there, here = wire.buffer(out), wire.buffer(back)
        for _ in range(n):
            wire.receive(there)
            _work(lines, work_ns)
            wire.send(here)
    wire.close()


if __name__ == "__main__":
    _echo(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
