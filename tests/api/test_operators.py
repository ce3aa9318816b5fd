"""Options for operators: several keys, request ids, the access log, CORS and TLS."""

from __future__ import annotations

import logging
import ssl

import aiohttp
import orjson
import pytest
from engines.api_client import MODEL, served
from engines.scripted_engine import ScriptedEngine
from models.checkpoints import make_checkpoint
from wire.certificates import Authority

from fastdecode.api.app import ApiOptions, make_app
from fastdecode.api.server import bind, serve
from fastdecode.daemon.api_settings import ApiSettings
from fastdecode.daemon.config import NodeConfig
from fastdecode.daemon.option_values import ConfigError
from fastdecode.daemon.process import JsonFormatter
from fastdecode.engine.state.request import GenerationFailed
from fastdecode.gguf.file import ModelSource

ASK = {"model": MODEL, "prompt": "x"}
ORIGIN = "https://chat.example.org"

pytestmark = pytest.mark.quick


async def test_any_of_several_keys_opens(tokenizer, tmp_path):
    path = tmp_path / "keys"
    path.write_text("alpha\n\n  beta \n")
    keys = NodeConfig(api_key_file=path).read_api_keys()
    assert keys == ("alpha", "beta")
    clients = []
    for key, status in (("alpha", 200), ("beta", 200), ("beta", 200), ("alphabeta", 401), ("x", 401)):
        engine = ScriptedEngine([5])
        async with served(engine, tokenizer, api_keys=keys, key=key) as client:
            assert (await client.post("/v1/completions", ASK))[0] == status
        clients += [params.client for params in engine.params]
    alpha, beta, again = clients
    assert alpha != beta == again, "the engine shares its tokens out among keys"
    assert "alpha" not in alpha


async def test_a_request_id_is_taken_returned_and_logged(tokenizer, caplog):
    caplog.set_level(logging.INFO, "fastdecode.api.access")
    async with served(ScriptedEngine([5, 6], [5]), tokenizer) as client:
        for stream in (False, True):
            body, headers = ASK | {"stream": stream}, {"X-Request-Id": "trace-7"}
            async with client.http.post("/v1/completions", json=body, headers=headers) as response:
                assert response.headers["X-Request-Id"] == "trace-7"
                await response.read()
        async with client.http.get("/v1/models", headers={"X-Request-Id": "trace-8"}) as response:
            assert response.headers["X-Request-Id"] == "trace-8"
        async with client.http.get("/nothing", headers={"X-Request-Id": "trace-9"}) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (404, "trace-9")
        async with client.http.post("/v1/completions", json={}, headers={"X-Request-Id": "a b"}) as response:
            assert response.status == 400 and response.headers.get("X-Request-Id") != "a b"
    lines = [record.fields for record in caplog.records if record.name == "fastdecode.api.access"]
    assert [line["status"] for line in lines] == [200, 200, 200, 404, 400]
    assert [line.get("request_id") for line in lines] == ["trace-7", "trace-7", "trace-8", "trace-9", None]
    assert [line.get("completion_tokens") for line in lines] == [2, 1, None, None, None]
    missing = "there is no /nothing here; the API is under /v1, as in /v1/chat/completions"
    assert [line.get("error") for line in lines[2:]] == [None, missing, lines[4]["error"]]
    assert lines[4]["error"] == "prompt: this field is required"
    assert lines[0]["id"].startswith("cmpl-") and lines[0]["prompt_tokens"] == 1
    assert all(line["seconds"] >= 0 and line["client"] == "127.0.0.1" for line in lines)
    text = caplog.records[0].getMessage()
    assert text.startswith("POST /v1/completions 200 ") and "request_id=trace-7" in text and "\n" not in text
    decoded = orjson.loads(JsonFormatter().format(caplog.records[0]))
    assert (decoded["level"], decoded["path"], decoded["status"]) == ("info", "/v1/completions", 200)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_that_fails_is_logged_with_its_error(stream, tokenizer, caplog):
    caplog.set_level(logging.INFO, "fastdecode.api.access")
    engine = ScriptedEngine([5, GenerationFailed("R-node tcp://r1 was lost")])
    async with served(engine, tokenizer) as client:
        response = await client.http.post("/v1/completions", json=ASK | {"stream": stream})
        await response.read()
    [line] = [record.fields for record in caplog.records if record.name == "fastdecode.api.access"]
    assert line["status"] == (200 if stream else 500) and "R-node tcp://r1 was lost" in line["error"]
    assert line["id"].startswith("cmpl-") and line["completion_tokens"] == 1


async def test_refusals_are_logged_and_probes_are_quiet(tokenizer, caplog):
    caplog.set_level(logging.INFO, "fastdecode.api.access")
    async with served(ScriptedEngine(), tokenizer, api_keys=["k"], key="wrong") as client:
        for path, status in (("/health", 200), ("/v1/models", 401), ("/nothing", 401)):
            async with client.http.get(path) as response:
                assert response.status == status
    assert [record.getMessage().split(" ")[:3] for record in caplog.records if "access" in record.name] == [
        ["GET", "/v1/models", "401"],
        ["GET", "/nothing", "401"],
    ]


@pytest.mark.parametrize("origins", [(), (ORIGIN,), ("*",)], ids=str)
async def test_cors(tokenizer, origins):
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    granted = {(): None, (ORIGIN,): ORIGIN, ("*",): "*"}[origins]
    async with served(ScriptedEngine([5], [5]), tokenizer, cors_origins=origins, api_keys=["k"], key="k") as client:
        async with aiohttp.request(  # a browser asks without a key
            "OPTIONS", f"http://127.0.0.1:{client.server.port}/v1/chat/completions", headers=asked
        ) as response:
            assert response.headers.get("Access-Control-Allow-Origin") == granted
            if granted:
                assert response.status == 204
                assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
                methods = response.headers["Access-Control-Allow-Methods"].split(", ")
                assert sorted(methods) == ["DELETE", "GET", "POST"]  # all that the API has
        for stream in (False, True):
            body = ASK | {"stream": stream}
            async with client.http.post("/v1/completions", json=body, headers={"Origin": ORIGIN}) as response:
                assert response.headers.get("Access-Control-Allow-Origin") == granted
        async with client.http.post("/v1/completions", json={}, headers={"Origin": ORIGIN}) as response:
            assert response.status == 400  # a page can read why
            assert response.headers.get("Access-Control-Allow-Origin") == granted
        async with client.http.get("/v1/models", headers={"Origin": "https://other.example.org"}) as response:
            allowed = response.headers.get("Access-Control-Allow-Origin")
            assert allowed == ("*" if granted == "*" else None)


async def test_the_address_for_all_of_ipv6_is_one_for_all_of_ipv4_too(tokenizer):
    try:
        sockets = bind("::", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = await serve(make_app(ScriptedEngine(), tokenizer, ApiOptions((MODEL,))), sockets)
    try:
        async with aiohttp.ClientSession() as http:
            for host in ("127.0.0.1", "[::1]"):
                async with http.get(f"http://{host}:{server.port}/v1/models") as response:
                    assert response.status == 200
    finally:
        await server.close(grace=0)


async def test_of_two_servers_that_have_bound_one_port_the_second_fails(tokenizer):
    first = bind("127.0.0.1", 0)
    port = first[0].getsockname()[1]
    second = bind("127.0.0.1", port)  # the first may read weights for minutes before it listens
    server = await serve(make_app(ScriptedEngine(), tokenizer, ApiOptions((MODEL,))), first)
    try:
        with pytest.raises(OSError, match=f"cannot serve the API on port {port}: Address already in use"):
            await serve(make_app(ScriptedEngine(), tokenizer, ApiOptions((MODEL,))), second)
    finally:
        await server.close(grace=0)


async def test_tls(tokenizer, tmp_path):
    authority = Authority(tmp_path, "authority")
    cert, key = authority.sign("s-node", "IP:127.0.0.1")
    settings = ApiSettings.make(
        NodeConfig(ssl_certfile=cert, ssl_keyfile=key), ModelSource.open(make_checkpoint("llama-gqa"))
    )
    server = await serve(
        make_app(ScriptedEngine([5]), tokenizer, ApiOptions((MODEL,))), bind("127.0.0.1", 0), tls=settings.tls
    )
    try:
        trusting = ssl.create_default_context(cafile=authority.file)
        async with aiohttp.ClientSession() as http:
            url = f"https://127.0.0.1:{server.port}/v1/completions"
            async with http.post(url, json=ASK, ssl=trusting) as response:
                assert (await response.json())["usage"]["completion_tokens"] == 1
    finally:
        await server.close(grace=0)
    with pytest.raises(ConfigError, match=r"--ssl-certfile \S+, --ssl-keyfile \S+: not a certificate chain"):
        ApiSettings.make(NodeConfig(ssl_certfile=key), ModelSource.open(make_checkpoint("llama-gqa")))


def test_a_chat_template_of_the_operators_own(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}({{ m['content'] }}){% endfor %}")
    settings = ApiSettings.make(NodeConfig(chat_template=path), ModelSource.open(make_checkpoint("llama-gqa")))
    assert settings.tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "(hi)"
    with pytest.raises(ConfigError, match="--chat-template"):
        ApiSettings.make(NodeConfig(chat_template=tmp_path / "none"), ModelSource.open(make_checkpoint("llama-gqa")))
