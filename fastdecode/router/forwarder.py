"""Forwards requests to S-nodes, tries another S-node as long as the client has not seen a token, and continues streams
whose S-node is lost or about to end at another one (api/continuation.py). Counts for /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import aiohttp
import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from yarl import URL

from fastdecode.api.body import read_bytes
from fastdecode.api.continuation import FIELD, HEADER, MARK, Progress, router_proof
from fastdecode.api.errors import ApiError, is_anthropic
from fastdecode.api.fields import decode_json, invalid
from fastdecode.api.last_event import HEADER as LAST_EVENT_ID
from fastdecode.api.sse import event as plain_event
from fastdecode.api.sse import named_event
from fastdecode.router.pool import Pool, SNode, prefix_keys, why_lost

log = logging.getLogger(__name__)

#: S-nodes that a request is sent to, one after the other, before the client gets the error of the last one.
_MOST_TRIES = 3
#: Answers after which another S-node is tried: it is overloaded, is ending, or has lost its R-nodes.
_PASSING = frozenset({429, 502, 503, 504})
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.1  # of an S-node that continues a stream
#: Headers that are not forwarded: they belong to one connection (RFC 9110, section 7.6.1), or this end writes its own.
_HOP = frozenset(
    ["connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", HEADER.lower(), "content-length", "content-encoding", "date", "server", "accept-encoding"]
)  # fmt: skip
_LOST = "the S-node that generated this answer was lost; send the request again"


class _Retry(Exception):
    """Another S-node may do better. `answer` is what the client gets if there is none."""

    def __init__(self, why: str, answer: web.Response | None = None):
        super().__init__(why)
        self.answer = answer


class Forwarder:
    """The handler of all requests that S-nodes answer."""

    def __init__(
        self,
        pool: Pool,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        secret: bytes | None,
        continue_seconds: float = 30.0,
    ):
        """`secret`: that of the S-nodes; None: streams cannot be continued. `continue_seconds`: how long a stream that
        can be continued waits for an S-node."""
        self._pool, self._session, self._metrics, self._secret = pool, session, metrics, secret
        self._continue_seconds = continue_seconds
        self.requests = 0  # that wait for an S-node's answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward a request. Raises what read_bytes raises, and ApiError: 400 if a client claims to be a router, 503 if
        no S-node can take the request."""
        body = await read_bytes(request)
        fields = _fields(body)
        if FIELD in fields:  # S-nodes take it from whoever proves the secret, as this router does with every body
            raise invalid(FIELD, "unknown field", code="unknown_field")
        keys = prefix_keys(_prompt(fields)) if request.method == "POST" else []
        self.requests += 1
        try:
            async with _Relay(request, body) as relay:
                return await self._answer(relay, keys)
        finally:
            self.requests -= 1

    async def _answer(self, relay: _Relay, keys: list[bytes]) -> web.StreamResponse:
        request = relay.request
        tried: list[SNode] = []
        failure: _Retry | None = None
        most = len(self._pool.s_nodes) if relay.is_stored else _MOST_TRIES
        while len(tried) < most and (s_node := await self._choose(relay, keys, tried)) is not None:
            if relay.has_token:
                self._metrics.continued.inc()
            elif tried:
                self._metrics.retries.inc()
            tried.append(s_node)
            s_node.requests += 1
            n_tokens = relay.progress.n_tokens
            try:
                return await self._forward(relay, s_node, keys)
            except _Retry as error:
                failure = error
                log.info("%s %s: S-node %s: %s", request.method, request.rel_url.raw_path, s_node.url, error)
                if relay.progress.n_tokens > n_tokens:
                    tried = [s_node]
            finally:
                s_node.requests -= 1
        if relay.response is not None:  # the client has the headers of a stream
            return await relay.fail(self._metrics)
        if failure is not None and failure.answer is not None:
            return failure.answer
        raise ApiError(503, _none_left(self._pool), code="no_s_node", headers={"Retry-After": "1"})

    async def _choose(self, relay: _Relay, keys: list[bytes], tried: list[SNode]) -> SNode | None:
        """The next S-node for a request; None: there is none. A stream that can be continued waits for one. A stored
        stream may be at any S-node, also at one that takes no requests."""
        if relay.is_stored and relay.progress.head is None:
            left = [s_node for s_node in self._pool.s_nodes if s_node not in tried]
            return max(left, key=lambda s_node: s_node.healthy, default=None)
        deadline = time.monotonic() + self._continue_seconds
        begun = relay.progress.head is not None and (relay.has_token or relay.is_stored)
        while (s_node := self._pool.choose(keys, tried)) is None and begun:
            tried.clear()  # one that was lost may come back
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(_POLL_SECONDS)
        return s_node

    async def _forward(self, relay: _Relay, s_node: SNode, keys: list[bytes]) -> web.StreamResponse:
        """Send the request to one S-node and its answer to the client. Raises _Retry."""
        request = relay.request
        headers = _kept(request.headers)
        body = relay.body
        if self._secret is not None:
            headers[HEADER] = router_proof(self._secret, body)
        self._metrics.requests.labels(s_node.url).inc()
        asking = self._session.request(
            request.method,
            URL(s_node.url + request.rel_url.raw_path_qs, encoded=True),
            data=body or None,
            headers=headers | {"Accept-Encoding": "identity"},
            allow_redirects=False,
            server_hostname=self._pool.tls_name,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        )
        try:
            async with contextlib.AsyncExitStack() as stack:
                answer = await stack.enter_async_context(asking)
                if answer.content_type == "text/event-stream":
                    return await relay.stream(answer, stack, lambda: self._may_leave(s_node, keys))
                whole = web.Response(body=await answer.read(), status=answer.status, headers=_kept(answer.headers))
                passing = answer.status in _PASSING or _is_passing_failure(answer.status, whole.body)
                passing |= relay.is_stored and answer.status == HTTPStatus.NOT_FOUND
                if passing or relay.response is not None:
                    raise _Retry(f"answered {answer.status}", whole)
                return whole
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            if relay.client_gone:
                raise
            self._pool.suspect(s_node, f"a request failed: {why_lost(error)}")
            if relay.has_token and relay.progress.head is None:
                return await relay.fail(self._metrics)
            raise _Retry(why_lost(error)) from None

    def _may_leave(self, s_node: SNode, keys: list[bytes]) -> bool:
        """True if the streams of an S-node that is about to end can go on at another one."""
        self._pool.suspect(s_node, "is about to end")
        return self._pool.choose(keys, [s_node]) is not None


class _Relay:
    """One client's request, and how much of the answer the client has had."""

    def __init__(self, request: web.Request, body: bytes):
        self.request = request
        self.response: web.StreamResponse | None = None  # of a stream whose headers are sent
        self.has_token = False  # the client has an event of the stream
        self.client_gone = False
        self.progress = Progress()  # of what the client has
        # It asks for a stream that an S-node has stored, or for a response in the background.
        self.is_stored = "id" in request.match_info or bool(request.headers.get(LAST_EVENT_ID))
        self._body = body
        self._left = contextlib.AsyncExitStack()  # the answer of an S-node that the stream is leaving

    async def __aenter__(self) -> _Relay:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._left.aclose()

    @property
    def body(self) -> bytes:
        """The request for the next S-node."""
        if self.progress.head is None:
            return self._body
        return orjson.dumps(orjson.loads(self._body) | {FIELD: self.progress.resume()})

    async def stream(
        self, answer: aiohttp.ClientResponse, stack: contextlib.AsyncExitStack, may_leave: Callable[[], bool]
    ) -> web.StreamResponse:
        """Pass a stream on, one whole event or more at a time. Of a stream with marks, events wait for the mark behind
        them. `may_leave` is asked when the S-node is about to end. `stack` closes `answer`.

        The answer of an S-node that is about to end stays open until another S-node has sent a token, because an S-node
        may free the K and V of a stream that is closed.

        Raises _Retry, aiohttp.ClientError, ConnectionError.
        """
        if self.response is None:
            self.response = web.StreamResponse(status=answer.status, headers=_kept(answer.headers))
            await self._write(b"", prepare=True)
        rest, held = b"", b""
        async for received in answer.content.iter_any():
            events, rest = _split(rest + received)
            ready = b""
            for event in events:
                if event.startswith(MARK):
                    n_tokens = self.progress.n_tokens
                    self.progress.take(orjson.loads(event[len(MARK) :]))
                    if self.progress.n_tokens > n_tokens:
                        await self._left.aclose()
                    ready, held = ready + held, b""
                elif self.progress.head is None or (event.startswith(b":") and not held):
                    ready += event
                else:
                    held += event
            await self._pass(ready)
            if self.progress.leaving:
                self.progress.leaving = False
                if may_leave():
                    await self._left.aclose()
                    self._left = stack.pop_all()
                    raise _Retry("is about to end")
        await self._pass(held + rest)
        await self.response.write_eof()
        return self.response

    async def _pass(self, events: bytes) -> None:
        """Give the client whole events. Raises _Retry for an error that another S-node may mend."""
        if not events:
            return
        failed = self.progress.head is not None or not self.has_token
        if failed and (first := _first_data(events)) is not None and _is_passing_failure(500, first):
            raise _Retry("failed")
        self.has_token = self.has_token or _first_data(events) is not None
        await self._write(events)

    async def fail(self, metrics: RouterMetrics) -> web.StreamResponse:
        """End the stream with an error event."""
        assert self.response is not None, "a stream has begun"
        metrics.broken.inc()
        error, path = ApiError(502, _LOST, code="s_node_lost"), self.request.path
        if is_anthropic(path):
            last = named_event(error.anthropic_body)
        elif path.startswith("/v1/responses"):
            last = named_event({"type": "error", "code": error.code, "message": _LOST, "param": None})
        else:
            last = plain_event(error.body)
        await self._write(last)
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


def has_dot_segments(path: str) -> bool:
    """True if a path, percent-encoded any number of times, has a segment . or .. (RFC 3986, 5.2.4) between slashes
    or backslashes."""
    while (decoded := unquote(path)) != path:
        path = decoded
    return not {".", ".."}.isdisjoint(path.replace("\\", "/").split("/"))


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole events and comments that a stream begins with, and the rest. Comments may lack an empty line."""
    *whole, rest = data.split(b"\n\n")
    events = []
    for event in [event + b"\n\n" for event in whole] + [rest]:
        while event.startswith(b":") and not event.startswith(MARK) and b"\n" in event.removesuffix(b"\n\n"):
            comment, _, event = event.partition(b"\n")
            events.append(comment + b"\n")
        events.append(event)
    return events[:-1], events[-1]


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
        value = orjson.loads(body)
        error = value["error"] if "error" in value else value["response"]["error"]
        return error["code"] in ("generation_failed", "not_ready", "shutting_down")
    except (ValueError, KeyError, TypeError):
        return False


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a body; {} if it is no JSON object, which S-nodes refuse."""
    try:
        fields = decode_json(body)
    except ApiError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _prompt(fields: dict[str, Any]) -> bytes:
    """What the prompt of a request begins with, as bytes to compare; b"" without a prompt."""
    if messages := fields.get("messages"):
        # Messages are appended as a chat goes on, so the JSON of a longer chat begins with that of a shorter one.
        return orjson.dumps([fields.get("tools"), fields.get("system"), messages])
    prompt = fields.get("prompt") or fields.get("input") or ""
    return prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else orjson.dumps(prompt)


def _none_left(pool: Pool) -> str:
    if not pool.s_nodes:
        return "no S-node is known"
    return "no S-node can take the request: " + "; ".join(f"{s.url}: {s.why_not or 'tried'}" for s in pool.s_nodes)


class RouterMetrics(Collector):
    """Counters of one router."""

    def __init__(self, pool: Pool) -> None:
        """`pool` has the S-nodes that are shown."""
        self._pool, self._registry = pool, CollectorRegistry()
        self.requests = self._counter("requests", "Requests sent to an S-node.", "s_node")
        self.retries = self._counter("retries", "Requests sent to a further S-node.")
        self.continued = self._counter("continued_streams", "Streams continued at another S-node.")
        self.broken = self._counter("broken_streams", "Streams whose S-node was lost.")
        self._registry.register(self)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"fastdecode:router_{name}", documentation, labels, registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> list[GaugeMetricFamily]:
        """The gauges of the S-nodes, for the registry."""
        healthy = GaugeMetricFamily(
            "fastdecode:router_s_node_healthy", "1 while the S-node takes requests.", labels=["s_node"]
        )
        load = GaugeMetricFamily(
            "fastdecode:router_s_node_load", "Requests at the S-node, those of others included.", labels=["s_node"]
        )
        for s_node in self._pool.s_nodes:
            healthy.add_metric([s_node.url], float(s_node.healthy))
            load.add_metric([s_node.url], s_node.load)
        return [healthy, load]
