"""The HTTP server: aiohttp's runner on bound sockets."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from fastdecode.api.app import CLOSE
from fastdecode.api.arrivals import Arrivals, descriptors_for_connections

#: Connections that wait to be accepted; the kernel's own limit is often lower. A client whose connection finds no room
#: tries again after a second.
_BACKLOG = 4096


class ApiServer:
    """An application that is being served; `port` is its TCP port."""

    def __init__(self, runner: web.AppRunner, app: web.Application, port: int):
        self._runner, self._app = runner, app
        self._listening: list[asyncio.Server] = []
        self.port = port

    async def listen(self, sockets: list[socket.socket], arrivals: Arrivals, tls: ssl.SSLContext | None) -> None:
        """Accept connections on bound sockets. Raises OSError, whose message is a sentence."""
        loop = asyncio.get_running_loop()
        for sock in sockets:
            try:
                # Two processes may have bound one port while neither listened. uvloop would drop this error.
                sock.listen(_BACKLOG)
            except OSError as error:
                raise OSError(f"cannot serve the API on port {self.port}: {error.strerror}") from None
            self._listening.append(await loop.create_server(arrivals, sock=sock, ssl=tls, backlog=_BACKLOG))

    async def drain(self, grace: float) -> None:
        """Refuse new requests, with /health at 503 while the port still listens, and wait up to `grace` seconds for the
        running ones; then end the others with an error."""
        await self._app[CLOSE](grace)

    async def close(self, grace: float = 1.0) -> None:
        """Drain, then stop listening. Idempotent."""
        await self.drain(grace)
        for server in self._listening:
            server.close()
        await self._runner.cleanup()


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to host:port (port 0: any free one) for every address that the host name has on this machine.

    The sockets do not listen yet. A caller binds first, so that a port in use is an error before the weights are
    loaded. Raises OSError, whose message is a sentence.
    """
    sockets: list[socket.socket] = []
    failed: OSError | None = None
    try:
        found = dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
        for family, kind, proto, _, address in found:
            taken = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_bound(family, kind, proto, (address[0], taken, *address[2:])))
            except OSError as error:
                # A host name may have addresses that this machine lacks.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                failed = error
        if not sockets and failed:
            raise failed
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise OSError(f"cannot serve the API on {host}:{port}: {error.strerror}") from None
    return sockets


def _bound(family: int, kind: int, proto: int, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # The address :: stands for IPv4's addresses too. Of a name, each address gets a socket of its own.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


class _OneLine(logging.Filter):
    """Logs bytes that are not HTTP in one line without a traceback, because the fault is the client's."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info and record.exc_info[1]
        if isinstance(error, HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            reason = " ".join(error.message.split())[:200]
            record.msg, record.args = f"{record.msg}: not HTTP: %r", (*(record.args or ()), reason)
            record.exc_info = None
        return True


_log = logging.getLogger("fastdecode.api.http")
_log.addFilter(_OneLine())


async def serve(
    app: web.Application,
    sockets: list[socket.socket],
    *,
    tls: ssl.SSLContext | None = None,
    header_seconds: float = 10.0,
    most_connections: int | None = None,
) -> ApiServer:
    """Serve `app` on bound sockets, which the ApiServer then owns; over TLS if `tls` is given. Raises OSError.

    The header of a request may take `header_seconds`. With more than `most_connections` at once, by default what
    the process has descriptors for, connections without a request are closed.

    `handler_cancellation` makes aiohttp cancel the handler of a client that goes away; without it, the request would
    run to its end.
    """
    port = sockets[0].getsockname()[1]
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=2.0)
    await runner.setup()
    assert runner.server is not None, "a runner has a server once it is set up"
    # body.py decompresses.
    options = {"auto_decompress": False, "access_log": None, "logger": _log}
    arrivals = Arrivals(runner.server, header_seconds, most_connections or descriptors_for_connections(), **options)
    server = ApiServer(runner, app, port)
    try:
        await server.listen(sockets, arrivals, tls)
    except OSError:
        await server.close()
        for sock in sockets:
            sock.close()
        raise
    return server
