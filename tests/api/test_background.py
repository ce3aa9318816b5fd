"""Responses in the background by OpenAI's client: read again, gone on with behind any event, cancelled and deleted."""

from __future__ import annotations

import asyncio

import openai
import pytest
from engines.api_client import MODEL, served
from engines.scripted_engine import ScriptedEngine

from fastdecode.api import stored

ASK = {"model": MODEL, "input": "one two", "temperature": 0, "max_output_tokens": 40}


async def ended(client, id):
    """The response after its end."""
    async with asyncio.timeout(60):
        while (response := await client.responses.retrieve(id)).status == "in_progress":
            await asyncio.sleep(0.02)
    return response


@pytest.fixture
async def scripted(tokenizer):
    """OpenAI's client of an engine that gives a token and waits; the engine; and the event that it waits for."""
    go_on = asyncio.Event()
    engine = ScriptedEngine([5, 6, go_on, 7, 8], [5, 6, go_on, 7, 8])
    async with served(engine, tokenizer, remote=False) as client:
        yield client, engine, go_on


async def test_a_client_that_comes_back_misses_nothing_and_gets_nothing_twice(client):
    plain = await client.openai.responses.create(**ASK)
    begun = await client.openai.responses.create(**ASK, background=True, stream=True)
    events = []
    async for event in begun:
        events.append(event)
        if len(events) == 7:
            break
    await begun.close()
    id = events[0].response.id
    for n in (3, 12):  # it is read twice more, and left once more
        after = events[-1].sequence_number
        again = await client.openai.responses.retrieve(id, stream=True, starting_after=after)
        async for event in again:
            events.append(event)
            n -= 1
            if n == 0:
                break
        await again.close()
    rest = await client.openai.responses.retrieve(id, stream=True, starting_after=events[-1].sequence_number)
    events += [event async for event in rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert text == last.output_text == plain.output_text and last.status == plain.status == "incomplete"
    assert last.usage == plain.usage and last.background and not plain.background
    assert await client.openai.responses.retrieve(id) == last
    whole = [event async for event in await client.openai.responses.retrieve(id, stream=True)]
    assert whole == events


async def test_the_last_item_is_as_complete_as_the_response(scripted):
    """Both ends cut it off: the script ends as max_tokens does."""
    client, _, go_on = scripted
    for end in ("cancel", "go on"):
        begun = await client.openai.responses.create(**ASK, background=True)
        async with asyncio.timeout(60):
            while not (response := await client.openai.responses.retrieve(begun.id)).output_text:
                await asyncio.sleep(0.01)
        assert (response.status, response.output[0].status) == ("in_progress", "in_progress")
        if end == "cancel":
            response = await client.openai.responses.cancel(begun.id)
        else:
            go_on.set()
            response = await ended(client.openai, begun.id)
        assert response.output_text and response.output[0].status == "incomplete"


async def test_without_a_stream_the_answer_is_asked_for(client):
    plain = await client.openai.responses.create(**ASK)
    begun = await client.openai.responses.create(**ASK, background=True)
    assert begun.status == "in_progress" and begun.background
    response = await ended(client.openai, begun.id)
    assert response.output_text == plain.output_text and response.usage == plain.usage
    assert response.id == begun.id


async def test_a_response_goes_on_without_its_client_until_it_is_cancelled(scripted):
    client, engine, _ = scripted
    stream = await client.openai.responses.create(**ASK, background=True, stream=True)
    first = await anext(aiter(stream))
    await stream.close()
    [choice] = engine.streams
    await asyncio.sleep(0.2)
    assert not choice.cancelled.is_set() and not choice.ended
    reader = await client.openai.responses.retrieve(first.response.id, stream=True)
    response = await client.openai.responses.cancel(first.response.id)
    assert response.status == "cancelled"
    async with asyncio.timeout(60):
        await choice.cancelled.wait()
        assert [event.sequence_number async for event in reader][:2] == [0, 1]  # the readers' streams end
    assert (await client.openai.responses.cancel(response.id)).status == "cancelled"
    assert (await client.openai.responses.retrieve(response.id)).status == "cancelled"


async def test_a_deleted_response_is_gone(scripted):
    client, engine, _ = scripted
    begun = await client.openai.responses.create(**ASK, background=True)
    await client.openai.responses.delete(begun.id)
    assert engine.streams[0].ended
    for act in (client.openai.responses.retrieve, client.openai.responses.cancel, client.openai.responses.delete):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            await act(begun.id)


async def test_ended_responses_are_kept_for_a_time_and_in_bounded_memory(scripted, monkeypatch):
    client, _, go_on = scripted
    go_on.set()
    first, second = [await client.openai.responses.create(**ASK, background=True) for _ in range(2)]
    for response in (first, second):
        await ended(client.openai, response.id)
    monkeypatch.setattr(stored, "_MOST_ENDED", 1)
    with pytest.raises(openai.NotFoundError):
        await client.openai.responses.retrieve(first.id)
    assert (await client.openai.responses.retrieve(second.id)).status == "incomplete"
    monkeypatch.setattr(stored, "_BACKGROUND_SECONDS", 0.0)
    with pytest.raises(openai.NotFoundError):
        await client.openai.responses.retrieve(second.id)


async def test_a_response_belongs_to_the_key_that_asked_for_it(tokenizer):
    engine = ScriptedEngine([5, asyncio.Event()])
    async with served(engine, tokenizer, key="one", api_keys=["one", "two"], remote=False) as client:
        begun = await client.openai.responses.create(**ASK, background=True)
        other = client.openai.with_options(api_key="two")
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            await other.responses.retrieve(begun.id)
        assert (await client.openai.responses.retrieve(begun.id)).status == "in_progress"


async def test_a_stream_that_waits_has_comments(tokenizer):
    engine = ScriptedEngine([5, 6, asyncio.Event()])
    async with served(engine, tokenizer, remote=False, keep_alive_seconds=0.1) as client:
        begun = await client.openai.responses.create(**ASK, background=True)
        async with client.http.get(f"/v1/responses/{begun.id}?stream=true") as answer, asyncio.timeout(60):
            while (await answer.content.readline()) != b": keep-alive\n":
                pass


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"background": "yes"}, "background"), ({"background": True, "store": False}, "store")],
)
async def test_what_a_response_in_the_background_cannot_be(client, fields, param):
    status, body = await client.post("/v1/responses", ASK | fields)
    assert status == 400 and body["error"]["param"] == param


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=1", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=²", "starting_after"),
        ("limit=3", "limit"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(scripted, query, param):
    client, _, _ = scripted
    begun = await client.openai.responses.create(**ASK, background=True)
    async with client.http.get(f"/v1/responses/{begun.id}?{query}") as answer:
        assert answer.status == 400 and (await answer.json())["error"]["param"] == param


async def test_several_api_processes_have_no_background(tokenizer):
    async with served(ScriptedEngine([5]), tokenizer, one_of=2) as client:
        status, body = await client.post("/v1/responses", ASK | {"background": True})
        assert status == 400 and "--api-processes 1" in body["error"]["message"]


async def test_an_error_before_the_first_event_answers_the_request(client):
    status, body = await client.post("/v1/responses", ASK | {"background": True, "input": "x " * 5000})
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    async with client.http.get("/v1/responses/resp_none") as answer:
        assert answer.status == 404
