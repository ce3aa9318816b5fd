"""Spans of requests, as an OTLP collector gets them: read by OpenTelemetry's own messages."""

from __future__ import annotations

import pytest
from aiohttp import web
from engines.api_client import served
from engines.routed import scripted
from engines.scripted_engine import ScriptedEngine

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"  # the example of W3C Trace Context


async def test_a_request_becomes_a_span_of_its_clients_trace(tokenizer):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    from fastdecode.api.tracing import Tracing

    spans = []

    async def take(request: web.Request) -> web.Response:
        body = ExportTraceServiceRequest.FromString(await request.read())
        spans.extend(s for r in body.resource_spans for scope in r.scope_spans for s in scope.spans)
        return web.Response()

    engine = ScriptedEngine([5, 6, 7])
    async with scripted(web.post("/v1/traces", take)) as collector:
        tracing = Tracing(f"{collector}/v1/traces", "tiny")
        async with served(engine, tokenizer, tracing=tracing) as client:
            body = {"prompt": [5, 6], "max_tokens": 3}
            async with client.http.post("/v1/completions", json=body, headers={"traceparent": PARENT}) as response:
                answer = await response.json()
            async with client.http.get("/health") as response:
                assert response.status == 200
            async with client.http.post("/v1/completions", json={}) as response:
                assert response.status == 400
    good, bad = spans
    assert good.trace_id.hex() == PARENT.split("-")[1] and good.parent_span_id.hex() == PARENT.split("-")[2]
    found = {a.key: a.value.string_value or a.value.int_value or a.value.double_value for a in good.attributes}
    assert found.pop("gen_ai.server.time_to_first_token") > 0
    assert found == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "fastdecode",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": answer["id"],
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
    }
    found = {a.key: a.value.int_value for a in bad.attributes}
    assert found["http.response.status_code"] == 400 and not bad.parent_span_id
