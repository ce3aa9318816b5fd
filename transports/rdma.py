"""Links over RDMA verbs: `rdma://host:port[?device=NAME&port=NUMBER&gid=INDEX]`.

The control connection is TCP to host:port. Over a second TCP connection the two ends exchange the addresses of their
regions (messages.Endpoint). From then on a call is a chain of one-sided RDMA writes into the R-node's region, the
doorbell last, and a reply is a chain of writes into the S-node's region (`rdma_poster.h`). The R-engine sees the bell
because it polls its own memory; no Python runs at the receiving side of either end. Each link has its own device
context, protection domain and queue pair, through which the peer can write to the link's region and do nothing else.
Nothing is encrypted.

A write wakes no thread at the other end. So an R-engine with RDMA links that has been idle for a time looks at its
bells again after an eighth of that time, and at the latest after 5 ms; a waiter at the S side does the same, at the
latest after 1 ms.

The end of its control connection shows that a peer process is dead. For a dead host, the device gives up retrying
within half a second of a write, and a link without calls writes when a PING stays unanswered. Each end chooses its own
`device`, `port` and `gid`; by default they belong to the interface that the control connection runs over
(`rdma_devices.choose`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from urllib.parse import parse_qsl, urlsplit

from fastdecode.region.geometry import geometry_tuple
from fastdecode.region.region import Region

from . import handshake, tcp
from ._native import Port, RPort
from .base import Hello, Link, LinkDown, LinkGrant, LinkRefused, LinkService, Server, TransportError
from .frames import FrameSocket
from .link import RegionLink
from .messages import EndpointMessage, ProtocolError, RefusedMessage
from .rdma_devices import PortGid, choose, list_ports
from .rdma_endpoint import Endpoint, load
from .server import Carrier


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of an rdma:// URL. `number` is the device's port, `gid` an index into its GID table."""

    host: str
    tcp_port: int
    device: str | None = None
    number: int | None = None
    gid: int | None = None

    def choose_port(self, control: FrameSocket) -> PortGid:
        """The RDMA port and GID for a link with this control connection. Raises TransportError."""
        return choose(list_ports(), control.sock.getsockname()[0], self.device, self.number, self.gid)


def parse(url: str) -> Address:
    """Read an rdma:// URL. Raises TransportError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        options: dict[str, str] = dict(query)
        if not host or port is None or parts.path or parts.fragment or parts.username is not None:
            raise ValueError
        if len(options) != len(query) or options.keys() - {"device", "port", "gid"} or not all(options.values()):
            raise ValueError
        number, gid = (int(options[name]) if name in options else None for name in ("port", "gid"))
    except ValueError:
        raise TransportError(
            f"{url!r} is not of the form rdma://host:port[?device=NAME&port=NUMBER&gid=INDEX]"
        ) from None
    return Address(host, port, options.get("device"), number, gid)


# ---- S side ----


async def connect(url: str, hello: Hello, secret: bytes | None, *, spin_us: int) -> Link:
    """Open a link. Raises LinkRefused, LinkDown, TransportError."""
    address = parse(url)
    load()
    async with contextlib.AsyncExitStack() as on_failure:
        conn = await tcp.dial(url, address.host, address.tcp_port)
        on_failure.callback(conn.close)
        port_gid = address.choose_port(conn)
        lease, ticket = await handshake.say_hello(conn, hello, secret)

        region = Region.create(hello.geometry)
        on_failure.callback(region.close)
        endpoint = Endpoint(region.view, port_gid)
        on_failure.callback(endpoint.close)
        data = await tcp.dial(url, address.host, address.tcp_port)
        with contextlib.closing(data):
            await handshake.attach(data, ticket)
            await data.write(endpoint.description)
            peer = await data.read()
        if isinstance(peer, RefusedMessage):
            raise LinkRefused(peer.reason)
        if not isinstance(peer, EndpointMessage):
            raise ProtocolError(f"the R-node answered ENDPOINT with {peer.TYPE}")
        port = Port(region.view, geometry_tuple(hello.geometry), spin_us, verbs=endpoint.connect(peer))
        on_failure.callback(port.close)
        on_failure.callback(endpoint.unwatch)
        endpoint.watch(port.reap, port.kill)
        on_failure.pop_all()

    async def release() -> None:
        endpoint.unwatch()
        await asyncio.to_thread(endpoint.close)

    return RegionLink(url, conn, lease, region, port, release)


# ---- R side ----


async def dial_url(url: str) -> FrameSocket:
    """Connect to the R-node at `url` over TCP. Raises LinkDown, TransportError."""
    address = parse(url)
    return await tcp.dial(url, address.host, address.tcp_port)


@contextlib.contextmanager
def _refuse_on_error() -> Iterator[None]:
    """Turn errors into LinkRefused, whose message the server sends to the S-node."""
    try:
        yield
    except (TransportError, OSError) as error:
        raise LinkRefused(f"the R-node cannot do RDMA: {error}") from None


class _RdmaCarrier(Carrier):
    """A region that the S-node's device writes calls to, and an Endpoint that writes replies to the S-node's region."""

    def __init__(self, region: Region, *, address: Address):
        self._region = region
        self._address = address
        self._port = RPort(region.view, geometry_tuple(region.geometry), rdma=True)
        self._endpoint: Endpoint | None = None
        self._detached = False
        self.carrier = self._port.carrier
        self.down_fd = self._port.down_fd

    async def attach(self, conn: FrameSocket, grant: LinkGrant) -> None:
        peer = await conn.read()
        if not isinstance(peer, EndpointMessage):
            raise ProtocolError(f"expected ENDPOINT, got {peer.TYPE}")
        if self._detached:
            raise LinkDown("the link has ended")
        with _refuse_on_error():
            self._endpoint = endpoint = Endpoint(self._region.view, self._address.choose_port(conn))
            self._port.start(verbs=endpoint.connect(peer))
        endpoint.watch(self._port.reap, self._port.kill)
        await conn.write(endpoint.description)

    def reason(self) -> str:
        return self._port.reason or "the RDMA connection ended"

    def detach(self) -> None:
        self._detached = True
        if self._endpoint:
            self._endpoint.unwatch()

    def close(self) -> None:
        self._port.close()
        if self._endpoint:
            self._endpoint.close()


async def serve(url: str, service: LinkService, secret: bytes | None, *, insecure: bool = False) -> Server:
    """Serve links at `url`; port 0 takes any free port.

    The server's URL has no query, because the query names devices of this machine. Raises TransportError like
    tcp.serve, and if this machine has no RDMA device or no pyverbs.
    """
    address = parse(url)
    load()
    if not list_ports():
        raise TransportError(f"cannot serve {url}: this machine has no RDMA device")
    sock, netloc = await tcp.listen(url, address.host, address.tcp_port, secret, insecure)
    return tcp.TcpControlServer(f"rdma://{netloc}", sock, service, secret, partial(_RdmaCarrier, address=address))
