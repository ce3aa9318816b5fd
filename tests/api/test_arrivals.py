"""Half a header, half a body, a body that is announced too long, and more connections than descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import resource
import socket
import subprocess
import sys

import orjson
import pytest
from engines import api_client, routed
from engines.api_client import MODEL
from engines.scripted_engine import ScriptedEngine

from fastdecode.api import body, server
from fastdecode.api.app import MAX_BODY_BYTES, ApiOptions, make_app
from fastdecode.api.server import bind, serve

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def served(tokenizer, *scripts, **options):
    """The port of a server with `options` of its connections."""
    made = await serve(
        make_app(ScriptedEngine(*scripts), tokenizer, ApiOptions((MODEL,))), bind("127.0.0.1", 0), **options
    )
    try:
        yield made.port
    finally:
        await made.close()


async def until_end(reader):
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionResetError):
            return await reader.read()
    return b""


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("kind", ["API", "scripted"])
async def test_a_connection_that_is_accepted_as_its_server_closes_is_closed_too(tokenizer, kind, turns):
    """Else a later test would find it unclosed."""
    server = api_client.served(ScriptedEngine(), tokenizer) if kind == "API" else routed.scripted()
    async with server as made:
        port = made.server.port if kind == "API" else int(made.rpartition(":")[2])
        client = socket.create_connection(("127.0.0.1", port), timeout=1)
        for _ in range(turns):
            await asyncio.sleep(0)
    with client, contextlib.suppress(ConnectionResetError):
        assert await asyncio.to_thread(client.recv, 1) == b""


@pytest.mark.parametrize("sent", [b"", b"GET /vers", POST, POST + b"X-Half: "])
async def test_half_a_header_ends_the_connection(tokenizer, sent):
    async with served(tokenizer, header_seconds=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await until_end(reader) == b""
        writer.close()


async def test_bytes_that_trickle_do_not_prolong_a_header(tokenizer):
    async with served(tokenizer, header_seconds=0.3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        end = asyncio.create_task(until_end(reader))
        writer.write(POST)
        while not end.done():
            writer.write(b"X-More: 1\r\n")
            await asyncio.sleep(0.05)
        assert end.result() == b""
        writer.close()


async def test_a_connection_may_rest_between_requests_but_not_within_a_header(tokenizer):
    async with served(tokenizer, header_seconds=0.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b"}")
            await asyncio.sleep(0.8)
        writer.write(GET[:20])
        assert await until_end(reader) == b""
        writer.close()


async def test_an_answer_may_take_longer_than_a_header(tokenizer):
    async with served(tokenizer, [asyncio.Event()], header_seconds=0.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        content = orjson.dumps({"model": MODEL, "prompt": "x", "stream": True})
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.write(GET[:20])  # the beginning of a next request
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                while await reader.read(1000):
                    pass
        writer.close()


async def test_half_a_body_is_answered_and_ended(tokenizer, monkeypatch):
    monkeypatch.setattr(body, "_BODY_SECONDS", 0.2)
    # aiohttp reads on for 10 s before it closes the connection.
    monkeypatch.setattr(server, "Arrivals", functools.partial(server.Arrivals, lingering_time=0.2))
    async with served(tokenizer) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"Content-Length: 1000\r\n\r\n{")
        head, _, content = (await until_end(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408") and b"onnection: close" in head
        assert orjson.loads(content)["error"]["code"] == "slow_body"
        writer.close()


async def test_a_slow_body_that_keeps_the_rate_is_read(tokenizer, monkeypatch):
    monkeypatch.setattr(body, "_BODY_SECONDS", 1.0)
    content = orjson.dumps({"model": MODEL, "prompt": "x" * 20_000, "temperature": -1})
    async with served(tokenizer) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(content))
        for at in range(0, len(content), 4000):
            writer.write(content[at : at + 4000])
            await asyncio.sleep(0.3)
        assert b"temperature" in await reader.readuntil(b"}")
        writer.close()


@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
async def test_a_body_that_is_announced_too_long_is_refused_unseen(tokenizer, expect):
    async with served(tokenizer) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + expect + b"Content-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1))
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 413"), "and not 100 Continue"
        writer.close()


async def test_the_oldest_connections_without_a_request_make_room(tokenizer):
    script = [5, asyncio.Event()]
    async with served(tokenizer, script, most_connections=20) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        content = orjson.dumps({"model": MODEL, "prompt": "x", "stream": True})
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        await reader.readuntil(b"\r\n\r\n")
        half = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
        for _, other in half:
            other.write(POST)
        for asking in range(5):
            one, other = await asyncio.open_connection("127.0.0.1", port)
            other.write(GET)
            assert b"200 OK" in await one.readuntil(b"}"), asking
            other.close()
        assert await until_end(half[0][0]) == b"", "the oldest one is closed"
        with pytest.raises(TimeoutError):  # the stream, which is older than all of them, goes on
            async with asyncio.timeout(0.2):
                while await reader.read(1000):
                    pass
        for _, other in [*half, (reader, writer)]:
            other.close()


def test_three_thousand_half_requests_leave_a_process_with_a_thousand_descriptors_to_others(tmp_path):
    n = 3000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n + 100:
        pytest.skip(f"this process may open {hard} descriptors")
    command = f"ulimit -n 1024; exec {sys.executable} -P -m fastdecode.router.main --port 0 --s-node http://127.0.0.1:1"
    log = tmp_path / "log"
    with log.open("w") as file:
        router = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=file, text=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, n + 100), hard))
    half = []
    try:
        [port] = re.findall(r"Router on http://127.0.0.1:(\d+)", router.stdout.readline())
        address = "127.0.0.1", int(port)
        for k in range(n):
            half.append(socket.create_connection(address, timeout=30))
            half[-1].sendall((POST, POST + b"Content-Length: 9\r\n\r\n{")[k % 2])
            if k % 500 == 499:
                with socket.create_connection(address, timeout=30) as asking:
                    asking.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert b"S-node" in asking.recv(4096)
    finally:
        for one in half:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        router.terminate()
        router.communicate(timeout=300)
    assert router.returncode == 0
    assert "Traceback" not in log.read_text() and "Too many open files" not in log.read_text()
