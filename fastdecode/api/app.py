"""The application: all routes over an engine and a tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from fastdecode import __version__
from fastdecode.api.continuation import is_from_router
from fastdecode.api.defaults import NO_DEFAULTS, SamplingDefaults
from fastdecode.api.endpoints import ApiModel, Endpoints, Tokenization
from fastdecode.api.errors import MESSAGES_PATH, ApiError, json_response
from fastdecode.api.middleware import (
    allow_origins,
    errors_as_json,
    log_requests,
    require_key,
    require_router,
    with_expectations,
)
from fastdecode.api.page import page_routes
from fastdecode.api.preparation import Preparation
from fastdecode.api.reports import ClusterReport, health
from fastdecode.api.runs import Runs
from fastdecode.api.stored import STORED_BYTES, StoredStreams
from fastdecode.api.tracing import Tracing
from fastdecode.service.client import EngineClient, EngineStatus
from fastdecode.service.metrics import CONTENT_TYPE
from fastdecode.text.output.forms import reasoning_form, tool_form
from fastdecode.text.tokenizer import Tokenizer

MAX_BODY_BYTES = 8 * 2**20

STORED_PATH = "/v1/responses/{id}"

#: The paths of the API, which routers forward. The other paths report on the S-node.
API_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    STORED_PATH,
    f"{STORED_PATH}/cancel",
    MESSAGES_PATH,
    f"{MESSAGES_PATH}/count_tokens",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/{name:.+}",
    "/tokenize",
    "/detokenize",
    "/version",
)

#: Closes an application: refuses new requests, gives running ones this number of seconds, then ends them with an error.
CLOSE: web.AppKey[Callable[[float], Awaitable[None]]] = web.AppKey("close")


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """The options of an application."""

    names: tuple[str, ...]  # of the model; the first one is its own
    _: KW_ONLY
    adapters: tuple[str, ...] = ()  # the names of the model's LoRA adapters
    api_keys: Sequence[str] = ()  # every path but /health requires one of these keys; (): no path requires a key
    cors_origins: Sequence[str] = ()  # pages of these origins may use the API; "*": all pages
    access_log: bool = True  # log a line for every request
    tracing: Tracing | None = None  # makes spans of the requests, and is closed with the application
    tool_parser: str = "auto"  # how the model writes tool calls: a key of TOOL_FORMS; "auto": as its chat template says
    reasoning_parser: str = "auto"  # how it writes its reasoning: one of REASONING_FORMS, "none", or "auto"
    defaults: SamplingDefaults = NO_DEFAULTS  # of sampling, for requests that give no values
    max_body_bytes: int = MAX_BODY_BYTES  # longer bodies get status 413
    keep_alive_seconds: float = 15.0  # a stream without text for this long sends a comment
    stalled_after_seconds: float = 60.0  # /health has status 503 if work has completed no step for this long
    router_secret: bytes | None = None  # a router that knows it can continue streams of other S-nodes here
    router_only: bool = False  # without api_keys, every path but /health requires a router's proof of router_secret
    drop_hosted_tools: bool = False  # drop tools that only their vendor runs from requests, which are refused otherwise
    one_of: int = 1  # processes that serve this API; several cannot know each other's stored streams
    resume_seconds: float = 30.0  # how long a stream with ids waits for its client (stored.py); 0: events get no ids
    stored_bytes: int = STORED_BYTES  # the most bytes of events that are stored


def make_app(engine: EngineClient, tokenizer: Tokenizer, options: ApiOptions) -> web.Application:
    """Make the application."""
    plain, with_tools = tokenizer.template_source(), tokenizer.template_source(tools=True)
    forms = (tool_form(options.tool_parser, with_tools), reasoning_form(options.reasoning_parser, plain + with_tools))
    names, adapters, secret = options.names, options.adapters, options.router_secret
    served = ApiModel(names, *forms, options.defaults, adapters)
    preparation = Preparation(engine, tokenizer, served.tool_form)
    stored = StoredStreams(options.stored_bytes, options.resume_seconds)
    runs = Runs(engine, options.keep_alive_seconds, stored)
    endpoints = Endpoints(
        tokenizer, served, preparation, runs, secret, options.drop_hosted_tools, one_process=options.one_of <= 1
    )
    tokenization = Tokenization(tokenizer, served, preparation, engine.max_model_len)
    created = int(time.time())
    closed = options.router_only and not options.api_keys

    async def cards(*shown: str) -> list[dict[str, object]]:
        facts = {"object": "model", "created": created, "owned_by": "fastdecode", "root": names[0]}
        longest = (await engine.status()).longest_sequence
        return [
            {"id": name, **facts, **({"parent": names[0]} if name in adapters else {}), "max_model_len": longest}
            for name in shown
        ]

    async def models(_: web.Request) -> web.Response:
        return json_response({"object": "list", "data": await cards(*names, *adapters)})

    async def one_model(request: web.Request) -> web.Response:
        [card] = await cards(served.name(request.match_info["name"]))
        return json_response(card)

    async def version(_: web.Request) -> web.Response:
        return json_response({"version": __version__})

    async def embeddings(_: web.Request) -> web.Response:
        raise ApiError(
            400,
            "this server generates text and computes no embeddings; a model for embeddings needs a server of its own",
            code="unsupported_endpoint",
        )

    def state(status: EngineStatus) -> tuple[int, dict[str, Any]]:
        return health(status, closing=runs.closing, stalled_after=options.stalled_after_seconds)

    async def report_health(request: web.Request) -> web.Response:
        status, body = state(await engine.status())
        trusted = is_from_router(secret, request.headers, b"")
        body["router"] = "trusted" if trusted else "refused" if closed else "unknown"
        return json_response(body, status=status)

    cluster = ClusterReport(engine, names[0], chat=bool(plain), name_state=lambda status: state(status)[1]["status"])

    async def report_metrics(_: web.Request) -> web.Response:
        return web.Response(body=await engine.metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def close(grace: float) -> None:
        preparation.closing = True
        await runs.close(grace)
        preparation.close()
        if options.tracing:
            await asyncio.to_thread(options.tracing.close)

    middlewares: list[Middleware] = [log_requests] if options.access_log else []
    middlewares += [allow_origins(options.cors_origins)] if options.cors_origins else []
    middlewares += [options.tracing.middleware] if options.tracing else []
    middlewares += [errors_as_json]
    if options.api_keys:
        middlewares += [require_key(options.api_keys)]
    elif closed:
        assert secret is not None, "a router proves a secret"
        middlewares += [require_router(secret)]
    app = web.Application(middlewares=middlewares, client_max_size=options.max_body_bytes)
    app[CLOSE] = close
    app.add_routes(
        with_expectations(
            web.post("/v1/completions", endpoints.with_stored_streams(endpoints.completions)),
            web.post("/v1/chat/completions", endpoints.with_stored_streams(endpoints.chat)),
            web.post("/v1/responses", endpoints.with_stored_streams(endpoints.responses)),
            web.get(STORED_PATH, endpoints.one_response),
            web.delete(STORED_PATH, endpoints.delete_response),
            web.post(f"{STORED_PATH}/cancel", endpoints.cancel_response),
            web.post(MESSAGES_PATH, endpoints.with_stored_streams(endpoints.messages)),
            web.post(f"{MESSAGES_PATH}/count_tokens", endpoints.count_tokens),
            web.post("/v1/embeddings", embeddings),
            web.post("/tokenize", tokenization.tokenize),
            web.post("/detokenize", tokenization.detokenize),
            web.get("/v1/models", models),
            web.get("/v1/models/{name:.+}", one_model),
            web.get("/version", version),
            web.get("/health", report_health),
            web.get("/cluster", cluster.handle),
            web.get("/metrics", report_metrics),
            *page_routes(),
        )
    )
    return app
