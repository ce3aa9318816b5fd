"""Streams that go on behind the Last-Event-ID of a client that has lost its connection."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from engines.api_client import MODEL, served
from engines.event_source import EventSource
from engines.scripted_engine import ScriptedEngine

from fastdecode.engine.state.request import TokenEvent

CHAT = ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "one two"}]})
COMPLETION = ("/v1/completions", {"model": MODEL, "prompt": "one two"})
RESPONSE = ("/v1/responses", {"model": MODEL, "input": "one two"})
MESSAGE = ("/v1/messages", {"model": MODEL, "messages": [{"role": "user", "content": "one two"}]})
LENGTH = {"/v1/responses": "max_output_tokens"}


def ask(endpoint, **fields):
    path, body = endpoint
    return path, body | {LENGTH.get(path, "max_tokens"): 40, "temperature": 0, "stream": True} | fields


def numbered(source):
    """Whether the ids are those of one stream, from its first event on, in order."""
    names = {id.rpartition(":")[0] for id in source.ids}
    return len(names) == 1 and [int(id.rpartition(":")[2]) for id in source.ids] == list(range(len(source.ids)))


def without_heads(data):
    """Events without what differs between two requests: ids and times."""
    parsed = [orjson.loads(event) for event in data if event != "[DONE]"]
    for event in parsed:
        for name in ("id", "created", "item_id", "created_at"):
            event.pop(name, None)
        for name in ("response", "message", "item"):
            if name in event:
                event[name] = {k: v for k, v in event[name].items() if k in ("status", "role", "type")}
    return parsed


@pytest.fixture
async def waiting(tokenizer, request):
    """A client of an engine that gives two tokens, waits, and gives two more; the engine; and the event. The parameter
    is how long a stream waits for its client."""
    go_on = asyncio.Event()
    engine = ScriptedEngine(*[[5, 6, go_on, 7, 8]] * 3)
    async with served(engine, tokenizer, remote=False, resume_seconds=getattr(request, "param", 60.0)) as client:
        yield client, engine, go_on


async def begun(source, http, n=2):
    """Read `n` events, and lose the connection."""
    await source.read(http, n)
    assert source.status == 200 and len(source.data) == n
    return source


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION, RESPONSE, MESSAGE], ids=lambda endpoint: endpoint[0])
async def test_a_client_that_comes_back_misses_nothing_and_gets_nothing_twice(client, endpoint):
    path, body = ask(endpoint)
    calm, source = EventSource(path, body), EventSource(path, body)
    await calm.read(client.http)
    for most in (1, 3, 4, 17, None):
        await source.read(client.http, most)
    assert without_heads(source.data) == without_heads(calm.data)
    assert (source.data[-1] == "[DONE]") == (calm.data[-1] == "[DONE]")
    assert numbered(source) and numbered(calm)
    await source.read(client.http)
    assert source.status == 204  # the client has the last event


async def test_openai_s_client_reads_a_stream_with_ids_and_comments(tokenizer):
    go_on = asyncio.Event()
    async with served(ScriptedEngine([5, 6, go_on, 7]), tokenizer, remote=False, keep_alive_seconds=0.1) as client:
        _, body = ask(CHAT)
        stream = await client.openai.chat.completions.create(**body, extra_headers={"Last-Event-ID": ""})
        chunks = [await anext(stream), await anext(stream)]
        await asyncio.sleep(0.5)  # comments come
        go_on.set()
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "length" and len(chunks) == 4


async def test_without_the_header_events_have_no_ids_and_a_client_that_leaves_ends_its_request(waiting):
    client, engine, _ = waiting
    path, body = ask(CHAT)
    async with client.http.post(path, json=body) as answer:
        assert (await answer.content.readline()).startswith(b"data: ")
    async with asyncio.timeout(60):
        await engine.streams[0].cancelled.wait()


@pytest.mark.parametrize("waiting", [1.0], indirect=True)
async def test_a_stream_waits_for_its_client_for_a_time(waiting):
    client, engine, _ = waiting
    source = await begun(EventSource(*ask(COMPLETION)), client.http)
    assert not engine.streams[0].cancelled.is_set()
    async with asyncio.timeout(60):
        await engine.streams[0].cancelled.wait()
    await source.read(client.http)
    assert source.status == 404 and "--resume-seconds" in source.error


async def test_what_a_client_has_not_read_is_sent_again(waiting):
    """The connection is lost before a single event is read, and the stream ends meanwhile."""
    client, engine, go_on = waiting
    source = await begun(EventSource(*ask(COMPLETION)), client.http, 1)
    go_on.set()
    async with asyncio.timeout(60):
        while not engine.streams[0].ended:
            await asyncio.sleep(0.01)
    await source.read(client.http)
    assert numbered(source) and source.data[-1] == "[DONE]" and len(source.data) == 5


@pytest.mark.parametrize("given", ["x", "x:", ":3", "a b:3", "x:-1", "x:1.5", "x:" + "9" * 16, "y" * 81 + ":1", "²:²"])
async def test_what_is_no_id_of_an_event_is_refused(waiting, given):
    client, _, _ = waiting
    path, body = ask(COMPLETION)
    async with client.http.post(path, json=body, headers={"Last-Event-ID": given}) as answer:
        assert answer.status == 400 and (await answer.json())["error"]["code"] == "invalid_last_event_id"


async def test_a_forged_id_of_an_event_finds_nothing(waiting):
    client, engine, _ = waiting
    source = await begun(EventSource(*ask(COMPLETION)), client.http)
    name = source.last_id.rpartition(":")[0]
    for forged in ("cmpl-0:0", f"{name}:99", f"{name[:-1]}:0"):
        source.last_id = forged
        await source.read(client.http)
        assert source.status == 404 and "event_not_found" in source.error
    for path, fields in ((source.path, {"max_tokens": 7}), (CHAT[0], {})):
        other = EventSource(path, source.body | fields)
        if path == CHAT[0]:
            other.body = ask(CHAT)[1]
        other.last_id = f"{name}:0"
        await other.read(client.http)
        assert other.status == 400 and "event_of_another_request" in other.error
    assert len(engine.streams) == 1, "nothing was generated"
    async with client.http.get(f"/v1/responses/{name}") as answer:
        assert answer.status == 404


async def test_a_stream_belongs_to_the_key_that_began_it(tokenizer):
    go_on = asyncio.Event()
    engine = ScriptedEngine([5, 6, go_on, 7])
    async with served(engine, tokenizer, key="one", api_keys=["one", "two"], remote=False) as client:
        source = await begun(EventSource(*ask(COMPLETION)), client.http)
        other = EventSource(source.path, source.body, {"Authorization": "Bearer two"})
        unknown = EventSource(source.path, source.body, {"Authorization": "Bearer two"})
        other.last_id, unknown.last_id = source.last_id, "cmpl-0:1"
        for thief in (other, unknown):
            await thief.read(client.http)
            assert thief.status == 404 and not thief.data
        assert other.error == unknown.error.replace("'cmpl-0'", repr(source.last_id.rpartition(":")[0]))
        go_on.set()
        await source.read(client.http)
        assert numbered(source) and source.data[-1] == "[DONE]"


async def test_streams_take_no_more_memory_than_they_may(tokenizer):
    """A stream that has ended makes room; a stream that grows beyond the memory ends with an error; then new ones are
    refused until there is room."""
    n, go_on = 200, asyncio.Event()
    scripts = [[5] * n, [5] * n, [5, go_on, *[6] * 8 * n], [5]]
    async with served(ScriptedEngine(*scripts), tokenizer, remote=False, stored_bytes=100_000) as client:
        first, second = EventSource(*ask(COMPLETION)), EventSource(*ask(COMPLETION))
        for source in (first, second):
            await source.read(client.http)
            assert numbered(source) and len(source.data) == n + 1
        first.last_id, second.last_id = first.ids[0], second.ids[0]
        await first.read(client.http)
        assert first.status == 404
        growing = await begun(EventSource(*ask(COMPLETION)), client.http, 1)
        reading = asyncio.create_task(growing.read(client.http))
        go_on.set()
        await reading
        assert "stored_memory" in growing.data[-1] and numbered(growing)
        async with client.http.post(COMPLETION[0], json=ask(COMPLETION)[1]) as answer:
            assert answer.status == 200, "a stream without ids is not stored"


async def test_a_stream_of_two_prompts_with_two_choices_each_is_read_on_and_a_whole_answer_is_not_stored(tokenizer):
    async with served(ScriptedEngine(*[[5, 6], [7], [8, 9], [5]] * 2, [5]), tokenizer, remote=False) as client:
        path, body = ask(COMPLETION, prompt=["one", "two"], n=2)
        calm, source = EventSource(path, body), EventSource(path, body)
        await calm.read(client.http)
        for most in (1, 3, None):
            await source.read(client.http, most)
        assert numbered(source) and without_heads(source.data) == without_heads(calm.data)
        assert {event["choices"][0]["index"] for event in without_heads(source.data)} == {0, 1, 2, 3}
        whole = EventSource(*ask(COMPLETION, stream=False))
        await whole.read(client.http)
        assert whole.status == 200 and orjson.loads(whole.error)["choices"]


@pytest.mark.parametrize("option", [{"one_of": 2}, {"resume_seconds": 0.0}])
async def test_a_server_that_stores_no_streams(tokenizer, option):
    async with served(ScriptedEngine([5, 6]), tokenizer, **option) as client:
        source = EventSource(*ask(COMPLETION))
        await source.read(client.http)
        assert set(source.ids) == {""} and source.data[-1] == "[DONE]"
        source.last_id = "cmpl-0:1"
        await source.read(client.http)
        assert source.status == 404


async def test_two_readers_of_one_stream_get_the_same_events(waiting):
    client, engine, go_on = waiting
    source = await begun(EventSource(*ask(COMPLETION)), client.http, 1)
    again = EventSource(source.path, source.body)
    again.last_id = source.last_id
    readers = [asyncio.create_task(one.read(client.http)) for one in (source, again)]
    await asyncio.sleep(0.1)
    go_on.set()
    await asyncio.gather(*readers)
    assert source.data[1:] == again.data and len(engine.streams) == 1


async def test_scores_and_stops_come_again_as_they_came(tokenizer):
    events = [TokenEvent(token, logprob=-0.5, top=[(token, -0.5)]) for token in (5, 6, 7)]
    async with served(ScriptedEngine(events), tokenizer, remote=False) as client:
        source = EventSource(*ask(CHAT, logprobs=True, top_logprobs=1))
        for most in (1, 2, None):
            await source.read(client.http, most)
        logprobs = [orjson.loads(data)["choices"][0]["logprobs"] for data in source.data if data != "[DONE]"]
        assert [len(entry["content"]) for entry in logprobs if entry] == [1, 1, 1] and numbered(source)
