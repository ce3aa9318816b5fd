"""Forwards requests to S-nodes, and tries another S-node as long as the client has not seen a token."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from fastdecode.api.errors import ApiError
from fastdecode.router.metrics import RouterMetrics
from fastdecode.router.pool import Pool, SNode, prefix_keys

log = logging.getLogger(__name__)

#: S-nodes that a request is sent to, one after the other, before the client gets the error of the last one.
_MOST_TRIES = 3
#: Answers after which another S-node is tried: it is overloaded, is ending, or has lost its R-nodes.
_PASSING = frozenset({429, 502, 503, 504})
_CONNECT_SECONDS = 5.0
#: Headers of one connection, which are not forwarded (RFC 9110, section 7.6.1), and those that this end writes anew.
_HOP = frozenset(
    ["connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "content-length", "content-encoding", "date", "server", "accept-encoding"]
)  # fmt: skip
_LOST = "the S-node that generated this answer was lost; send the request again"


class _Retry(Exception):
    """Another S-node may do better. `answer` is what the client gets if there is none."""

    def __init__(self, why: str, answer: web.Response | None = None):
        super().__init__(why)
        self.answer = answer


class Proxy:
    """The handler of all requests that S-nodes answer."""

    def __init__(self, pool: Pool, session: aiohttp.ClientSession, metrics: RouterMetrics):
        self._pool, self._session, self._metrics = pool, session, metrics
        self.requests = 0  # that wait for an S-node's answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward a request. Raises ApiError (503) if no S-node can take it."""
        body = await request.read()
        keys = prefix_keys(_prompt(body)) if request.method == "POST" else []
        relay = _Relay(request)
        tried: list[SNode] = []
        failure: _Retry | None = None
        self.requests += 1
        try:
            while len(tried) < _MOST_TRIES and (s_node := self._pool.choose(keys, tried)) is not None:
                if tried:
                    self._metrics.retries.inc()
                tried.append(s_node)
                s_node.requests += 1
                try:
                    return await self._forward(relay, s_node, body)
                except _Retry as error:
                    failure = error
                    log.info("%s %s: S-node %s: %s", request.method, request.path, s_node.url, error)
                finally:
                    s_node.requests -= 1
        finally:
            self.requests -= 1
        if relay.response is not None:  # the client has the headers of a stream
            return await relay.fail(self._metrics)
        if failure is not None and failure.answer is not None:
            return failure.answer
        raise ApiError(503, _none_left(self._pool), code="no_s_node", headers={"Retry-After": "1"})

    async def _forward(self, relay: _Relay, s_node: SNode, body: bytes) -> web.StreamResponse:
        """Send the request to one S-node and its answer to the client. Raises _Retry."""
        request = relay.request
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        self._metrics.requests.labels(s_node.url).inc()
        try:
            async with self._session.request(
                request.method,
                s_node.url + request.path_qs,
                data=body or None,
                headers=headers | {"Accept-Encoding": "identity"},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            ) as answer:
                if answer.content_type == "text/event-stream":
                    return await relay.stream(answer)
                whole = web.Response(body=await answer.read(), status=answer.status, headers=_kept(answer.headers))
                if answer.status in _PASSING or _is_passing_failure(answer.status, whole.body):
                    raise _Retry(f"answered {answer.status}", whole)
                return whole
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            if relay.client_gone:
                raise
            self._pool.suspect(s_node, f"a request failed: {error or type(error).__name__}")
            if relay.has_token:
                return await relay.fail(self._metrics)
            raise _Retry(str(error) or type(error).__name__) from None


class _Relay:
    """One client's request, and the part of the answer that it has."""

    def __init__(self, request: web.Request):
        self.request = request
        self.response: web.StreamResponse | None = None  # of a stream whose headers are sent
        self.has_token = False  # the client has an event of the stream
        self.client_gone = False

    async def stream(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass a stream on, one whole event or more at a time. Raises _Retry, aiohttp.ClientError, ConnectionError."""
        if self.response is None:
            self.response = web.StreamResponse(status=answer.status, headers=_kept(answer.headers))
            await self._write(b"", prepare=True)
        rest = b""
        async for part in answer.content.iter_any():
            events, separator, rest = (rest + part).rpartition(b"\n\n")
            if not separator:
                continue
            if not self.has_token and (first := _first_data(events)) is not None:
                if _is_passing_failure(500, first):
                    raise _Retry("failed before its first token")
                self.has_token = True
            await self._write(events + separator)
        await self._write(rest)
        await self.response.write_eof()
        return self.response

    async def fail(self, metrics: RouterMetrics) -> web.StreamResponse:
        """End the stream with an error event."""
        assert self.response is not None, "a stream has begun"
        metrics.broken.inc()
        body = ApiError(502, _LOST, code="s_node_lost").body
        if self.request.path == "/v1/responses":
            body = {"type": "error", "code": "s_node_lost", "message": _LOST, "param": None}
            await self._write(b"event: error\n")
        await self._write(b"data: " + orjson.dumps(body) + b"\n\n")
        await self.response.write_eof()
        return self.response

    async def _write(self, data: bytes, *, prepare: bool = False) -> None:
        assert self.response is not None, "a stream has begun"
        try:
            if prepare:
                await self.response.prepare(self.request)
            if data:
                await self.response.write(data)
        except (ConnectionError, aiohttp.ClientError):
            self.client_gone = True
            raise


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}


def _first_data(events: bytes) -> bytes | None:
    """The data of the first event among whole ones; None if there are only comments."""
    for line in events.split(b"\n"):
        if line.startswith(b"data:"):
            return line[5:].strip()
    return None


def _is_passing_failure(status: int, body: Any) -> bool:
    """True for the error that an S-node gives for requests whose R-nodes it has lost."""
    if status != 500 or not isinstance(body, bytes):
        return False
    try:
        error = orjson.loads(body)["error"]
        return error["code"] in ("generation_failed", "not_ready", "shutting_down")
    except (ValueError, KeyError, TypeError):
        return False


def _prompt(body: bytes) -> bytes:
    """What the prompt of a request begins with, as bytes to compare; b"" without a prompt."""
    try:
        fields = orjson.loads(body)
    except ValueError:
        return b""
    if not isinstance(fields, dict):
        return b""
    if messages := fields.get("messages"):
        # Messages are appended as a chat goes on, so the JSON of a longer chat begins with that of a shorter one.
        return orjson.dumps([fields.get("tools"), messages])
    prompt = fields.get("prompt") or fields.get("input") or ""
    return prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else orjson.dumps(prompt)


def _none_left(pool: Pool) -> str:
    if not pool.s_nodes:
        return "no S-node is known"
    return "no S-node can take the request: " + "; ".join(f"{s.url}: {s.why_not or 'tried'}" for s in pool.s_nodes)
