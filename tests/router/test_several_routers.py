"""Several routers in front of the same S-nodes: a response in the background is read on through another one."""

from __future__ import annotations

import asyncio
import contextlib

import openai
import orjson
import pytest
from engines.api_client import MODEL
from engines.real_engine import real_engine
from engines.routed import routed, served, url_of
from engines.scripted_engine import ScriptedEngine
from models.checkpoints import make_checkpoint
from models.tokenizers_made import CHATML, byte_level

from fastdecode.text.tokenizer import Tokenizer

N_STREAMS = 16


def ask(i):
    return {"model": MODEL, "input": f"prompt {i}", "temperature": 0, "max_output_tokens": 60}


@contextlib.asynccontextmanager
async def two_s_nodes(tmp_path, tokenizer, checkpoint):
    """The URLs of two S-nodes with the same model."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for name in "ab":
            (tmp_path / name).mkdir()
            engine = await stack.enter_async_context(real_engine(checkpoint, tmp_path / name))
            urls.append(url_of(await stack.enter_async_context(served(engine, tokenizer))))
        yield urls


async def read(stream, events, most=None):
    """Append events of a stream until there are `most`. Ends quietly where the stream breaks."""
    with contextlib.suppress(openai.APIError, OSError):
        async for event in stream:
            if event.type == "error":
                return
            events.append(event)
            if len(events) == most:
                return


async def test_clients_of_a_dead_router_go_on_through_another(tmp_path):
    checkpoint = make_checkpoint("llama-gqa")
    tokenizer = Tokenizer.from_dir(checkpoint)
    async with two_s_nodes(tmp_path, tokenizer, checkpoint) as urls, routed(*urls) as (second, _, _):
        calm = [(await second.responses.create(**ask(i))).output_text for i in range(N_STREAMS)]
        events = [[] for _ in range(N_STREAMS)]
        async with routed(*urls) as (first, _, _):
            streams = [await first.responses.create(**ask(i), background=True, stream=True) for i in range(N_STREAMS)]
            reading = [asyncio.create_task(read(stream, had)) for stream, had in zip(streams, events, strict=True)]
            async with asyncio.timeout(60):
                while not all(events):
                    await asyncio.sleep(0.01)
        await asyncio.gather(*reading)  # the first router is gone

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


async def test_a_response_is_found_at_the_s_node_that_has_it(tmp_path):
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path, chat_template=CHATML))
    engines = [ScriptedEngine(*[[5, 6, 7]] * 2) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(engine, tokenizer)) for engine in engines]
        api, http, pool = await stack.enter_async_context(routed(*map(url_of, clients)))
        ids = [(await api.responses.create(**ask(i), background=True)).id for i in range(4)]
        assert all(engine.prompts for engine in engines), "both S-nodes have some"
        pool.suspect(pool.s_nodes[0], "drains")  # and goes on to show what it has
        for id in ids:
            assert (await api.responses.retrieve(id)).id == id
            await api.responses.delete(id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            await api.responses.retrieve(ids[0])
        async with http.get("/v1/responses/resp_1/input_items") as answer:
            assert answer.status == 404


async def test_a_response_that_went_to_another_s_node_has_all_of_its_events_there(tmp_path):
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path, chat_template=CHATML))
    stuck, script = asyncio.Event(), [*range(20, 30)]
    engines = [ScriptedEngine([*script[:4], stuck]), ScriptedEngine(script[4:])]
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(served(engine, tokenizer, remote=False)) for engine in engines]
        api, http, pool = await stack.enter_async_context(routed(*map(url_of, clients)))
        pool.suspect(pool.s_nodes[1], "not yet")
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
