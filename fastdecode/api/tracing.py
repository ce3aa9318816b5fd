"""OpenTelemetry spans of the requests that generate (extra `otel`), sent by OTLP over HTTP.

A span continues the trace that the client names in `traceparent` (W3C Trace Context). Its attributes have the names of
OpenTelemetry's semantic conventions for HTTP servers and for generative AI.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from fastdecode.api.middleware import Handler, notes

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}


def check_available() -> str | None:
    """What spans lack on this machine; None if they can be made."""
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            find_spec(package)
        except ImportError:
            return "needs pip install 'fastdecode[otel]'"
    return None


class Tracing:
    """The spans of one process."""

    def __init__(self, endpoint: str, model: str):
        """`endpoint` is the URL that takes OTLP's traces, such as http://localhost:4318/v1/traces; `model` is the
        model's name. Raises ImportError unless `check_available` finds everything."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider: Any = TracerProvider(resource=Resource.create({"service.name": "fastdecode"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("fastdecode")
        self._model = model

    def close(self) -> None:
        """Send the spans that are not sent yet. Waits for that."""
        self._provider.shutdown()

    @property
    def middleware(self) -> Middleware:
        """The middleware that makes the spans."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()

        @web.middleware
        async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
            if (operation := _OPERATIONS.get(request.path)) is None:
                return await handler(request)
            attributes = {
                "http.request.method": request.method,
                "url.path": request.path,
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "fastdecode",
                "gen_ai.request.model": self._model,
            }
            parent = propagator.extract({name.lower(): value for name, value in request.headers.items()})
            notes().logged = {}  # a connection that is kept alive handles several requests in one task
            name = f"{operation} {self._model}"
            with self._tracer.start_as_current_span(name, parent, SpanKind.SERVER, attributes) as span:
                try:
                    response = await handler(request)
                finally:
                    for found, attribute in _LOGGED.items():
                        if (value := notes().logged.get(found)) is not None:
                            span.set_attribute(attribute, value)
                span.set_attribute("http.response.status_code", response.status)
                if response.status >= 500:
                    span.set_status(StatusCode.ERROR)
            return response

        return trace


#: The access log's fields of a request, and the attributes that they become.
_LOGGED = {
    "id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "first_token_seconds": "gen_ai.server.time_to_first_token",
}
