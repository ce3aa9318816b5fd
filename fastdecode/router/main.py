"""`fastdecode-router`: one OpenAI-compatible address in front of several S-nodes.

A request goes to the least busy S-node, or to one that has seen the beginning of its prompt. A stream whose S-node is
lost, or about to end, goes on at another S-node; other requests are sent again only while the client has seen no token.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvloop
from aiohttp import AddrInfoType, web

from fastdecode import __version__
from fastdecode.api.app import API_PATHS, CLOSE, MAX_BODY_BYTES
from fastdecode.api.errors import ApiError, json_response
from fastdecode.api.middleware import errors_as_json, log_requests, with_expectations
from fastdecode.api.server import bind, serve
from fastdecode.daemon import option_values
from fastdecode.daemon.config_files import read_secret
from fastdecode.daemon.config_sources import Parser
from fastdecode.daemon.discovery import DnsSet, FileSet, FixedSet, NodeSet, bracketed
from fastdecode.daemon.option_values import ConfigError, argument
from fastdecode.daemon.process import announce, set_up_logging, wait_for_shutdown
from fastdecode.daemon.tasks import wait_until
from fastdecode.daemon.tls import client_tls, server_tls
from fastdecode.router.forwarder import Forwarder, RouterMetrics, has_dot_segments
from fastdecode.router.pool import Pool

log = logging.getLogger(__name__)

_SCHEMES = ("http", "https")
_SILENCE_MS = 2000  # an S-node's host that has acknowledged nothing for so long is lost


def _parser() -> Parser:
    parser = Parser(prog="fastdecode-router", description=__doc__, allow_abbrev=False)
    add, file = parser.add_argument, dict[str, Any](type=Path, metavar="FILE")
    add("--version", action="version", version=f"fastdecode {__version__}")
    one = "an S-node, http://host:port (repeatable)"
    add("--s-node", action="append", type=argument(option_values.s_node_url), metavar="URL", help=one)
    add("--s-nodes-file", help="file with the S-nodes, one URL a line; the router follows its changes", **file)
    dns = "an S-node at each address of a host name, http://host:port, as the name resolves from time to time"
    add("--s-nodes-dns", type=argument(option_values.named_http_host), metavar="URL", help=dns)
    ca = "certificates (PEM) that may have signed the certificates of S-nodes at https URLs; default: the certificates"
    add("--s-node-ca", help=f"{ca} that this machine trusts", **file)
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    port = "port to listen on; 0: any free one (default: 8000)"
    add("--port", type=argument(option_values.port), default=8000, help=port)
    drain = "on SIGTERM, how long running requests may continue (default: 30)"
    add("--drain-seconds", type=argument(option_values.seconds), default=30.0, help=drain)
    waits = "how long a stream whose S-node is lost waits for one that continues it (default: 30)"
    add("--continue-seconds", type=argument(option_values.seconds), default=30.0, help=waits)
    secret = "file with the secret of the S-nodes, which streams need to go on at another S-node"
    add("--secret-file", help=secret, **file)
    add("--ssl-certfile", help="certificate chain (PEM) with which clients are served over TLS", **file)
    add("--ssl-keyfile", help="private key (PEM) of --ssl-certfile; default: it is in that file", **file)
    add("--no-access-log", action="store_true", help="do not log a line for every request")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--log-format", choices=("text", "json"), default="text")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run a router until SIGTERM. Exit status: 0 after a clean end, 2 for a bad option, 1 for any other error."""
    parser = _parser()
    args = parser.parse_args(argv)
    if sum(map(bool, (args.s_node, args.s_nodes_file, args.s_nodes_dns))) != 1:
        parser.error("give one of --s-node, --s-nodes-file and --s-nodes-dns")
    if args.ssl_keyfile and not args.ssl_certfile:
        parser.error("--ssl-keyfile needs --ssl-certfile")
    try:
        secret = read_secret(args.secret_file)
        tls, s_node_tls = server_tls(args.ssl_certfile, args.ssl_keyfile), client_tls(args.s_node_ca)
    except ConfigError as error:
        parser.error(str(error))
    set_up_logging(args.log_level, args.log_format)
    if secret is None:
        log.warning("without --secret-file a stream whose S-node is lost ends with an error")
    try:
        sockets = bind(args.host, args.port)
        uvloop.run(_run(args, sockets, secret, tls, s_node_tls))
    except OSError as error:
        sys.exit(f"fastdecode-router: error: {error}")


def _node_set(args: argparse.Namespace) -> NodeSet:
    if args.s_nodes_file:
        return FileSet(args.s_nodes_file, _SCHEMES)
    if args.s_nodes_dns:
        return DnsSet(args.s_nodes_dns)
    return FixedSet(tuple(dict.fromkeys(url.rstrip("/") for url in args.s_node)))


def _socket(address: AddrInfoType) -> socket.socket:
    """A socket that ends about two seconds after its S-node's host has last answered, even if nothing is sent: a stream
    whose S-node's host is gone soon continues elsewhere."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 1)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
    return sock


async def _run(
    args: argparse.Namespace,
    sockets: list[Any],
    secret: bytes | None,
    tls: ssl.SSLContext | None,
    s_node_tls: ssl.SSLContext,
) -> None:
    shutdown = asyncio.create_task(wait_for_shutdown())
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket, ssl=s_node_tls)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        # The certificate of S-nodes that are found by a name is that of the name, because addresses change.
        pool = Pool(_node_set(args), session, secret, urlsplit(args.s_nodes_dns or "").hostname)
        metrics = RouterMetrics(pool)
        await pool.start()
        forwarder = Forwarder(pool, session, metrics, secret, args.continue_seconds)
        app = make_app(pool, forwarder, metrics, access_log=not args.no_access_log)
        server = await serve(app, sockets, tls=tls)
        url = f"{'https' if tls else 'http'}://{bracketed(args.host)}:{server.port}/v1"
        announce(log, args.log_format, f"Router on {url}")
        await shutdown
        log.info("draining: running requests may go on for %.0f s; a second signal ends them now", args.drain_seconds)
        await server.drain(args.drain_seconds)
        await server.close()
        await pool.close()


def make_app(pool: Pool, forwarder: Forwarder, metrics: RouterMetrics, *, access_log: bool = True) -> web.Application:
    """The application of a router over `pool`."""
    closing = asyncio.Event()

    async def health(_: web.Request) -> web.Response:
        healthy = [s_node for s_node in pool.s_nodes if s_node.healthy]
        status = "closing" if closing.is_set() else "ok" if healthy else "no S-node takes requests"
        s_nodes = [
            {name: getattr(s_node, name) for name in ("url", "healthy", "trusting", "requests", "load", "why_not")}
            for s_node in pool.s_nodes
        ]
        return json_response({"status": status, "s_nodes": s_nodes}, status=200 if status == "ok" else 503)

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def forward(request: web.Request) -> web.StreamResponse:
        if has_dot_segments(request.rel_url.raw_path):
            raise ApiError(400, "a path must not have the segments . and ..", code="invalid_path")
        if closing.is_set():
            raise ApiError(503, "the router is shutting down", code="shutting_down", headers={"Retry-After": "1"})
        return await forwarder.handle(request)

    async def close(grace: float) -> None:
        closing.set()
        if not await wait_until(lambda: not forwarder.requests, grace):
            log.warning("%d request(s) end with the router", forwarder.requests)

    app = web.Application(
        middlewares=[*([log_requests] if access_log else []), errors_as_json], client_max_size=MAX_BODY_BYTES
    )
    app[CLOSE] = close
    app.add_routes(
        with_expectations(
            web.get("/health", health),
            web.get("/metrics", show_metrics),
            *(web.route("*", path, forward) for path in API_PATHS),
        )
    )
    return app


if __name__ == "__main__":
    main()
