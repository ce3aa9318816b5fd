"""The API over a scripted engine that refuses, fails or ends, and clients that disconnect."""

from __future__ import annotations

import asyncio
import socket

import openai
import pytest
from engines.api_client import MODEL, raw_request, served
from engines.scripted_engine import ScriptedEngine
from models import tokenizers_made

from fastdecode.engine.state.request import (
    InvalidPrompt,
    NotReady,
    Overloaded,
    PromptTooLong,
)
from fastdecode.service import remote
from fastdecode.text.output.dialogue import Dialogue
from fastdecode.text.tokenizer import Tokenizer

ASK = {"model": MODEL, "prompt": "x"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(
        tokenizers_made.byte_level(tmp_path_factory.mktemp("tok"), chat_template=tokenizers_made.CHATML)
    )


# -- clients that disconnect ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("text", ["", "some"], ids=["in the queue", "while decoding"])
async def test_a_client_that_disconnects_cancels_its_requests(tokenizer, spell, text, streamed, how):
    engine = ScriptedEngine(*[[*spell(text), asyncio.Event()]] * 2)
    async with served(engine, tokenizer) as client:
        body = ASK | {"stream": streamed, "n": 2}
        async with raw_request(client.server.port, "/v1/completions", body) as (reader, writer), asyncio.timeout(60):
            if streamed:
                await reader.readuntil(b"\r\n\r\n")
            while len(engine.streams) < 2 or any(len(stream._acts) > 0 for stream in engine.streams):
                await asyncio.sleep(0.005)
            if how == "reset":
                option = b"\1\0\0\0\0\0\0\0"
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        async with asyncio.timeout(60):
            for stream in engine.streams:
                await stream.cancelled.wait()
        while (await client.metrics())["fastdecode:request_success_total", "abort"] != 2:
            await asyncio.sleep(0.005)


class QueueingEngine(ScriptedEngine):
    """An engine that never comes to queue a request."""

    def __init__(self):
        super().__init__()
        self.asked = asyncio.Event()

    async def submit(self, request, outlet, first):
        self.asked.set()
        await asyncio.Event().wait()


async def test_a_client_that_disconnects_before_its_request_is_queued_is_counted(tokenizer):
    engine = QueueingEngine()
    async with served(engine, tokenizer) as client:
        async with raw_request(client.server.port, "/v1/completions", ASK | {"n": 2}), asyncio.timeout(60):
            await engine.asked.wait()
        while (await client.metrics())["fastdecode:request_success_total", "abort"] != 2:
            await asyncio.sleep(0.005)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "error", "code"),
    [
        (Overloaded("the queue is full"), openai.RateLimitError, "overloaded"),
        (NotReady("no R-node is connected"), openai.InternalServerError, "not_ready"),
        (PromptTooLong("5000 tokens"), openai.BadRequestError, "context_length_exceeded"),
        (InvalidPrompt("a token id"), openai.BadRequestError, "invalid_prompt"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_the_engines_refusals(tokenizer, refusal, error, code, streamed):
    async with served(ScriptedEngine(refusal=refusal), tokenizer) as client:
        with pytest.raises(error, match=str(refusal)) as caught:
            await client.openai.chat.completions.create(**CHAT, stream=streamed)
    assert caught.value.code == code
    assert caught.value.param == ("messages" if isinstance(refusal, InvalidPrompt) else None)
    assert ("Retry-After" in caught.value.response.headers) == (caught.value.status_code in (429, 503))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_prompt_that_does_not_fit_is_not_parsed(tokenizer, monkeypatch, path):
    """A parser may read the end of the prompt, which takes its time, on the event loop."""
    monkeypatch.setattr(Dialogue, "parser", lambda *_: pytest.fail("there is nothing to parse"))
    async with served(ScriptedEngine(refusal=PromptTooLong("5000 tokens")), tokenizer) as client:
        body = CHAT | {"max_tokens": 5} if path != "/v1/responses" else {"model": MODEL, "input": "hi"}
        status, answer = await client.post(path, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("remote", [False, True])
async def test_a_bug_of_the_engine_is_an_error_at_the_client(tokenizer, remote):
    """A scripted engine without a script raises an AssertionError."""
    async with served(ScriptedEngine(), tokenizer, remote=remote) as client:
        status, answer = await client.post("/v1/completions", ASK)
    assert (status, answer["error"]["message"]) == (500, "internal error; the server's log says more")


async def test_choices_before_a_refused_one_are_cancelled(tokenizer, spell):
    engine = ScriptedEngine(spell("a"), spell("b"), refusal=Overloaded("full"))
    async with served(engine, tokenizer) as client:
        with pytest.raises(openai.RateLimitError):
            await client.openai.completions.create(**ASK, n=3)
    assert [stream.cancelled.is_set() for stream in engine.streams] == [True, True]


# -- health, metrics, end ---------------------------------------------------------------------------------------------


async def test_health_follows_the_engine(tokenizer):
    engine = ScriptedEngine()
    async with served(engine, tokenizer, stalled_after_seconds=30) as client:

        async def health():
            async with client.http.get("/health") as response:
                return response.status, await response.json()

        status, body = await health()
        assert (status, body["status"], body["isa"]) == (200, "ok", ["avx2"])
        node = body["nodes"][0]
        assert (node["url"], node["pages_used"], node["pages_total"], node["pages_max"]) == ("tcp://r1", 25, 100, 400)
        assert node["region_bytes"] == 12345
        engine.stalled_seconds = 31.0
        status, body = await health()
        assert status == 503 and body["status"].startswith("stalled")
        engine.stalled_seconds, engine.ready = 0.0, False
        assert (await health())[0] == 503
        engine.alive = False
        status, body = await health()
        assert (status, body["status"]) == (503, "no R-node is connected")


async def test_metrics_show_the_engines_numbers(tokenizer):
    async with served(ScriptedEngine(), tokenizer) as client:
        metrics = await client.metrics()
        async with client.http.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert metrics["fastdecode:num_requests_running", ""] == 2
    assert metrics["fastdecode:num_requests_waiting", ""] == 1
    assert metrics["fastdecode:kv_cache_usage_perc", ""] == 0.25
    assert metrics["fastdecode:r_node_attention_seconds_total", "avx2,tcp://r1"] == 1.5
    assert metrics["fastdecode:r_node_pages_used", "avx2,tcp://r1"] == 25
    assert metrics["fastdecode:r_node_pages", "avx2,tcp://r1"] == 100
    assert metrics["fastdecode:r_node_pages_max", "avx2,tcp://r1"] == 400
    assert metrics["fastdecode:r_node_region_bytes", "avx2,tcp://r1"] == 12345


async def test_closing_lets_streams_end_within_the_grace(tokenizer, spell):
    """While streams end, /health tells load balancers that the server takes no more, and new requests are refused."""
    wait = asyncio.Event()
    async with served(ScriptedEngine([*spell("a"), wait, *spell("b")]), tokenizer) as client:
        stream = await client.openai.completions.create(**ASK, stream=True)
        text = (await anext(stream)).choices[0].text
        closing = asyncio.create_task(client.server.close(grace=30))
        await asyncio.sleep(0.05)
        async with client.http.get("/health") as response:
            assert (response.status, (await response.json())["status"]) == (503, "closing")
        status, body = await client.post("/v1/completions", ASK)
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        wait.set()
        text += "".join([chunk.choices[0].text async for chunk in stream])
        await closing
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", client.server.port)
    assert text == "ab"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_closing_ends_the_remaining_streams_with_an_error(tokenizer, spell, streamed):
    engine = ScriptedEngine([*spell("a"), asyncio.Event()])
    async with served(engine, tokenizer) as client:

        async def ask():
            answer = await client.openai.completions.create(**ASK, stream=streamed)
            return [chunk async for chunk in answer]

        asking = asyncio.create_task(ask())
        while not engine.streams or len(engine.streams[0]._acts) > 0:
            await asyncio.sleep(0.005)
        await client.server.close(grace=0.01)
        with pytest.raises(openai.APIError, match="shutting down") as caught:
            await asking
        assert caught.value.code == "shutting_down"
    assert engine.streams[0].cancelled.is_set()


async def test_metrics_that_fail_in_the_engine_are_answered_without_a_wait(tokenizer, monkeypatch):
    engine = ScriptedEngine()

    async def fail():
        raise RuntimeError("broken")

    monkeypatch.setattr(engine, "metrics", fail)
    monkeypatch.setattr(remote, "_ANSWER_SECONDS", 3600.0)
    async with served(engine, tokenizer) as client, client.http.get("/metrics") as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (503, "not_ready") and "log" in error["message"]
