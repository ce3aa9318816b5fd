"""Streams that a router continues at another S-node: scripted S-nodes, and real ones that are killed and drained."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import threading

import openai
import orjson
import pytest
from engines import api_client
from engines.api_client import MODEL
from engines.real_engine import real_engine
from engines.routed import SECRET, dying, routed, served, url_of
from engines.scripted_engine import ScriptedEngine
from models.checkpoints import make_checkpoint
from nodes.node_process import complete, fetch
from openai import OpenAI

from fastdecode.api.continuation import FIELD, HEADER, MARK, is_from_router, mark, router_proof
from fastdecode.daemon.discovery import FixedSet
from fastdecode.daemon.rnode import RNode
from fastdecode.engine.state.request import GenerationFailed

ASK = {"model": MODEL, "prompt": "x"}


HEAD = {"id": "cmpl-1", "created": 1700000000, "seed": 5}


def completion(text):
    """An event of a stream, as an S-node sends it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    head = {"id": "cmpl-1", "created": 1700000000, "model": MODEL}
    return b"data: " + orjson.dumps(head | {"object": "text_completion", "choices": [choice]}) + b"\n\n"


async def test_a_broken_stream_goes_on_from_the_tokens_that_the_client_has(tokenizer, spell):
    """The last event has no mark behind it, and a half of a character is held back."""
    script = spell("héllo, wörld")
    parts = [mark(HEAD), completion("h"), mark(script[:1]), mark(script[1:2]), completion("é"), b": fd [1"]
    engine = ScriptedEngine(script[2:])
    async with dying(*parts) as bad, served(engine, tokenizer) as good, routed(bad, url_of(good)) as (_, http, pool):
        pool.s_nodes[1].requests = 9
        async with http.post("/v1/completions", json=ASK | {"stream": True, "max_tokens": 99}) as answer:
            body = await answer.text()
        *events, last = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
        assert last == "[DONE]" and ": fd" not in body
        chunks = [orjson.loads(event) for event in events]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "héllo, wörld"
        assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {("cmpl-1", 1700000000)}
        assert engine.generated == [script[:2]]
        assert engine.params[0].seed == 5
        async with http.get("/metrics") as answer:
            assert "fastdecode:router_continued_streams_total 1.0" in await answer.text()


async def test_a_stream_that_broke_behind_its_last_token_ends_as_it_would_have(tokenizer, spell):
    script = spell("ab")
    parts = [mark(HEAD), completion("a"), mark(script[:1]), completion("b"), mark([script[1], "length"]), b"data: [D"]
    engine = ScriptedEngine(spell("zz"))
    async with dying(*parts) as bad, served(engine, tokenizer) as good, routed(bad, url_of(good)) as (_, http, pool):
        pool.s_nodes[1].requests = 9
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with http.post("/v1/completions", json=ASK | options) as answer:
            body = await answer.text()
        usage = orjson.loads(body.split("data: ")[-2])["usage"]
        assert usage["completion_tokens"] == 2 and body.endswith("data: [DONE]\n\n")
        assert engine.generated == []


async def test_streams_leave_an_s_node_that_is_about_to_end(tokenizer, spell, caplog):
    """Chats, among them one that ends by a stop string which the first S-node has begun."""
    caplog.set_level(logging.INFO, "fastdecode.api.access")
    script, waits = spell("one two three"), asyncio.Event()
    first = ScriptedEngine(*[[*script[:6], waits]] * 2)
    second = ScriptedEngine(*[script[6:]] * 2)
    async with contextlib.AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(served(engine, tokenizer)) for engine in (first, second)]
        async with routed(url_of(one), url_of(two)) as (api, _, pool):
            pool.s_nodes[1].requests = 9
            ask = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
            streams = [await api.chat.completions.create(**ask, stop=stop) for stop in (None, "wo th")]
            heads = [[await anext(stream), await anext(stream)] for stream in streams]
            async with asyncio.timeout(60):
                while not pool.s_nodes[1].healthy or sum(len(s._acts) for s in first.streams):
                    await asyncio.sleep(0.01)
            closing = asyncio.create_task(one.server.close(grace=60))
            texts = []
            for head, stream in zip(heads, streams, strict=True):
                chunks = [*head, *[chunk async for chunk in stream]]
                texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
                assert [bool(chunk.choices[0].delta.role) for chunk in chunks].count(True) == 1
            assert texts == ["one two three", "one t"]
            await closing  # nobody is left there
            assert second.generated == [script[:6]] * 2
    lines = [line for record in caplog.records if "id" in (line := getattr(record, "fields", {}))]
    assert {line["status"] for line in lines} == {200}
    assert [line.get("handed_over", False) for line in lines].count(True) == 2


async def test_choices_of_one_prompt_leave_an_s_node_each_where_it_is(tokenizer, spell):
    """Of three choices one has ended, one has begun, and one has no token yet."""
    waits = asyncio.Event()
    texts = ["ab", "one two three", "zebra"]
    first = ScriptedEngine(spell("ab"), [*spell("one tw"), waits], [waits])
    second = ScriptedEngine(spell("one two three")[6:], spell("zebra"))
    async with contextlib.AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(served(engine, tokenizer)) for engine in (first, second)]
        api, _, pool = await stack.enter_async_context(routed(url_of(one), url_of(two)))
        pool.s_nodes[1].requests = 9
        stream = await api.completions.create(**ASK | {"n": 3, "max_tokens": 99}, stream=True)
        got = ["", "", ""]
        while got[0] != "ab" or got[1] != "one tw":
            choice = (await anext(stream)).choices[0]
            got[choice.index] += choice.text
        closing = asyncio.create_task(one.server.close(grace=60))
        reasons = []
        async for chunk in stream:
            choice = chunk.choices[0]
            got[choice.index] += choice.text
            if choice.finish_reason:
                reasons.append((choice.index, choice.finish_reason))
        await closing
        assert got == texts and sorted(reasons)[-2:] == [(1, "length"), (2, "length")]
        assert second.generated == [spell("one tw"), []]
        assert second.params[0].seed == first.params[1].seed and second.params[1].seed == first.params[2].seed


def numbered(events):
    """The types of a response's events, which must be numbered from 0 on."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return [event.type.removeprefix("response.") for event in events]


@pytest.mark.parametrize("n_seen", [0, 1, 5], ids=lambda n: f"after {n} tokens")
async def test_a_response_goes_on_at_another_s_node_with_the_same_ids_and_numbers(tokenizer, spell, n_seen):
    script, waits = spell("one two"), asyncio.Event()
    first, second = ScriptedEngine([*script[:n_seen], waits]), ScriptedEngine(script[n_seen:])
    undisturbed = ScriptedEngine(script)
    async with contextlib.AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(served(engine, tokenizer)) for engine in (first, second)]
        alone, _, _ = await stack.enter_async_context(
            routed(url_of(await stack.enter_async_context(served(undisturbed, tokenizer))))
        )
        api, _, pool = await stack.enter_async_context(routed(url_of(one), url_of(two)))
        pool.s_nodes[1].requests = 9
        ask = {"model": MODEL, "input": "x", "stream": True, "max_output_tokens": 99}
        expected = [event async for event in await alone.responses.create(**ask)]
        stream = await api.responses.create(**ask)
        events = [await anext(stream) for _ in range(2)]
        while sum(event.type == "response.output_text.delta" for event in events) < n_seen:
            events.append(await anext(stream))
        closing = asyncio.create_task(one.server.close(grace=60))
        events += [event async for event in stream]
        await closing
        assert numbered(events) == numbered(expected)
        assert second.generated == [script[:n_seen]]
        last = events[-1].response
        assert last.output_text == "one two" and last.id == events[0].response.id
        named = {event.item_id for event in events if hasattr(event, "item_id")}
        assert named == {last.output[0].id}


@pytest.mark.parametrize("n_seen", [0, 1, 5], ids=lambda n: f"after {n} tokens")
@pytest.mark.parametrize("fails", [False, True], ids=["leaves", "fails"])
async def test_a_message_goes_on_at_another_s_node(tokenizer, spell, n_seen, fails):
    """Anthropic's API."""
    script, waits = spell("one two"), asyncio.Event()
    end = GenerationFailed("lost") if fails else waits
    first, second = ScriptedEngine([*script[:n_seen], end]), ScriptedEngine(script[n_seen:])
    async with contextlib.AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(served(engine, tokenizer)) for engine in (first, second)]
        alone = await stack.enter_async_context(served(ScriptedEngine(script), tokenizer))
        _, http, pool = await stack.enter_async_context(routed(url_of(one), url_of(two)))
        pool.s_nodes[1].requests = 9
        message = {"role": "user", "content": "x"}
        ask = {"model": MODEL, "messages": [message], "stream": True, "max_tokens": 99}
        async with alone.http.post("/v1/messages", json=ask) as answer:
            expected = await answer.text()
        async with http.post("/v1/messages", json=ask) as answer:
            got = b""
            while got.count(b"text_delta") < n_seen or b"message_start" not in got:
                got += await answer.content.readany()
            closing = asyncio.create_task(one.server.close(grace=60))
            got += await answer.read()
        await closing
        ids = [re.search(r"msg_\w+", text)[0] for text in (got.decode(), expected)]
        assert got.decode() == expected.replace(ids[1], ids[0])
        assert second.generated == [script[:n_seen]]


@pytest.mark.parametrize("n_prompt", [5, 300])
async def test_streams_take_their_k_and_v_along(tokenizer, tmp_path, n_prompt):
    """Real engines with one R-node. Without a prefix cache, the first one frees a stream as soon as the router closes
    it."""
    ask = ASK | {"prompt": [(7 * i * i + i) % 380 + 3 for i in range(n_prompt)], "max_tokens": 99, "temperature": 0}
    async with contextlib.AsyncExitStack() as stack:
        node = RNode(threads=1, kv_bytes=1 << 24)
        stack.push_async_callback(node.close)
        [url] = await node.serve([f"shm://{tmp_path}/r.sock"], None)
        made = [real_engine(make_checkpoint("llama-gqa"), tmp_path, r_nodes=[url], kv_digest="ab" * 32) for _ in "ab"]
        engines = [await stack.enter_async_context(engine) for engine in made]
        clients = [await stack.enter_async_context(served(engine, tokenizer)) for engine in engines]
        api, _, pool = await stack.enter_async_context(routed(*map(url_of, clients)))
        pool.s_nodes[1].requests = 9
        undisturbed = await api.completions.create(**ask, extra_body={"ignore_eos": True})
        stream = await api.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
        text = (await anext(stream)).choices[0].text
        closing = asyncio.create_task(clients[0].server.close(grace=60))
        text += "".join([chunk.choices[0].text async for chunk in stream])
        await closing
        assert text == undisturbed.choices[0].text
        totals = engines[1].stats.totals
        assert (totals.adopted, totals.not_adopted, totals.recomputed) == (1, 0, 0)


@contextlib.asynccontextmanager
async def behind_a_failure(tokenizer, script):
    """A client of two S-nodes, of which the first one loses its R-node after three tokens of `script`."""
    first = ScriptedEngine([*script[:3], GenerationFailed("R-node lost")])
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(e, tokenizer)) for e in (first, ScriptedEngine(script[3:]))]
        api, _, pool = await stack.enter_async_context(routed(*map(url_of, clients)))
        pool.s_nodes[1].requests = 9
        yield api


async def test_a_stream_leaves_an_s_node_that_has_lost_its_engine_or_its_r_nodes(tokenizer, spell):
    async with behind_a_failure(tokenizer, spell("one two")) as api:
        stream = await api.completions.create(**ASK, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "one two"


async def test_a_response_leaves_an_s_node_that_has_lost_its_engine_or_its_r_nodes(tokenizer, spell):
    async with behind_a_failure(tokenizer, spell("one two")) as api:
        events = [event async for event in await api.responses.create(model=MODEL, input="x", stream=True)]
        numbered(events)
        assert events[-1].response.output_text == "one two"


async def test_a_request_that_fails_everywhere_ends_with_an_error(tokenizer, spell):
    engines = [
        ScriptedEngine(*[[*spell("a"), GenerationFailed("poison")], *[[GenerationFailed("poison")]] * 5][i:])
        for i in (0, 1)
    ]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(e, tokenizer)) for e in engines]
        api, _, pool = await stack.enter_async_context(routed(*map(url_of, clients), continue_seconds=0.0))
        pool.s_nodes[1].requests = 9
        with pytest.raises(openai.APIError) as caught:
            async for _ in await api.completions.create(**ASK, stream=True):
                pass
        assert caught.value.code == "s_node_lost"


@pytest.mark.quick
@pytest.mark.parametrize(
    "wrong",
    [
        5,
        {},
        HEAD | {"begun": True, "choices": [[[-1], None]]},
        HEAD | {"begun": True, "choices": [[["a"], None]]},
        HEAD | {"begun": True, "choices": [[[1], "why"]]},
        HEAD | {"begun": True, "choices": [[[1] * 5000, None]]},
        HEAD | {"begun": True, "choices": [[[1], None]] * 2},
        HEAD | {"begun": True, "choices": [[1]]},
        HEAD | {"begun": True, "choices": [[[1], None]], "order": [[1, 1]]},
        HEAD | {"begun": 1, "choices": []},
        HEAD | {"begun": True, "choices": [[[1], None]], "key": "k" * 64},
        HEAD | {"begun": True, "choices": [[[1], None]], "key": "0a" * 31},
    ],
)
async def test_what_cannot_be_continued_is_refused(tokenizer, spell, wrong):
    async with served(ScriptedEngine(spell("x")), tokenizer, remote=False) as client:
        for fields in ({"stream": True}, {}):
            body = orjson.dumps(ASK | fields | {FIELD: wrong})
            headers = {HEADER: router_proof(SECRET, body), "Content-Type": "application/json"}
            async with client.http.post("/v1/completions", data=body, headers=headers) as answer:
                assert answer.status == 400 and FIELD in (await answer.json())["error"]["message"]


PAST = HEAD | {"begun": True, "choices": [[[1], None]]}


@pytest.mark.parametrize(
    "by", ["a client", "a router of another secret", "an S-node without a secret", "a changed body"]
)
async def test_only_a_router_that_proves_the_secret_has_marks_and_continues_streams(tokenizer, spell, by):
    body = orjson.dumps(ASK | {"stream": True})
    headers = {"Content-Type": "application/json"}
    match by:
        case "a router of another secret":
            headers[HEADER] = router_proof(b"x" * 16, body)
        case "an S-node without a secret" | "a changed body":
            headers[HEADER] = router_proof(SECRET, body)
    secret = None if by == "an S-node without a secret" else SECRET
    async with api_client.served(ScriptedEngine(spell("x")), tokenizer, router_secret=secret) as client:
        forged = orjson.dumps(ASK | {"stream": True, FIELD: PAST})
        async with client.http.post("/v1/completions", data=forged, headers=headers) as answer:
            assert answer.status == 400 and FIELD in (await answer.json())["error"]["message"]
        if by != "a changed body":
            async with client.http.post("/v1/completions", data=body, headers=headers) as answer:
                assert answer.status == 200 and MARK not in await answer.read()


def test_a_proof_that_is_no_text_is_wrong():
    """aiohttp gives the byte 255 of a header as half a surrogate pair."""
    assert not is_from_router(SECRET, {HEADER: "\udcff"}, b"")
    assert is_from_router(SECRET, {HEADER: router_proof(SECRET, b"")}, b"")


async def test_an_s_node_that_answers_routers_only(tokenizer, spell):
    """A request with the router's proof is answered, one with any other proof or none gets 403 in OpenAI's form."""
    closed = functools.partial(served, ScriptedEngine(spell("x"), spell("x")), tokenizer, router_only=True)
    async with closed() as client, routed(url_of(client)) as (api, _, _):
        assert (await api.completions.create(**ASK, max_tokens=1)).choices[0].text == "x"
        assert [model.id async for model in api.models.list()] == [MODEL]
        with pytest.raises(openai.PermissionDeniedError) as caught:
            await client.openai.completions.create(**ASK)
        assert caught.value.code == "not_from_router"
        for path, body in (("/metrics", b""), ("/cluster", b""), ("/", b""), ("/nothing", b"")):
            for headers in ({}, {HEADER: router_proof(b"y" * 16, body)}, {HEADER: router_proof(SECRET, b"other")}):
                async with client.http.get(path, headers=headers) as answer:
                    assert answer.status == 403
        async with client.http.get("/health") as answer:
            assert answer.status == 200
        async with client.http.get("/metrics", headers={HEADER: router_proof(SECRET, b"")}) as answer:
            assert answer.status == 200
    async with closed(api_keys=["k"], key="k") as client, routed(url_of(client)) as (api, _, _):
        assert await client.openai.completions.create(**ASK, max_tokens=1)
        with pytest.raises(openai.AuthenticationError):  # the router's proof stands for no client's key
            await api.completions.create(**ASK)


@pytest.mark.parametrize("secret", [b"z" * 16, None])
async def test_a_router_says_of_each_s_node_whether_their_secrets_agree(tokenizer, spell, caplog, secret):
    """An S-node that answers routers only gets no request of a router with another secret, and /health says why. One
    that answers anybody gets requests, and the log says that its streams end if it is lost."""
    closed = served(ScriptedEngine(), tokenizer, router_only=True)
    async with closed as shut, served(ScriptedEngine(spell("x")), tokenizer) as client:
        urls = url_of(shut), url_of(client)
        async with routed(nodes=FixedSet(urls), secret=secret) as (api, http, pool):
            async with asyncio.timeout(60):
                while any(s_node.why_not == "it has not been asked yet" for s_node in pool.s_nodes):
                    await asyncio.sleep(0.01)
            async with http.get("/health") as answer:
                refused, taken = (await answer.json())["s_nodes"]
            assert (refused["healthy"], taken["healthy"], taken["trusting"]) == (False, True, False)
            assert refused["why_not"] == "answers only routers that prove its secret (--secret-file)"
            assert (await api.completions.create(**ASK, max_tokens=1)).choices[0].text == "x"
        warning = f"S-node {url_of(client)} lacks this router's secret: its streams end if it is lost"
        assert (warning in caplog.messages) == (secret is not None)
        async with routed(*urls) as (_, http, _), http.get("/health") as answer:
            assert all(s_node["trusting"] for s_node in (await answer.json())["s_nodes"])


async def test_a_client_s_own_header_does_not_reach_the_s_node(tokenizer, spell):
    async with (
        served(ScriptedEngine(spell("x")), tokenizer) as client,
        routed(url_of(client), secret=None) as (_, http, _),
    ):
        body = orjson.dumps(ASK | {"stream": True})
        headers = {HEADER: router_proof(SECRET, body), "Content-Type": "application/json"}
        async with http.post("/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 200 and MARK not in await answer.read()


def test_s_nodes_are_killed_and_drained_behind_the_router(start, tmp_path):
    # A sequence that is recomputed attends to K and V as computed, so a rounded cache might change its tokens.
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    shared = ("--secret-file", str(secret))
    options = ("--kv-memory", "64MiB", "--threads", "1", "--dtype", "fp32", "--kv-dtype", "fp32", *shared)
    s_nodes = [start("--port", "0", *options, own_group=True) for _ in range(2)]
    urls = [s_node.wait_for(r"(http://127\.0\.0\.1:\d+)/v1")[1] for s_node in s_nodes]
    router = start("--port", "0", *(word for url in urls for word in ("--s-node", url)), *shared, program="router")
    router.wait_for(r"takes requests(?s:.)*takes requests")
    with OpenAI(base_url=str(router.api().base_url), api_key="none", max_retries=0, timeout=60) as api:
        expected = complete(api, 40)

        def stream(temperature=0):
            return api.completions.create(
                model="fastdecode-demo", prompt="It was", max_tokens=900, temperature=temperature, seed=3, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip

        undisturbed, sampled = ("".join(chunk.choices[0].text for chunk in stream(t)) for t in (0, 1))
        streams = [stream(t) for t in (0, 0, 1, 1)]
        heads = [next(iter(s)).choices[0].text for s in streams]
        s_nodes[0].kill_group()
        ended = [head + "".join(c.choices[0].text for c in s) for head, s in zip(heads, streams, strict=True)]
        assert ended == [undisturbed] * 2 + [sampled] * 2
        metrics = fetch(f"{str(api.base_url).removesuffix('/v1/')}/metrics")
        assert float(re.search(r"(?m)^fastdecode:router_continued_streams_total (\S+)", metrics)[1]) >= 1
        assert [complete(api, 40) for _ in range(4)] == [expected] * 4
        third = start("--port", urls[0].rpartition(":")[2], *options)
        third.wait_for("Try:")
        router.wait_for(r"(?s)(takes requests.*){3}")
        kept = stream()
        tokens = [next(iter(kept)) for _ in range(2)]
        ending = threading.Thread(target=s_nodes[1].end)
        ending.start()
        assert [complete(api, 40) for _ in range(6)] == [expected] * 6
        tokens += kept
        ending.join()
        assert "".join(chunk.choices[0].text for chunk in tokens) == undisturbed
    assert orjson.loads(fetch(f"{str(router.api().base_url).removesuffix('/v1/')}/health"))["status"] == "ok"
    assert router.end() == 0
