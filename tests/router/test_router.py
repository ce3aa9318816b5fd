"""The router in front of several scripted S-nodes: which one gets a request, what passes, and which request is sent
again."""

from __future__ import annotations

import asyncio
import contextlib

import openai
import orjson
import pytest
from aiohttp import web
from engines.api_client import MODEL
from engines.routed import dying, routed, scripted, served, url_of
from engines.scripted_engine import ScriptedEngine

from fastdecode.api.app import API_PATHS, ApiOptions
from fastdecode.api.app import make_app as s_node_app
from fastdecode.api.page import is_page
from fastdecode.daemon.discovery import FileSet, FixedSet
from fastdecode.engine.state.request import GenerationFailed, Overloaded
from fastdecode.router.pool import BLOCK_BYTES, Pool, SNode, prefix_keys

ASK = {"model": MODEL, "prompt": "x"}


# ---- which S-node ----


@pytest.mark.quick
def test_a_request_follows_its_prefix_unless_that_s_node_is_much_busier():
    pool = Pool(FixedSet(()), None)
    pool.s_nodes = [SNode(f"http://s{i}", healthy=True) for i in range(3)]
    keys = prefix_keys(b"a" * 5 * BLOCK_BYTES)
    first = pool.choose(keys)
    assert all(pool.choose(keys) is first for _ in range(5))
    assert pool.choose(prefix_keys(b"a" * 3 * BLOCK_BYTES + b"b" * BLOCK_BYTES)) is first
    first.requests = 5
    second = pool.choose(keys)
    assert second is not first
    first.requests = 0
    assert {pool.choose([]) for _ in range(3)} == set(pool.s_nodes)  # without a prefix they take turns
    first.healthy = False
    assert pool.choose(keys) is second
    assert pool.choose(keys, tried=[second]) not in (first, second)
    for s_node in pool.s_nodes:
        s_node.healthy = False
    assert pool.choose(keys) is None


@pytest.mark.quick
def test_only_whole_blocks_count():
    assert prefix_keys(b"a" * (BLOCK_BYTES - 1)) == []
    one, two = prefix_keys(b"a" * BLOCK_BYTES), prefix_keys(b"a" * 2 * BLOCK_BYTES + b"b")
    assert len(two) == 2 and two[:1] == one


# ---- what passes ----


async def test_a_stream_passes_byte_for_byte(tokenizer, spell):
    script = [*spell("héllo, wörld" * 5)]
    async with served(ScriptedEngine(script, script), tokenizer) as client, routed(url_of(client)) as (_, http, _):
        bodies = []
        for session in (client.http, http):
            async with session.post("/v1/completions", json=ASK | {"stream": True}) as answer:
                assert answer.content_type == "text/event-stream"
                lines = (await answer.read()).decode().splitlines()
                bodies.append([line for line in lines if line.startswith("data: [") or '"text"' in line])
        texts = [[orjson.loads(b[6:])["choices"][0] for b in body if "[DONE]" not in b] for body in bodies]
        assert texts[0] == texts[1] != [] and bodies[0][-1] == bodies[1][-1] == "data: [DONE]"


async def test_errors_of_the_client_pass_and_are_not_retried(tokenizer):
    async with (
        served(ScriptedEngine(), tokenizer) as one,
        served(ScriptedEngine(), tokenizer) as two,
        routed(url_of(one), url_of(two)) as (api, http, _),
    ):
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await api.completions.create(**ASK, temperature=-1)
        async with http.get("/metrics") as answer:
            text = await answer.text()
        assert "fastdecode:router_retries_total 0.0" in text
        async with http.get("/v1/models") as answer:
            assert (await answer.json())["data"][0]["id"] == MODEL


OUTSIDE = [
    "/v1/../metrics",
    "/v1/%2e%2e/metrics",
    "/v1/.%2E/cluster",
    "/v1/%252e%252e/metrics",
    "/v1/models/..%2f..%2fmetrics",
    "/v1/models/..\\..\\metrics",
    "/v1/models/%5c..%5cmetrics",
    "/v1/./../metrics",
    "http://s-node/v1/../metrics",
]


@pytest.mark.parametrize(
    "path", [*OUTSIDE, "/v1/metrics", "/v1//../metrics", "/cluster", "//metrics", "/tokenize/../x"]
)
async def test_no_path_leads_out_of_the_api(path):
    seen = []

    async def answer(request):
        seen.append(request.raw_path)
        return web.json_response({"status": "ok", "running": 0, "waiting": 0})

    async with scripted(web.route("*", "/{path:.*}", answer)) as url, routed(url) as (api, _, _):
        reader, writer = await asyncio.open_connection(api.base_url.host, api.base_url.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answered = await reader.read()
        writer.close()
        assert answered.split()[1] in (b"400", b"404"), answered
        assert set(seen) <= {"/health"}, "nothing was forwarded"


async def test_a_model_s_name_passes_as_it_was_written(tokenizer):
    names = ("meta/a model", "org/b%2e")
    async with served(ScriptedEngine(), tokenizer, names=names) as client, routed(url_of(client)) as (api, _, _):
        for name in names:
            assert (await api.models.retrieve(name)).id == name


def test_the_router_forwards_every_path_of_the_api(tokenizer):
    others = {"/health", "/cluster", "/metrics", "/{path}"}  # reports, and the route of paths that there are not
    app = s_node_app(ScriptedEngine(), tokenizer, ApiOptions((MODEL,)))
    paths = {route.resource.canonical for route in app.router.routes()}
    forwarded = {path.replace("{name:.+}", "{name}") for path in API_PATHS}
    assert forwarded == {path for path in paths - others if not is_page(path)}


async def test_a_client_that_leaves_ends_its_request_at_the_s_node(tokenizer, spell):
    engine = ScriptedEngine([*spell("a"), asyncio.Event()])
    async with served(engine, tokenizer, remote=False) as client, routed(url_of(client)) as (_, http, pool):
        answer = await http.post("/v1/completions", json=ASK | {"stream": True})
        await answer.content.readline()
        answer.close()
        async with asyncio.timeout(60):
            await engine.streams[0].cancelled.wait()
            while pool.s_nodes[0].requests:
                await asyncio.sleep(0.01)


# ---- another S-node, before the first token only ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", ["overloaded", "failed"])
async def test_another_s_node_is_tried_before_the_first_token(tokenizer, spell, stream, first):
    bad = ScriptedEngine(refusal=Overloaded("full", 1)) if first == "overloaded" else None
    bad = bad or ScriptedEngine([GenerationFailed("R-node lost")])
    async with (
        served(bad, tokenizer) as one,
        served(ScriptedEngine(spell("ok")), tokenizer) as two,
        routed(url_of(one), url_of(two)) as (api, http, pool),
    ):
        pool.s_nodes[1].requests = 9
        answer = await api.completions.create(**ASK, stream=stream)
        text = "".join([c.choices[0].text async for c in answer]) if stream else answer.choices[0].text
        assert text == "ok"
        async with http.get("/metrics") as answer:
            assert "fastdecode:router_retries_total 1.0" in await answer.text()


async def test_a_stream_that_breaks_before_its_first_token_goes_on_elsewhere(tokenizer, spell):
    async with (
        dying(b": keep-alive\n\n") as bad,
        served(ScriptedEngine(*[spell("ok")] * 2), tokenizer) as good,
        routed(bad, url_of(good)) as (api, _, _),
    ):
        for _ in range(2):
            stream = await api.completions.create(**ASK, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "ok"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_that_breaks_later_ends_in_an_error_event(path):
    event = b'data: {"choices": [{"text": "half"}]}\n\n'
    async with dying(event, b'data: {"choi') as bad, routed(bad) as (_, http, pool):
        async with http.post(path, json=ASK | {"stream": True}) as answer:
            body = await answer.read()
        assert body.startswith(event) and b'data: {"choi' + b"\n" not in body
        *_, last = [orjson.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: ")]
        error = last if path.endswith("responses") else last["error"]
        assert error["code"] == "s_node_lost" and "was lost" in error["message"]
        assert (b"event: error" in body) == (last.get("type") == "error") == (path != "/v1/completions")
        assert b"[DONE]" not in body and not pool.s_nodes[0].healthy


async def test_the_last_error_passes_if_no_s_node_can_take_the_request(tokenizer):
    engines = [ScriptedEngine(refusal=Overloaded("full", 7)) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(engine, tokenizer)) for engine in engines]
        api, http, _ = await stack.enter_async_context(routed(*map(url_of, clients)))
        with pytest.raises(openai.RateLimitError) as caught:
            await api.completions.create(**ASK)
        assert caught.value.response.headers["Retry-After"] == "7"
        for client in clients:
            await client.server.close(grace=0)
        with pytest.raises(openai.InternalServerError) as caught:
            await api.completions.create(**ASK)
        assert caught.value.code == "no_s_node"
        async with http.get("/health") as answer:
            assert answer.status == 503 and not any(s["healthy"] for s in (await answer.json())["s_nodes"])


async def test_s_nodes_join_and_leave_a_file(tokenizer, spell, tmp_path):
    engines = [ScriptedEngine(*[spell(name)] * 3) for name in "ab"]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(engine, tokenizer)) for engine in engines]
        listed = tmp_path / "s-nodes"
        nodes = FileSet(listed, ("http",))
        api, _, pool = await stack.enter_async_context(routed(nodes=nodes))
        for client, name in zip(clients, "ab", strict=True):
            listed.write_text(f"{url_of(client)}\n")
            async with asyncio.timeout(60):
                while [s.url for s in pool.s_nodes if s.healthy] != [url_of(client)]:
                    await asyncio.sleep(0.01)
            assert (await api.completions.create(**ASK)).choices[0].text == name
