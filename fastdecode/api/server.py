"""The HTTP server: routes, the application, and the real runner it is served by."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiohttp import web

from fastdecode.api.endpoints import Generator
from fastdecode.api.errors import ApiError, json_response
from fastdecode.api.generation import Submits
from fastdecode.api.health import Reports, health
from fastdecode.api.metrics import CONTENT_TYPE, Metrics
from fastdecode.api.middleware import errors_as_json, require_key
from fastdecode.engine.stats import EngineObserver
from fastdecode.tokenizer import Tokenizer

MAX_BODY_BYTES = 8 * 2**20

_GENERATOR = web.AppKey("generator", Generator)


class EngineLike(Submits, Reports, Protocol):
    """What the API needs of the engine (engine/engine.py)."""

    observer: EngineObserver
    max_model_len: int

    async def refresh(self) -> None:
        """Bring the R-nodes' counters in `stats` up to date."""


def make_app(
    engine: EngineLike,
    tokenizer: Tokenizer,
    model_name: str,
    *,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    keep_alive_seconds: float = 15.0,
    stalled_after_seconds: float = 60.0,
) -> web.Application:
    """The application. It becomes the engine's observer.

    Args:
        api_key: asked for on every path but /health; None: nobody is asked.
        max_body_bytes: longer bodies are a 413.
        keep_alive_seconds: a stream that has nothing to say for so long sends a comment.
        stalled_after_seconds: /health is 503 once there is work and no step was completed for so long.
    """
    metrics = Metrics(model_name, lambda: engine.stats)
    engine.observer = metrics
    generator = Generator(engine, tokenizer, model_name, metrics, keep_alive_seconds)
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

    middlewares = [errors_as_json] if api_key is None else [errors_as_json, require_key(api_key)]
    app = web.Application(middlewares=middlewares, client_max_size=max_body_bytes)
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
    """A served application: where it listens, and how to end it."""

    def __init__(
        self, runner: web.AppRunner, site: web.TCPSite, close_requests: Callable[[float], Awaitable[None]], port: int
    ):
        self._runner = runner
        self._site = site
        self._close_requests = close_requests
        self.port = port

    async def close(self, grace: float = 1.0) -> None:
        """Stop listening, give running requests `grace` seconds to end, end the others with an error. Idempotent."""
        if self._site in self._runner.sites:
            await self._site.stop()
        await self._close_requests(grace)
        await self._runner.cleanup()


async def serve(app: web.Application, host: str, port: int) -> Server:
    """Listen on host:port (port 0: any free one). Raises OSError.

    A client that goes away must cancel its handler, or its request would go on to its end: aiohttp does so only if it
    is told.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError:
        await runner.cleanup()
        raise
    return Server(runner, site, app[_GENERATOR].close, runner.addresses[0][1])
