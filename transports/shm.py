"""Links over shared memory: `shm:///path/to/socket`.

Both ends map the same memfd, so no bytes move: the other end sees a bell as soon as it is rung. The unix socket carries
the control connection; over a second connection the R-node passes the descriptors of the region and of the R-engine's
eventfd. The mode of the socket, 0600, lets only its owner connect, and each end asks the kernel which user is at the
other: it must be this process's own, or root. When a process dies, the kernel closes its control connection at once,
which the peer notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import struct
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from fastdecode.region.geometry import RegionError, geometry_tuple
from fastdecode.region.region import Region

from . import handshake
from ._native import Port
from .base import Hello, Link, LinkDown, LinkGrant, LinkRefused, LinkService, Server, TransportError
from .frames import FrameSocket
from .link import RegionLink
from .server import Carrier, ControlServer

_BACKLOG = 64
_PATH_MAX = 106  # sun_path has 108 bytes; `_listen` adds a "~", and the kernel a NUL


def parse(url: str) -> str:
    """The socket's path in `url`. Raises TransportError."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or parts.query or parts.fragment or path.endswith("/"):
        raise TransportError(f"{url!r} is not of the form shm:///path/to/socket")
    if len(os.fsencode(path)) > _PATH_MAX:
        raise TransportError(f"the socket's path is longer than the {_PATH_MAX} bytes it may have: {path}")
    return path


#: By region, the capsules with which this process's waiters stand in for thread 0 of R-engines in this process.
_stand_ins: dict[tuple[int, int], object] = {}


def _identity(region_fd: int) -> tuple[int, int]:
    """The device and inode number of a memfd: unique among the files that exist."""
    status = os.fstat(region_fd)
    return status.st_dev, status.st_ino


# ---- S side ----


async def connect(url: str, hello: Hello, secret: bytes | None, *, spin_us: int) -> Link:
    """Open a link. Raises LinkRefused, LinkDown, TransportError."""
    path = parse(url)
    async with contextlib.AsyncExitStack() as on_failure:
        conn = await _dial(url, path)
        on_failure.callback(conn.close)
        lease, ticket = await handshake.say_hello(conn, hello, secret)

        attached = await _dial(url, path)
        with contextlib.closing(attached):
            await handshake.attach(attached, ticket)
            region_fd, wake_fd = await _receive_fds(attached, 2)
        on_failure.callback(os.close, wake_fd)
        if os.readlink(f"/proc/self/fd/{wake_fd}") != "anon_inode:[eventfd]":  # it will be written to
            raise LinkDown("the R-node handed over a descriptor that is no eventfd")
        try:
            region = Region.from_peer(region_fd, hello.geometry)
        except RegionError as error:
            raise TransportError(str(error)) from None
        on_failure.callback(region.close)
        stand_in = _stand_ins.get(_identity(region_fd))
        port = Port(region.view, geometry_tuple(hello.geometry), spin_us, wake_fd=wake_fd, stand_in=stand_in)
        on_failure.pop_all()

    async def release() -> None:
        os.close(wake_fd)

    return RegionLink(url, conn, lease, region, port, release)


async def dial_url(url: str) -> FrameSocket:
    """Connect to the R-node at `url`. Raises LinkDown, LinkRefused, TransportError."""
    return await _dial(url, parse(url))


async def _dial(url: str, path: str) -> FrameSocket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, path)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise LinkDown(f"no R-node can be reached at {url}: {os.strerror(error.errno or 0)}") from None
        raise
    uid = _peer_of(sock).uid
    if not _is_trusted(uid):
        sock.close()
        raise LinkRefused(
            f"{url} is no R-node of ours: uid {uid} serves it, neither this user, uid {os.geteuid()}, nor root"
        )
    return FrameSocket(sock)


class _Peer(NamedTuple):
    """The process at the other end of a unix socket: struct ucred of unix(7)."""

    pid: int
    uid: int
    gid: int


def _peer_of(sock: socket.socket) -> _Peer:
    """For a server, the process that has connected; for a client, the process that has called listen()."""
    ucred = struct.Struct("iII")
    return _Peer._make(ucred.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size)))


def _is_trusted(uid: int) -> bool:
    return uid in (0, os.geteuid())


async def _receive_fds(conn: FrameSocket, n: int) -> list[int]:
    """Receive the `n` descriptors that the peer sends next. Raises LinkDown."""
    await conn.readable()
    try:
        _, fds, _, _ = socket.recv_fds(conn.sock, 1, n, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise LinkDown(f"the R-node passed no descriptors: {error}") from None
    if len(fds) != n:
        for fd in fds:
            os.close(fd)
        raise LinkDown("the R-node closed the connection without passing its region")
    return fds


# ---- R side ----


class _MemoryCarrier(Carrier):
    """Passes the region's descriptors to the peer, whose bells the R-engine then sees in its own memory."""

    carrier = None
    down_fd = -1

    def __init__(self, region: Region):
        self._region = region

    async def attach(self, conn: FrameSocket, grant: LinkGrant) -> None:
        if grant.stand_in is not None:
            _stand_ins[_identity(self._region.fd)] = grant.stand_in
        socket.send_fds(conn.sock, [b"\0"], [self._region.fd, grant.wake_fd])

    def reason(self) -> str:
        return ""

    def close(self) -> None:
        _stand_ins.pop(_identity(self._region.fd), None)


class _ShmServer(ControlServer):
    def configure(self, sock: socket.socket) -> None:
        uid = _peer_of(sock).uid
        if not _is_trusted(uid):
            raise LinkRefused(f"uid {uid} is neither the R-node's user, uid {os.geteuid()}, nor root")

    def peer_name(self, sock: socket.socket) -> str:
        return f"process {_peer_of(sock).pid}"

    async def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(parse(self.url))
        await super().close()


async def serve(url: str, service: LinkService, secret: bytes | None, *, insecure: bool = False) -> Server:
    """Serve links at `url`. `insecure` makes no difference, as only the socket's owner can connect.

    Raises TransportError.
    """
    return _ShmServer(url, _listen(url), service, secret, _MemoryCarrier)


def _listen(url: str) -> socket.socket:
    path = parse(url)
    unfinished = path + "~"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        _remove_stale(unfinished)
        sock.bind(unfinished)
        os.chmod(unfinished, 0o600)
        sock.listen(_BACKLOG)
        os.rename(unfinished, path)  # the socket appears at `path` only once it listens and only its owner can connect
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise TransportError(f"cannot listen on {url}: {os.strerror(error.errno or 0)}") from None
        raise
    return sock


def _remove_stale(path: str) -> None:
    """Remove the socket at `path` if its owner is dead.

    Raises OSError (EADDRINUSE) if the owner is alive or the file is not a socket.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)
                return
    raise OSError(errno.EADDRINUSE, "in use")
