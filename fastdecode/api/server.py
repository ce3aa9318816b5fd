"""The HTTP server: the application with its routes, and aiohttp's runner on bound sockets."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from fastdecode.api.endpoints import Generator
from fastdecode.api.errors import ApiError, json_response
from fastdecode.api.generation import EngineClient
from fastdecode.api.health import EngineHealth, health
from fastdecode.api.metrics import CONTENT_TYPE, Metrics
from fastdecode.api.middleware import errors_as_json, require_key
from fastdecode.engine.stats import EngineObserver
from fastdecode.text.output.forms import reasoning_form, tool_form
from fastdecode.text.tokenizer import Tokenizer

MAX_BODY_BYTES = 8 * 2**20

_GENERATOR = web.AppKey("generator", Generator)


class EngineLike(EngineClient, EngineHealth, Protocol):
    """All that the API needs of the engine (engine.engine.Engine)."""

    observer: EngineObserver

    @property
    def max_model_len(self) -> int: ...

    async def refresh(self) -> None:
        """Bring the R-nodes' counters in `stats` up to date."""


def make_app(
    engine: EngineLike,
    tokenizer: Tokenizer,
    model_name: str,
    *,
    api_key: str | None = None,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    max_body_bytes: int = MAX_BODY_BYTES,
    keep_alive_seconds: float = 15.0,
    stalled_after_seconds: float = 60.0,
) -> web.Application:
    """Make the application, and make its metrics the engine's observer.

    Args:
        api_key: the key that every path but /health requires; None: no path requires a key.
        tool_parser: how the model writes tool calls: a key of TOOL_FORMS, or "auto": as its chat template says.
        reasoning_parser: how it writes its reasoning: one of REASONING_FORMS, "none", or "auto".
        max_body_bytes: longer bodies get status 413.
        keep_alive_seconds: a stream without text for this long sends a comment.
        stalled_after_seconds: /health has status 503 if there is work and no step has completed for this long.
    """
    metrics = Metrics(model_name, lambda: engine.stats)
    engine.observer = metrics
    template = tokenizer.template_source
    generator = Generator(
        engine,
        tokenizer,
        model_name,
        metrics,
        keep_alive_seconds,
        tool_form=tool_form(tool_parser, template),
        reasoning=reasoning_form(reasoning_parser, template),
    )
    model = {
        "id": model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "fastdecode",
        "max_model_len": engine.max_model_len,
    }

    async def models(_: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [model]})

    async def one_model(request: web.Request) -> web.Response:
        if (name := request.match_info["name"]) != model_name:
            raise ApiError(
                404, f"there is no model {name!r} here, only {model_name!r}", param="model", code="model_not_found"
            )
        return json_response(model)

    async def report_health(_: web.Request) -> web.Response:
        status, body = health(engine, closing=generator.closing, stalled_after=stalled_after_seconds)
        return json_response(body, status=status)

    async def report_metrics(_: web.Request) -> web.Response:
        await engine.refresh()
        return web.Response(body=metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    keys = [] if api_key is None else [require_key(api_key)]
    app = web.Application(middlewares=[errors_as_json, *keys], client_max_size=max_body_bytes)
    app[_GENERATOR] = generator
    app.add_routes(
        [
            web.post("/v1/completions", generator.completions),
            web.post("/v1/chat/completions", generator.chat),
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", one_model),
            web.get("/health", report_health),
            web.get("/metrics", report_metrics),
        ]
    )
    return app


class Server:
    """An application that is being served; `port` is its TCP port."""

    def __init__(self, runner: web.AppRunner, close_requests: Callable[[float], Awaitable[None]], port: int):
        self._runner = runner
        self._close_requests = close_requests
        self.port = port

    async def close(self, grace: float = 1.0) -> None:
        """Stop listening, wait `grace` seconds for running requests, end the others with an error. Idempotent."""
        for site in list(self._runner.sites):
            await site.stop()
        await self._close_requests(grace)
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
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
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


async def serve(app: web.Application, sockets: list[socket.socket]) -> Server:
    """Serve `app` on bound sockets, which the Server then owns. Raises OSError.

    `handler_cancellation` makes aiohttp cancel the handler of a client that goes away; without it, the request would
    run to its end.
    """
    port = sockets[0].getsockname()[1]
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, logger=_log, shutdown_timeout=2.0)
    await runner.setup()
    try:
        for sock in sockets:
            await web.SockSite(runner, sock).start()
    except OSError:
        await runner.cleanup()
        raise
    return Server(runner, app[_GENERATOR].close, port)
