"""The middlewares of every request: errors become JSON in OpenAI's shape, and the API key is checked."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from fastdecode.api.errors import ApiError, from_engine
from fastdecode.engine.request import EngineError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OPEN_PATHS = frozenset({"/health"})


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Make every answer other than 200 an error object, also aiohttp's own 404, 405 and 413."""
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except EngineError as error:
        return from_engine(error).response()
    except web.HTTPRequestEntityTooLarge:
        return ApiError(
            413, f"the body is larger than {request.client_max_size} bytes", code="body_too_large"
        ).response()
    except web.HTTPMethodNotAllowed as error:
        headers = {"Allow": ", ".join(sorted(error.allowed_methods))}
        return ApiError(
            405, f"{request.method} is not allowed on {request.path}", code="method_not_allowed", headers=headers
        ).response()
    except web.HTTPNotFound:
        return ApiError(404, f"there is no {request.path} here", code="not_found").response()
    except web.HTTPException as error:
        return ApiError(error.status, error.reason).response()
    except ConnectionError:
        raise  # the client has gone, so there is nobody to answer
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return ApiError(500, "internal error; the server's log says more", code="internal_error").response()


def require_key(api_key: str) -> Middleware:
    """A middleware that requires `Authorization: Bearer <api_key>` on every path but /health."""
    expected = _digest(api_key)

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        # All digests have the same length, so the time of the comparison does not reveal the length of the key.
        known = hmac.compare_digest(_digest(key.strip()), expected)
        if request.path not in _OPEN_PATHS and not (known and scheme.lower() == "bearer"):
            message = "wrong API key" if key else "no API key: send it as `Authorization: Bearer <key>`"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return check_key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
