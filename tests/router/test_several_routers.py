"""Several routers in front of the same S-nodes: a stream that was lost with one is read on through another one."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import aiohttp
import openai
import orjson
import pytest
from engines.api_client import MODEL
from engines.event_source import EventSource
from engines.real_engine import real_engine
from engines.routed import SECRET, routed, served, url_of
from engines.scripted_engine import ScriptedEngine
from models.checkpoints import make_checkpoint
from nodes.many_streams import N_STREAMS
from openai import AsyncOpenAI

from fastdecode.api.continuation import FIELD, HEADER, router_proof
from fastdecode.text.tokenizer import Tokenizer

N = range(max(N_STREAMS, 16))
N_EVENTS = 10  # that every client has when its router is killed


CHAT = ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True})


def ask(i):
    return {"model": MODEL, "input": f"prompt {i}", "temperature": 0, "max_output_tokens": 60}


@pytest.fixture
async def two_s_nodes(tmp_path):
    """The URLs of two S-nodes with the same model."""
    checkpoint = make_checkpoint("llama-gqa")
    tokenizer = Tokenizer.from_dir(checkpoint)
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for name in "ab":
            (tmp_path / name).mkdir()
            made = real_engine(checkpoint, tmp_path / name, kv_bytes=1 << 26, max_batch_size=32)
            engine = await stack.enter_async_context(made)
            urls.append(url_of(await stack.enter_async_context(served(engine, tokenizer))))
        yield urls


@pytest.fixture
async def two_routers(two_s_nodes, tmp_path, start):
    """Two routers, each a process, and their URLs."""
    (tmp_path / "secret").write_bytes(SECRET)
    words = [word for url in two_s_nodes for word in ("--s-node", url)]
    options = ("--port", "0", *words, "--secret-file", str(tmp_path / "secret"))
    routers = [start(*options, program="router") for _ in range(2)]
    urls = []
    for router in routers:
        await asyncio.to_thread(router.wait_for, r"takes requests(?s:.)*takes requests")
        urls.append(router.wait_for(r"(http://127\.0\.0\.1:\d+)/v1")[1])
    return routers, urls


async def read(stream, events, most=None):
    """Append events of a stream until there are `most`. Ends quietly where the stream breaks."""
    with contextlib.suppress(openai.APIError, OSError):
        async for event in stream:
            if event.type == "error":
                return
            events.append(event)
            if len(events) == most:
                return


async def until_begun(events):
    async with asyncio.timeout(120):
        while min(map(len, events)) < N_EVENTS:
            await asyncio.sleep(0.01)


async def test_responses_of_a_killed_router_go_on_through_another(two_routers):
    routers, urls = two_routers
    first, second = [AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) for url in urls]
    calm = [response.output_text for response in await asyncio.gather(*(second.responses.create(**ask(i)) for i in N))]
    events = [[] for _ in N]
    asked = [first.responses.create(**ask(i), background=True, stream=True) for i in N]
    streams = zip(await asyncio.gather(*asked), events, strict=True)
    reading = [asyncio.create_task(read(stream, had)) for stream, had in streams]
    await until_begun(events)
    assert routers[0].end(signal.SIGKILL) == -signal.SIGKILL
    await asyncio.gather(*reading)
    assert any(had[-1].type != "response.incomplete" for had in events), "streams were broken"

    async def go_on(had):
        id, after = had[0].response.id, had[-1].sequence_number
        rest = await second.responses.retrieve(id, stream=True, starting_after=after)
        await read(rest, had)

    async with asyncio.timeout(120):
        await asyncio.gather(*[go_on(had) for had in events])
    for had, text in zip(events, calm, strict=True):
        assert [event.sequence_number for event in had] == list(range(len(had)))
        assert "".join(e.delta for e in had if e.type == "response.output_text.delta") == text
        assert had[-1].response.output_text == text
    for api in (first, second):
        await api.close()


@pytest.mark.parametrize(("path", "n"), [("/v1/chat/completions", 1), ("/v1/completions", 2)])
async def test_streams_of_a_killed_router_go_on_behind_their_last_event(two_routers, path, n):
    """Clients send the same request to the other router, with the id of the last event that they have."""
    routers, urls = two_routers
    ask = {"model": MODEL, "n": n, "seed": 1, "max_tokens": 60, "stream": True, "ignore_eos": True}

    def source(i):
        prompt = {"messages": [{"role": "user", "content": f"{i}"}]} if "chat" in path else {"prompt": f"prompt {i}"}
        return EventSource(path, ask | prompt)

    calm, sources = [source(i) for i in N], [source(i) for i in N]
    async with aiohttp.ClientSession(urls[0]) as first, aiohttp.ClientSession(urls[1]) as second:
        await asyncio.gather(*(one.read(second) for one in calm))
        reading = [asyncio.create_task(one.read(first)) for one in sources]
        await until_begun([one.data for one in sources])
        assert routers[0].end(signal.SIGKILL) == -signal.SIGKILL
        await asyncio.gather(*reading)
        assert any(one.data[-1] != "[DONE]" for one in sources), "streams were broken"
        async with asyncio.timeout(120):
            await asyncio.gather(*(one.read(second) for one in sources if one.data[-1] != "[DONE]"))
    for one, undisturbed in zip(sources, calm, strict=True):
        assert [number(id) for id in one.ids] == list(range(len(one.ids)))
        assert texts(one) == texts(undisturbed) and len({*texts(one).values()}) == n and one.data[-1] == "[DONE]"
        assert len({id.rpartition(":")[0] for id in one.ids}) == 1


def number(id):
    return int(id.rpartition(":")[2])


def texts(source):
    """The text of each choice."""
    texts = {}
    for choice in [orjson.loads(data)["choices"][0] for data in source.data if data != "[DONE]"]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


@pytest.mark.parametrize(("grace", "n"), [(20, 1), (0, 1), (20, 2)], ids=["drained", "closed", "two choices"])
async def test_a_stream_that_came_back_survives_its_s_node_too(tokenizer, grace, n):
    """The second router learns the stream's tokens from the S-node, and sends them with the request to another one."""
    stuck, scripts = asyncio.Event(), [[*range(20, 30)], [*range(40, 50)]][:n]
    engines = [
        ScriptedEngine(*([*script[:4], stuck] for script in scripts)),
        ScriptedEngine(*(script[4:] for script in scripts)),
    ]
    source = EventSource(CHAT[0], CHAT[1] | {"n": n})
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(engine, tokenizer, remote=False)) for engine in engines]
        async with routed(url_of(clients[0])) as (_, http, _):
            await source.read(http, 3)
        _, http, _ = await stack.enter_async_context(routed(*map(url_of, clients)))
        reading = asyncio.create_task(source.read(http))
        async with asyncio.timeout(30):
            while len(source.data) < 4 * n:
                await asyncio.sleep(0.01)
        closing = asyncio.create_task(clients[0].server.close(grace))
        async with asyncio.timeout(30):
            await reading
            await closing
        assert engines[1].generated == [script[:4] for script in scripts] and source.data[-1] == "[DONE]"
        assert [number(id) for id in source.ids] == list(range(len(source.ids)))
        assert texts(source) == {
            i: "".join(tokenizer.decode([token]) for token in script) for i, script in enumerate(scripts)
        }
        again = EventSource(source.path, source.body)
        again.last_id = source.ids[0]  # the other S-node has the events from before, too
        await again.read(http)
        assert again.data == source.data[1:] and again.ids == source.ids[1:]


async def test_a_client_may_have_more_than_its_router_knows(tokenizer):
    """The last token makes two events, its text and the reason of the end. The router has no mark behind the first."""
    script = [*range(20, 24)]
    async with served(ScriptedEngine(script, script[3:]), tokenizer) as client:
        calm = EventSource(*CHAT)
        await calm.read(client.http)
        resume = {"id": "chatcmpl-1", "created": 1700000000, "seed": 5, "begun": True, "choices": [[script[:3], None]]}
        body = orjson.dumps(CHAT[1] | {FIELD: resume})
        headers = {HEADER: router_proof(SECRET, body), "Content-Type": "application/json"}
        async with client.http.post(CHAT[0], data=body, headers=headers | {"Last-Event-ID": "chatcmpl-1:3"}) as answer:
            lines = (await answer.text()).splitlines()
    assert [line for line in lines if line.startswith("id: ")] == ["id: chatcmpl-1:4", "id: chatcmpl-1:5"]
    ends = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert [orjson.loads(end)["choices"] for end in ends[:1]] == [orjson.loads(calm.data[4])["choices"]]
    assert ends[1:] == calm.data[5:] == ["[DONE]"]


async def test_a_response_is_found_at_the_s_node_that_has_it(tokenizer):
    engines = [ScriptedEngine(*[[5, 6, 7]] * 2) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(engine, tokenizer)) for engine in engines]
        api, http, pool = await stack.enter_async_context(routed(*map(url_of, clients)))
        ids = []
        for i in range(4):
            pool.s_nodes[i % 2].requests, pool.s_nodes[1 - i % 2].requests = 0, 9
            ids.append((await api.responses.create(**ask(i), background=True)).id)
        assert all(engine.prompts for engine in engines), "both S-nodes have some"
        pool.suspect(pool.s_nodes[0], "drains")  # and goes on to show what it has
        for id in ids:
            assert (await api.responses.retrieve(id)).id == id
            await api.responses.delete(id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            await api.responses.retrieve(ids[0])
        async with http.get("/v1/responses/resp_1/input_items") as answer:
            assert answer.status == 404


async def test_a_response_that_went_to_another_s_node_has_all_of_its_events_there(tokenizer):
    stuck, script = asyncio.Event(), [*range(20, 30)]
    engines = [ScriptedEngine([*script[:4], stuck]), ScriptedEngine(script[4:])]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(engine, tokenizer, remote=False)) for engine in engines]
        api, http, pool = await stack.enter_async_context(routed(*map(url_of, clients)))
        pool.s_nodes[1].requests = 9
        had = []
        stream = await api.responses.create(**ask(0), background=True, stream=True)
        reading = asyncio.create_task(read(stream, had))
        async with asyncio.timeout(30):
            while sum(event.type == "response.output_text.delta" for event in had) < 4:
                await asyncio.sleep(0.01)
            while not pool.s_nodes[1].healthy:
                await asyncio.sleep(0.01)
            closing = asyncio.create_task(clients[0].server.drain(20))
            await reading
            await closing
        assert [event.sequence_number for event in had] == list(range(len(had)))
        assert engines[1].generated == [script[:4]]
        async with http.get(f"/v1/responses/{had[0].response.id}?stream=true") as answer:
            lines = [line for line in (await answer.text()).splitlines() if line.startswith("data: ")]
        again = [orjson.loads(line[6:]) for line in lines]
        assert [event["type"] for event in again] == [event.type for event in had]
        assert again[-1]["response"]["output"] == had[-1].response.to_dict()["output"]
