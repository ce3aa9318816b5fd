"""S-nodes in this process that know a router's secret, stand-ins for S-nodes, and routers in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools

import aiohttp
from aiohttp import web
from openai import AsyncOpenAI

from engines import api_client
from fastdecode.api.server import bind, serve
from fastdecode.daemon.discovery import FixedSet
from fastdecode.router.forwarder import Forwarder, RouterMetrics
from fastdecode.router.main import make_app
from fastdecode.router.pool import Pool

SECRET = b"a secret of S-nodes and routers"
served = functools.partial(api_client.served, router_secret=SECRET)


@contextlib.asynccontextmanager
async def routed(*urls, nodes=None, secret=SECRET, continue_seconds=30.0):
    """A router over S-nodes that it has found healthy; yields OpenAI's client, an HTTP client and the pool."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        pool = Pool(nodes or FixedSet(urls), session, secret)
        metrics = RouterMetrics(pool)
        await pool.start()
        server = await serve(
            make_app(pool, Forwarder(pool, session, metrics, secret, continue_seconds), metrics), bind("127.0.0.1", 0)
        )
        url = f"http://127.0.0.1:{server.port}"
        try:
            async with asyncio.timeout(60):
                while sum(s_node.healthy for s_node in pool.s_nodes) < len(urls):
                    await asyncio.sleep(0.01)
            async with (
                AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as api,
                aiohttp.ClientSession(url) as http,
            ):
                yield api, http, pool
        finally:
            await api_client.accept_all()
            await server.close(grace=0)
            await pool.close()


def url_of(client):
    return f"http://127.0.0.1:{client.server.port}"


@contextlib.asynccontextmanager
async def dying(*parts):
    """An S-node that is healthy, answers every request with these bytes of a stream, and drops the connection."""

    async def health(_):
        return web.json_response({"status": "ok", "running": 0, "waiting": 0})

    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.05)
        request.transport.abort()
        return response

    async with scripted(web.get("/health", health), web.post("/v1/{path:.*}", answer)) as url:
        yield url


@contextlib.asynccontextmanager
async def scripted(*routes, tls=None):
    """The URL of a server with these routes, over TLS if it gets an SSLContext."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    [sock] = bind("127.0.0.1", 0)
    await web.SockSite(runner, sock, ssl_context=tls).start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await api_client.accept_all()
        await runner.cleanup()
