"""The middlewares of every request: the access log, CORS, errors as JSON, and the API keys."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Middleware

from fastdecode.api.body import read_bytes
from fastdecode.api.continuation import HEADER, Resume, is_from_router
from fastdecode.api.errors import ApiError, from_exception
from fastdecode.api.last_event import LastEvent
from fastdecode.api.page import is_page

access_log = logging.getLogger("fastdecode.api.access")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_QUIET_PATHS = frozenset({"/health", "/metrics", "/cluster"})  # asked for every few seconds, so the level is debug
_CONTINUE = "100-continue"
_ANY_PATH = "/{path}"  # the canonical form of the route below
_LOGGED_ERROR = 300  # characters of an error's message in the log
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class Notes:
    """The values that the handler of a request and its middlewares pass to each other."""

    headers: dict[str, str] = field(default_factory=dict)  # headers that the answer gets
    client: str = ""  # a digest of the API key, for fair shares; "": no key was asked for
    logged: dict[str, Any] = field(default_factory=dict)  # fields of the request's line in the access log
    body: bytes | None = None  # as read_bytes gave it; None: it is yet to be read
    by_router: bool = False  # a router that knows the secret has sent the request
    resume: Resume | None = None  # the stream that the request continues
    last_event: LastEvent | None = None  # None: events get no ids
    handed_over: bool = False  # another S-node continues the stream, because this server is about to end
    stream: web.StreamResponse | None = None  # of events; None: there is none yet


_notes: ContextVar[Notes] = ContextVar("notes")


def notes() -> Notes:
    """The notes of the request that the current task handles."""
    found = _notes.get(None)
    if found is None:
        found = Notes()
        _notes.set(found)
    return found


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Make every answer other than 200 an error object, also aiohttp's own 404, 405 and 413. Every answer has the
    request's X-Request-Id."""
    response = await _answer(request, handler)
    if not response.prepared and (given := request_id(request)):
        response.headers["X-Request-Id"] = given
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if (expected := request.headers.get("Expect", _CONTINUE)).lower() != _CONTINUE:
            raise ApiError(417, f"only {_CONTINUE} can be expected, not {expected!r}", code="expectation_failed")
        if _too_long(request):
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
        return await handler(request)
    except web.HTTPException as error:
        refused = _from_aiohttp(error, request)
    except ConnectionError:
        raise  # the client has gone, so there is nobody to answer
    except Exception as error:
        refused = from_exception(error, f"{request.method} {request.path}")
    log_error(refused)
    if (stream := notes().stream) is not None and stream.prepared:  # it is too late for another status
        if request.transport is not None:
            request.transport.abort()
        return stream
    return refused.response(request.path)


def log_error(error: ApiError) -> None:
    """Have the request's line in the access log say the error."""
    notes().logged["error"] = " ".join(error.message.split())[:_LOGGED_ERROR]


def _too_long(request: web.Request) -> bool:
    """True if the body will be longer than the server takes, so that the client need not send it."""
    return (request.content_length or 0) > request.client_max_size


async def _expect(request: web.Request) -> None:
    """Tell a client that waits for it to send its body (RFC 9110, 10.1.1). aiohttp's own answer to another expectation
    is no JSON, so errors_as_json refuses these."""
    wanted = request.headers["Expect"].lower() == _CONTINUE and not _too_long(request)
    if wanted and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun


def with_expectations(*routes: web.RouteDef) -> list[web.RouteDef]:
    """All routes of an application with errors_as_json, so that an unknown `Expect` gets JSON, also on other paths."""
    return [
        web.RouteDef(route.method, route.path, route.handler, route.kwargs | {"expect_handler": _expect})
        for route in (*routes, web.route("*", "/{path:.*}", _refuse_path))
    ]


async def _refuse_path(request: web.Request) -> web.StreamResponse:
    """Do as aiohttp does where no route fits."""
    methods: set[str] = set()
    for resource in request.app.router.resources():
        if resource.canonical != _ANY_PATH:
            methods |= (await resource.resolve(request))[1]
    if methods:
        raise web.HTTPMethodNotAllowed(request.method, methods)
    raise web.HTTPNotFound


def _from_aiohttp(error: web.HTTPException, request: web.Request) -> ApiError:
    match error:
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, f"the body is larger than {request.client_max_size} bytes", code="body_too_large")
        case web.HTTPMethodNotAllowed():
            headers = {"Allow": ", ".join(sorted(error.allowed_methods))}
            message = f"{request.method} is not allowed on {request.path}"
            return ApiError(405, message, code="method_not_allowed", headers=headers)
        case web.HTTPNotFound():
            hint = "" if request.path.startswith("/v1/") else "; the API is under /v1, as in /v1/chat/completions"
            return ApiError(404, f"there is no {request.path} here{hint}", code="not_found")
    return ApiError(error.status, error.reason)


def require_key(api_keys: Iterable[str]) -> Middleware:
    """A middleware that requires one of the keys on every path but /health and those of the page's files, as
    `Authorization: Bearer <key>` or, by Anthropic's clients, `X-API-Key: <key>`."""
    expected = [_digest(key) for key in api_keys]

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        keys = [request.headers.get("X-API-Key", "").strip(), bearer.strip() if scheme.lower() == "bearer" else ""]
        given = [_digest(key) for key in keys if key]
        # All digests have the same length and all keys are compared, so the time reveals neither the length of a key
        # nor which one it was.
        known = [digest for digest in given if sum([hmac.compare_digest(digest, other) for other in expected]) > 0]
        is_open = request.path == "/health" or is_page(request.path)
        if not is_open and not known:
            message = "wrong API key" if given else "no API key: send it as `Authorization: Bearer <key>`"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        notes().client = known[0].hex() if known else ""
        return await handler(request)

    return check_key


def require_router(secret: bytes) -> Middleware:
    """A middleware that refuses every request, except for /health, without a router's proof that it knows `secret`."""

    @web.middleware
    async def check_proof(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health":
            if HEADER in request.headers:
                notes().body = await read_bytes(request)
            if not is_from_router(secret, request.headers, notes().body or b""):
                raise ApiError(403, "this S-node answers only routers that prove its secret", code="not_from_router")
        return await handler(request)

    return check_proof


def allow_origins(origins: Iterable[str]) -> Middleware:
    """A middleware that lets pages of other origins use the API (Fetch standard, CORS protocol).

    `origins` are origins such as https://chat.example.org; "*" stands for all. A browser asks for permission first,
    without a key; this middleware answers it.
    """
    allowed = frozenset(origins)

    @web.middleware
    async def add_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
        notes().headers = {}
        origin = request.headers.get("Origin")
        if origin is None or not allowed & {"*", origin}:
            return await handler(request)
        granted = {"Access-Control-Allow-Origin": "*" if "*" in allowed else origin, "Vary": "Origin"}
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            granted["Access-Control-Allow-Methods"] = "GET, POST, DELETE"
            granted["Access-Control-Allow-Headers"] = request.headers.get("Access-Control-Request-Headers", "")
            granted["Access-Control-Max-Age"] = "600"
            return web.Response(status=204, headers=granted)
        granted["Access-Control-Expose-Headers"] = "X-Request-Id"
        notes().headers = granted
        response = await handler(request)
        if not response.prepared:  # a stream has sent its headers, with these among them
            response.headers.update(granted)
        return response

    return add_headers


@web.middleware
async def log_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log a line for every request: its id, status and time, the tokens of a generation, and the reason of an error."""
    started = time.monotonic()
    noted = Notes()  # of this request: connections that are kept alive handle several requests in one task
    _notes.set(noted)
    status = 499  # the client has gone before the end, as nginx logs it
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        quiet = (request.path in _QUIET_PATHS or is_page(request.path)) and status < 400
        if noted.handed_over:
            status = 200
            noted.logged["handed_over"] = True
        given = request_id(request)
        fields = {
            "method": request.method,
            "path": request.path,
            "status": status,
            "seconds": round(time.monotonic() - started, 4),
            "client": request.remote,
            **({"request_id": given} if given else {}),
            **noted.logged,
        }
        shown = fields | ({"error": json.dumps(fields["error"], ensure_ascii=False)} if "error" in fields else {})
        text = " ".join(f"{name}={value}" for name, value in shown.items() if name not in ("method", "path", "status"))
        access_log.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %s %d %s",
            request.method,
            request.rel_url.raw_path,  # the path may have lines
            status,
            text,
            extra={"fields": fields},
        )


def request_id(request: web.Request) -> str | None:
    """The id that the client gave in X-Request-Id, at most 128 visible ASCII characters; None without one."""
    given = request.headers.get("X-Request-Id", "").strip()
    return given if _REQUEST_ID.fullmatch(given) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
