"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from fastdecode.engine.state.request import (
    EngineError,
    GenerationFailed,
    InvalidParameter,
    InvalidPrompt,
    NotReady,
    Overloaded,
    PromptTooLong,
)


class ApiError(Exception):
    """An answer other than 200.

    Attributes:
        status: HTTP status.
        message: a sentence for the client.
        param: the field of the request that is wrong, or None.
        code: a machine-readable reason like OpenAI's, or None.
        headers: additional headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        """The answer for aiohttp."""
        return json_response(self.body, status=self.status, headers=self.headers)


_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


def from_engine(error: EngineError, prompt_param: str | None = None) -> ApiError:
    """The HTTP answer to an error of the engine. `prompt_param` is the request's field that holds the prompt."""
    message = str(error)
    match error:
        case PromptTooLong():
            return ApiError(400, message, param=prompt_param, code="context_length_exceeded")
        case InvalidPrompt():
            return ApiError(400, message, param=prompt_param, code="invalid_prompt")
        case InvalidParameter():
            return ApiError(400, message, param=error.name, code="invalid_value")
        case Overloaded(retry_after=seconds):
            return ApiError(429, message, code="overloaded", headers={"Retry-After": str(seconds)})
        case NotReady():
            return ApiError(503, message, code="not_ready", headers={"Retry-After": "5"})
        case GenerationFailed():
            return ApiError(500, message, code="generation_failed")
    return ApiError(500, message)


def json_response(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type="application/json")
