"""Errors in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, and in Anthropic's."""

from __future__ import annotations

import logging
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import orjson
from aiohttp import web

from fastdecode.engine.state import request as engine_errors
from fastdecode.engine.state.request import EngineError

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than 200."""

    status: int  # of HTTP
    message: str  # a sentence for the client
    _: KW_ONLY
    param: str | None = None  # the field of the request that is wrong
    code: str | None = None  # a machine-readable reason like OpenAI's
    headers: dict[str, str] = field(default_factory=dict)  # additional ones of the answer

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The JSON object of the answer in Anthropic's shape; `code` is an addition."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message, "code": self.code}}

    def response(self, path: str) -> web.Response:
        """The answer to a request for `path`, for aiohttp."""
        body = self.anthropic_body if is_anthropic(path) else self.body
        return json_response(body, status=self.status, headers=self.headers)


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


MESSAGES_PATH = "/v1/messages"
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def from_engine(error: EngineError, prompt_param: str | None = None, mask_param: str | None = None) -> ApiError:
    """The HTTP answer to an error of the engine. `prompt_param` is the request's field that holds the prompt, and
    `mask_param` one that forbids tokens."""
    message = str(error)
    match error:
        case engine_errors.PromptTooLong():
            return ApiError(400, message, param=prompt_param, code="context_length_exceeded")
        case engine_errors.InvalidPrompt():
            return ApiError(400, message, param=prompt_param, code="invalid_prompt")
        case engine_errors.InvalidParameter():
            return ApiError(400, message, param=error.name, code="invalid_value")
        case engine_errors.Overloaded(retry_after=seconds):
            return ApiError(429, message, code="overloaded", headers={"Retry-After": str(seconds)})
        case engine_errors.NotReady():
            return ApiError(503, message, code="not_ready", headers={"Retry-After": "5"})
        case engine_errors.NothingAllowed():
            return ApiError(400, message, param=mask_param, code="invalid_value")
        case engine_errors.GenerationFailed():
            return ApiError(500, message, code="generation_failed")
    return ApiError(500, message)


def from_exception(error: Exception, what: str, mask_param: str | None = None) -> ApiError:
    """The HTTP answer to whatever ended `what`. A bug is logged. `mask_param`: see from_engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return from_engine(error, mask_param=mask_param)
    log.error("%s failed", what, exc_info=error)
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")
