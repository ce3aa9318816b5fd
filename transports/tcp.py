"""Links over TCP: `tcp://host:port`.

Each end has its own region. A pump in C (`tcp_pump.c`) moves the bytes that a call or a reply uses over the data
connection, which is a second connection to the same port. The kernel notices within 5 seconds that the peer's host has
vanished, whatever the two event loops are doing: by unanswered probes on an idle connection, by unacknowledged bytes on
a busy one. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from urllib.parse import urlsplit

from fastdecode.region.geometry import geometry_tuple
from fastdecode.region.region import Region

from . import handshake
from ._native import Port, RPort
from .base import Hello, Link, LinkDown, LinkGrant, LinkService, Server, TransportError
from .frames import FrameSocket
from .link import RegionLink
from .server import Carrier, ControlServer

_BACKLOG = 64
_SILENCE_S = 4  # the kernel ends a connection whose peer has been silent for this long
_TCP_RTO_MAX_MS = 44  # linux/tcp.h, Linux 6.15 and later


def parse(url: str) -> tuple[str, int]:
    """The host and the port of `url`. Raises TransportError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None or parts.path or parts.query or parts.fragment or parts.username is not None:
        raise TransportError(f"{url!r} is not of the form tcp://host:port")
    return host, port


def configure(sock: socket.socket) -> None:
    """Send small frames at once, and let the kernel end the connection within 5 seconds if the peer's host vanishes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S - 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)
    with contextlib.suppress(OSError):
        # The kernel checks TCP_USER_TIMEOUT only when the retransmission timer, which doubles each time, runs out. This
        # limits the timer to a second.
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000)


# ---- S side ----


async def connect(url: str, hello: Hello, secret: bytes | None, *, spin_us: int) -> Link:
    """Open a link. Raises LinkRefused, LinkDown, TransportError."""
    host, port_number = parse(url)
    async with contextlib.AsyncExitStack() as on_failure:
        conn = await dial(url, host, port_number)
        on_failure.callback(conn.close)
        lease, ticket = await handshake.say_hello(conn, hello, secret)

        data = await dial(url, host, port_number)
        on_failure.callback(data.close)
        await handshake.attach(data, ticket)
        region = Region.create(hello.geometry)
        on_failure.callback(region.close)
        port = Port(region.view, geometry_tuple(hello.geometry), spin_us, data_fd=data.sock.detach())
        on_failure.pop_all()
    return RegionLink(url, conn, lease, region, port)


async def dial_url(url: str) -> FrameSocket:
    """Connect to the R-node at `url`. Raises LinkDown, TransportError."""
    return await dial(url, *parse(url))


async def dial(url: str, host: str, port: int) -> FrameSocket:
    """Connect to host:port; errors name `url`. Raises LinkDown."""
    loop = asyncio.get_running_loop()
    reason = "no such host"
    try:
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        addresses, reason = [], error.strerror or str(error)
    for family, kind, proto, _, address in addresses:
        sock = socket.socket(family, kind, proto)
        sock.setblocking(False)
        try:
            configure(sock)
            await loop.sock_connect(sock, address)
            return FrameSocket(sock)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            reason = os.strerror(error.errno or 0)
    raise LinkDown(f"no R-node can be reached at {url}: {reason}")


# ---- R side ----


class PumpCarrier(Carrier):
    """A region and a C pump, which moves calls and replies over the data connection, a connected stream socket."""

    def __init__(self, region: Region):
        self._port = RPort(region.view, geometry_tuple(region.geometry))
        self.carrier = self._port.carrier
        self.down_fd = self._port.down_fd

    async def attach(self, conn: FrameSocket, grant: LinkGrant) -> None:
        self._port.start(data_fd=conn.sock.detach(), wake_fd=grant.wake_fd)

    def reason(self) -> str:
        return self._port.reason or "the data connection ended"

    def close(self) -> None:
        self._port.close()


class TcpControlServer(ControlServer):
    """A ControlServer on a TCP socket, whatever carries the data."""

    def configure(self, sock: socket.socket) -> None:
        configure(sock)

    def peer_name(self, sock: socket.socket) -> str:
        try:
            host, port = sock.getpeername()[:2]
        except OSError:
            return "a peer that has gone"
        return f"{host}:{port}"

    def source(self, sock: socket.socket) -> str:
        """The peer's IPv4 address, or the network of its IPv6 address, of whose other addresses it can have any."""
        try:
            address = ipaddress.ip_address(sock.getpeername()[0].split("%")[0])
        except OSError:
            return "a peer that has gone"
        if isinstance(address, ipaddress.IPv6Address):
            mapped = address.ipv4_mapped
            return str(mapped or ipaddress.ip_network((address, 64), strict=False))
        return str(address)


async def serve(url: str, service: LinkService, secret: bytes | None, *, insecure: bool = False) -> Server:
    """Serve links at `url`; port 0 takes any free port.

    Raises TransportError if the address cannot be had, or if other machines can reach it and there is neither a secret
    nor `insecure`.
    """
    host, port = parse(url)
    sock, netloc = await listen(url, host, port, secret, insecure)
    return TcpControlServer(f"tcp://{netloc}", sock, service, secret, PumpCarrier)


async def listen(url: str, host: str, port: int, secret: bytes | None, insecure: bool) -> tuple[socket.socket, str]:
    """Open a listening socket. Returns it with its host:port, for a URL. Raises TransportError like `serve`."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, proto, _, address = addresses[0]
        if secret is None and not insecure and not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
            raise TransportError(
                f"other machines can reach {url} and there is no shared secret, so anybody could use this node; "
                "give it a secret (--secret-file), or listen on 127.0.0.1"
            )
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise TransportError(f"cannot listen on {url}: {error.strerror}") from None
    host = f"[{host}]" if ":" in host else host
    return sock, f"{host}:{sock.getsockname()[1]}"
