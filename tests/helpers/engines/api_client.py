"""An API served by the real runner on a real socket, and its clients: the `openai` package and aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from prometheus_client.parser import text_string_to_metric_families

from fastdecode.api.app import ApiOptions, make_app
from fastdecode.api.server import ApiServer, bind, serve
from fastdecode.engine.engine import Engine
from fastdecode.service.client import EngineClient
from fastdecode.service.host import EngineHost
from fastdecode.service.local import LocalEngine
from fastdecode.service.remote import RemoteEngine
from fastdecode.text.tokenizer import Tokenizer

MODEL = "tiny"


@dataclass
class Client:
    """`openai` is OpenAI's client; `http` sends requests that OpenAI's client would never send."""

    server: ApiServer
    openai: AsyncOpenAI
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(path, json=body) as response:
            return response.status, await response.json()

    async def metrics(self) -> dict[tuple[str, str], float]:
        """The samples of /metrics by prometheus_client's parser: (name, labels without model_name, joined) -> value."""
        async with self.http.get("/metrics") as response:
            text = await response.text()
        return {
            (sample.name, ",".join(v for k, v in sorted(sample.labels.items()) if k != "model_name")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@contextlib.asynccontextmanager
async def served(
    engine: Any,
    tokenizer: Tokenizer,
    *,
    key: str = "none",
    names: Sequence[str] = (MODEL,),
    remote: bool = True,
    **options: Any,
) -> AsyncIterator[Client]:
    """Serve an engine, or an EngineClient, on a free port. `options` are those of ApiOptions; the clients send `key`.

    `remote`: the API reaches the engine over a pair of sockets, as an API process does.
    """
    if isinstance(engine, Engine):
        engine = LocalEngine(engine, tokenizer, names[0])
    async with (
        remote_engine(engine) if remote else contextlib.nullcontext(engine) as engine,
        _served(engine, tokenizer, key, names, options) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def remote_engine(engine: EngineClient) -> AsyncIterator[RemoteEngine]:
    """`engine` at the other end of a pair of sockets."""
    near, far = socket.socketpair()
    host = await EngineHost.open(near, engine)
    serving = asyncio.create_task(host.run())
    remote = await RemoteEngine.open(far)
    try:
        yield remote
    finally:
        await remote.close()
        await serving


@contextlib.asynccontextmanager
async def _served(
    engine: EngineClient, tokenizer: Tokenizer, key: str, names: Sequence[str], options: dict[str, Any]
) -> AsyncIterator[Client]:
    server = await serve(make_app(engine, tokenizer, ApiOptions(tuple(names), **options)), bind("127.0.0.1", 0))
    # There is no TLS, and reading the system's certificates is slow.
    http_client = DefaultAsyncHttpxClient(verify=False)
    url = f"http://127.0.0.1:{server.port}"
    try:
        async with (
            AsyncOpenAI(
                base_url=url + "/v1", api_key=key, max_retries=0, timeout=60, http_client=http_client
            ) as openai,
            aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}) as http,
        ):
            yield Client(server, openai, http)
    finally:
        await accept_all()
        await server.close(grace=0)


async def accept_all() -> None:
    """Let asyncio make the connections that clients have opened before their server is closed: one that is accepted but
    not made by then would stay open (python/cpython#109564)."""
    for _ in range(6):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def raw_request(port, path, body):
    """Send a request on a new socket, for a client that disconnects."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    sock.connect(("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
