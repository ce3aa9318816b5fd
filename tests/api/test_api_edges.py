"""The API over a scripted engine: orders of tokens, stop strings, failures and clients that are rare in practice."""

from __future__ import annotations

import asyncio
import json
import threading

import openai
import orjson
import pytest
from engines.api_client import MODEL, raw_request, served
from engines.scripted_engine import ScriptedEngine
from models import tokenizers_made

from fastdecode.api import fields
from fastdecode.api.answers import CompletionAnswer
from fastdecode.api.errors import ApiError
from fastdecode.engine.state.request import (
    GenerationFailed,
    TokenEvent,
    TokenScore,
)
from fastdecode.text.tokenizer import Tokenizer

ASK = {"model": MODEL, "prompt": "x"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.from_dir(
        tokenizers_made.byte_level(tmp_path_factory.mktemp("tok"), chat_template=tokenizers_made.CHATML)
    )


def flat(lists):
    return [item for items in lists for item in items]


async def completion_stream(client, **body):
    """The text, the finish reasons and the pieces of a streamed completion."""
    pieces, reasons = [], []
    async for chunk in await client.openai.completions.create(**ASK | body, stream=True):
        pieces += [choice.text for choice in chunk.choices]
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
    return "".join(pieces), reasons, [piece for piece in pieces if piece]


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("one STOP two", "STOP", "one ", "stop"),
        ("one STO", "STOP", "one STO", "length"),  # held back to the end, then released
        ("aabaabaaab", ["aabaaa"], "aab", "stop"),  # a false beginning that overlaps the stop string
        ("abcd", ["abcd", "bc"], "a", "stop"),  # the stop string that is complete first counts
        ("世界🦙!", "🦙", "世界", "stop"),
        ("STOP", ["STOP"], "", "stop"),
        ("no such thing", ["x", "yy"], "no such thing", "length"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_stop_strings_across_tokens(tokenizer, spell, text, stop, expected, reason, streamed):
    engine = ScriptedEngine(spell(text))
    async with served(engine, tokenizer) as client:
        if streamed:
            text, reasons, _ = await completion_stream(client, stop=stop)
        else:
            answer = await client.openai.completions.create(**ASK, stop=stop)
            text, reasons = answer.choices[0].text, [answer.choices[0].finish_reason]
    assert (text, reasons) == (expected, [reason])


async def test_no_part_of_a_stop_string_is_sent(tokenizer, spell):
    wait = asyncio.Event()
    engine = ScriptedEngine([*spell("ab##"), wait, *spell("#c")])
    async with served(engine, tokenizer) as client:
        stream = await client.openai.completions.create(**ASK, stop="####", stream=True)
        seen = ""
        async for chunk in stream:
            seen += chunk.choices[0].text
            if seen == "ab":
                wait.set()
            assert "#" not in seen or seen.startswith("ab###")
    assert seen == "ab###c"


async def test_a_stop_string_cancels_the_request_in_the_engine(tokenizer, spell):
    engine = ScriptedEngine([*spell("done."), asyncio.Event()])
    async with served(engine, tokenizer) as client:
        answer = await client.openai.completions.create(**ASK, stop=".")
        assert (answer.choices[0].text, answer.usage.completion_tokens) == ("done", 5)
        async with asyncio.timeout(60):
            await engine.streams[0].cancelled.wait()
        assert (await client.metrics())["fastdecode:request_success_total", "stop"] == 1


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_every_token_is_a_chunk_and_the_first_chunk_is_the_first_token(tokenizer, spell, endpoint):
    """Clients count tokens by chunks and time the first one: a token that completes no character is a chunk too."""
    wait, tokens = asyncio.Event(), spell("é世🦙.")
    engine = ScriptedEngine([wait, *tokens])
    async with served(engine, tokenizer) as client:
        path, body = ("/v1/completions", ASK) if endpoint == "completions" else ("/v1/chat/completions", CHAT)
        async with client.http.post(path, json=body | {"stream": True}) as response:
            first = asyncio.create_task(response.content.readline())
            await asyncio.sleep(0.05)
            assert not first.done()  # nothing comes before the first token, not even a role
            wait.set()
            lines = [await first, *(await response.read()).splitlines()]
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith(b"data: {")]
    if endpoint == "completions":
        texts = [chunk["text"] for chunk in chunks]
    else:
        assert chunks.pop()["finish_reason"] == "length"
        assert chunks[0]["delta"]["role"] == "assistant"
        assert not any("role" in chunk["delta"] for chunk in chunks[1:])
        texts = [chunk["delta"]["content"] for chunk in chunks]
    assert len(texts) == len(tokens) > len("é世🦙.")
    assert "".join(texts) == "é世🦙." and "" in texts


async def test_continuous_usage_counts_the_tokens_so_far(tokenizer, spell):
    """guidellm asks for it always."""
    gates = [asyncio.Event() for _ in range(3)]
    engine = ScriptedEngine([item for gate, token in zip(gates, spell("abc"), strict=True) for item in (gate, token)])
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with served(engine, tokenizer) as client, client.http.post("/v1/completions", json=ASK | options) as response:
        counts = []
        for gate in gates:
            gate.set()
            while not (line := await response.content.readline()).startswith(b"data: {"):
                pass
            counts.append(json.loads(line[6:])["usage"]["completion_tokens"])
        rest = (await response.read()).decode()
    assert counts == [1, 2, 3]
    assert '"choices":[]' in rest and '"completion_tokens":3' in rest


async def test_characters_are_streamed_whole(tokenizer, spell):
    async with served(ScriptedEngine(spell("é世🦙.")), tokenizer) as client:
        text, _, pieces = await completion_stream(client)
    assert text == "é世🦙." and "\ufffd" not in "".join(pieces)


async def test_an_unfinished_character_is_sent_at_the_end(tokenizer, spell):
    async with served(ScriptedEngine(spell("a世")[:-1]), tokenizer) as client:
        assert (await completion_stream(client))[0] == "a\ufffd"


async def test_the_end_token_is_counted_and_not_shown(tokenizer, spell):
    stop = spell("!")[0]
    script = [*spell("ab"), TokenEvent(stop, finish_reason="stop")]
    async with served(ScriptedEngine(script), tokenizer) as client:
        answer = await client.openai.completions.create(**ASK, extra_body={"stop_token_ids": [stop]})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    assert answer.usage.completion_tokens == 3


def with_logprobs(ids):
    return [TokenEvent(i, -0.5, [(i, -0.5), (i + 1, float("-inf"))]) for i in ids]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_completion_logprobs_line_up_with_the_text(tokenizer, spell, streamed):
    """There are no entries for tokens after the stop string, and a token of half a character is named by its bytes."""
    ids = spell("aé STOP")
    async with served(ScriptedEngine(with_logprobs(ids)), tokenizer) as client:
        if streamed:
            parts = [
                c async for c in await client.openai.completions.create(**ASK, stop="STOP", logprobs=2, stream=True)
            ]
            logprobs = [part.choices[0].logprobs for part in parts]
        else:
            logprobs = [(await client.openai.completions.create(**ASK, stop="STOP", logprobs=2)).choices[0].logprobs]
    assert flat(part.tokens for part in logprobs) == ["a", "bytes:\\xc3", "bytes:\\xa9", " "]
    assert flat(part.text_offset for part in logprobs) == [0, 1, 1, 2]
    assert flat(part.token_logprobs for part in logprobs) == [-0.5] * 4
    top = flat(part.top_logprobs for part in logprobs)
    assert top[0]["a"] == -0.5 and len(top) == 4 and -9999.0 in top[0].values()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_chat_logprobs(tokenizer, spell, streamed):
    async with served(ScriptedEngine(with_logprobs(spell("aé"))), tokenizer) as client:
        answer = await client.openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=streamed)
        choices = [chunk.choices[0] async for chunk in answer] if streamed else answer.choices
    content = flat(c.logprobs.content for c in choices if c.logprobs)
    assert [entry.token for entry in content] == ["a", "\\xc3", "\\xa9"]
    assert bytes(flat(entry.bytes for entry in content)).decode() == "aé"
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]


# -- streams ----------------------------------------------------------------------------------------------------------


async def events(client, path, body):
    """The raw events of a stream, including comments, and whether the stream was ended properly."""
    async with client.http.post(path, json=body | {"stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    return text.removesuffix("\n\n").split("\n\n")


async def test_the_bytes_of_a_chat_stream(tokenizer, spell):
    engine = ScriptedEngine(spell("ok"))
    async with served(engine, tokenizer) as client:
        *chunks, usage, done = await events(
            client, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}
        )
    assert done == "data: [DONE]"
    chunks = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[:2] == [{"role": "assistant", "content": "o"}, {"content": "k"}]
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    usage = json.loads(usage.removeprefix("data: "))
    prompt = len(engine.prompts[0])
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 2,
        "total_tokens": prompt + 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("asked", [{}, {"stream_options": {"include_usage": True}}, {"n": 2}])
async def test_every_chunk_of_a_text_is_json_whatever_the_text_is(tokenizer, spell, path, asked):
    """The chunks of plain text are made from a template: `"` and the template's own stand-in must not break it."""
    text = 'a"\\\n\0text\x01</script>\u2028世\U0001f999"text": "\\u0000text"'
    engine = ScriptedEngine(*[spell(text)] * asked.get("n", 1))
    body = (ASK if path == "/v1/completions" else CHAT) | asked
    async with served(engine, tokenizer) as client:
        *chunks, _ = await events(client, path, body)
    texts = [""] * asked.get("n", 1)
    shapes = set()
    for chunk in map(json.loads, (chunk.removeprefix("data: ") for chunk in chunks)):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            shapes.add((tuple(sorted(chunk)), tuple(sorted(choice))))
    assert texts == [text] * len(texts)
    assert len(shapes) == 1


async def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(tokenizer, spell):
    async with served(ScriptedEngine(spell("old")), tokenizer) as client:
        body = json.dumps(ASK | {"stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        async with asyncio.timeout(60):
            head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b"chunked" not in head.lower()
    *lines, done = answer.decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    assert "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines) == "old"


async def test_a_stream_without_text_sends_keep_alive_comments(tokenizer, spell):
    wait = asyncio.Event()
    async with (
        served(ScriptedEngine([wait, *spell("ok")]), tokenizer, keep_alive_seconds=0.02) as client,
        client.http.post("/v1/completions", json=ASK | {"stream": True}) as response,
    ):
        assert [await response.content.readline() for _ in range(4)] == [b": keep-alive\n", b"\n"] * 2
        wait.set()
        assert b"data: [DONE]" in await response.read()


@pytest.mark.parametrize("ask", [ASK, CHAT], ids=["completion", "chat"])
async def test_a_failure_in_mid_stream_sends_an_error_event_and_ends_the_stream(tokenizer, spell, ask):
    engine = ScriptedEngine([*spell("half"), GenerationFailed("R-node tcp://r1 was lost")])
    async with served(engine, tokenizer) as client:
        api = client.openai.completions if ask is ASK else client.openai.chat.completions
        chunks = []
        with pytest.raises(openai.APIError, match="R-node tcp://r1 was lost") as caught:
            async for chunk in await api.create(**ask, stream=True):
                chunks.append(chunk.choices[0])
        assert "".join(c.text if ask is ASK else c.delta.content for c in chunks) == "half"
        assert (caught.value.code, caught.value.type) == ("generation_failed", "server_error")
        assert (await client.metrics())["fastdecode:request_success_total", "error"] == 1


async def test_the_error_event_comes_last(tokenizer, spell):
    engine = ScriptedEngine([*spell("half"), GenerationFailed("lost")])
    async with served(engine, tokenizer) as client:
        *_, last = await events(client, "/v1/completions", ASK)
    error = {"message": "lost", "type": "server_error", "param": None, "code": "generation_failed"}
    assert json.loads(last.removeprefix("data: ")) == {"error": error}


async def test_one_failed_choice_fails_the_request_and_cancels_the_others(tokenizer, spell):
    engine = ScriptedEngine([asyncio.Event()], [*spell("x"), GenerationFailed("lost")])
    async with served(engine, tokenizer) as client:
        with pytest.raises(openai.InternalServerError, match="lost"):
            await client.openai.completions.create(**ASK, n=2)
        async with asyncio.timeout(60):
            await engine.streams[0].cancelled.wait()


async def test_choices_are_interleaved_as_their_tokens_arrive(tokenizer, spell):
    first, second = asyncio.Event(), asyncio.Event()
    engine = ScriptedEngine([first, *spell("abc")], [*spell("x"), second, *spell("y")])
    async with served(engine, tokenizer) as client:
        seen = ["", ""]
        async for chunk in await client.openai.completions.create(**ASK, n=2, stream=True):
            for choice in chunk.choices:
                seen[choice.index] += choice.text
            if seen == ["", "x"]:
                first.set()
            if seen == ["abc", "x"]:
                second.set()
    assert seen == ["abc", "xy"]


async def test_a_reader_that_stalls_delays_neither_the_engine_nor_other_streams(tokenizer, spell):
    """The API still reads the slow client's tokens from the engine, and sends them in larger pieces."""
    n = 50_000  # events of some 170 bytes each: more than the sockets' buffers hold
    engine = ScriptedEngine(spell("0") * n, spell("quick"))
    async with served(engine, tokenizer) as client:
        body = ASK | {"stream": True}
        async with raw_request(client.server.port, "/v1/completions", body) as (reader, _), asyncio.timeout(60):
            await reader.readuntil(b"\r\n\r\n")
            answer = await client.openai.completions.create(**ASK)
            assert answer.choices[0].text == "quick"
            while not engine.streams[0].ended:
                await asyncio.sleep(0.01)
            raw = bytearray()
            while b"data: [DONE]" not in raw[-64:]:
                raw += await reader.read(2**16)
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(texts) == "0" * n
    assert len(texts) < n


async def test_a_text_that_cannot_fit_is_refused_without_being_encoded(tmp_path, spell):
    """Encoding megabytes takes seconds, only to find that they are too long."""
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path, chat_template="{{ messages[0].content }}"))
    async with served(ScriptedEngine(), tokenizer) as client:
        for path, body, param in (
            ("/v1/completions", ASK | {"prompt": "the " * 200_000}, "prompt"),
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "the " * 200_000}]}, "messages"),
            ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": ""}] * 5000}, "messages"),
        ):
            status, answer = await client.post(path, body)
            assert (status, answer["error"]["param"]) == (400, param)
            assert answer["error"]["code"] == "context_length_exceeded"
            assert "at least" in answer["error"]["message"] or "5000 messages" in answer["error"]["message"]


async def test_a_body_of_very_many_parts_is_refused_before_it_is_decoded(tmp_path):
    """Decoding holds the GIL, and so every stream of the process."""
    texts = ['{"a":[]}' * 60_000, "\\"]  # brackets in a string are none
    message = "has more than 100000 lists, objects and strings"
    async with served(ScriptedEngine(), Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path))) as client:
        for part, n in (([], 100_001), ({}, 100_001), ({"role": 0}, 50_001), ("x", 100_001)):
            status, answer = await client.post("/v1/chat/completions", CHAT | {"messages": [part] * n})
            assert (status, answer["error"]["message"]) == (400, f"the body {message}")
        for name, text in (("guided_json", "[" * 100_001), ("guided_json", '["' + '","' * 100_001 + '"]')):
            status, answer = await client.post("/v1/completions", ASK | {name: text})
            assert (status, answer["error"]["message"]) == (400, f"{name}: {message}")
        status, answer = await client.post("/v1/completions", ASK | {"prompt": texts})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_parts_of_json_are_counted_exactly():
    """Strings with quotation marks, backslashes and brackets, around the limit."""
    text = ['\\"[{', "\\", '"', "\\\\", "[", {'"]': ["x", None, {"a\\": []}]}]
    for part, n_parts in (("\\", 1), ('"[', 1), ({}, 1), ([], 1), ({'"': 1}, 2)):
        room = fields.MAX_PARTS - 14  # of the list of both, and of `text`
        whole = (room // n_parts) * [part]
        assert fields.decode_json(orjson.dumps([text, *whole])) == [text, *whole]
        with pytest.raises(ApiError, match="the body has more than"):
            fields.decode_json(orjson.dumps([text, *whole, *n_parts * [part]]))


async def test_variables_for_the_models_own_chat_template(tmp_path, spell):
    """vLLM's chat_template_kwargs, e.g. Qwen3's enable_thinking."""
    template = "{{ messages[0].content }}{% if enable_thinking is false %}<think>{% endif %}"
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path, chat_template=template))
    engine = ScriptedEngine(spell("a"), spell("b"))
    async with served(engine, tokenizer) as client:
        await client.openai.chat.completions.create(**CHAT)
        extra = {"chat_template_kwargs": {"enable_thinking": False}}
        await client.openai.chat.completions.create(**CHAT, extra_body=extra)
    think = tokenizer.encode("<think>", add_special_tokens=False)
    assert engine.prompts[1] == engine.prompts[0] + think


# -- log-probabilities of many tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "in_loop"), [(10, True), (150, False)])
async def test_log_probabilities_of_many_tokens_are_encoded_outside_the_event_loop(
    tokenizer, spell, monkeypatch, n, in_loop
):
    """The log-probabilities of a thousand prompts took so long that the engine's process ended the API's as hung."""
    threads, choice = set(), CompletionAnswer.choice

    def watched(answer, index, piece):
        threads.add(threading.current_thread())
        return choice(answer, index, piece)

    monkeypatch.setattr(CompletionAnswer, "choice", watched)
    [token] = spell("a")
    script = [TokenEvent(token, -1.5, [(token, -1.5)]) for _ in range(n)]
    async with served(ScriptedEngine(list(script), list(script)), tokenizer) as client:
        answer = await client.openai.completions.create(**ASK, n=2, logprobs=1, max_tokens=n)
    for given in answer.choices:
        assert given.text == "a" * n and given.logprobs.token_logprobs == [-1.5] * n
    assert [thread is threading.main_thread() for thread in threads] == [in_loop]


@pytest.mark.parametrize("n", [10, 300])
async def test_the_log_probabilities_of_a_long_echo_are_encoded_outside_the_loop_and_overtaken_by_nothing(
    tokenizer, spell, monkeypatch, n
):
    threads, logprobs = set(), CompletionAnswer._logprobs

    def watched(answer, entries):
        if len(entries) >= n:
            threads.add(threading.current_thread() is threading.main_thread())
        return logprobs(answer, entries)

    monkeypatch.setattr(CompletionAnswer, "_logprobs", watched)
    [a], answer = spell("a"), spell("bcdefgh")
    first = TokenEvent(answer[0], -1.5, prompt_scores=[TokenScore(-0.5, 1, [])] * (n - 1))
    script = [first, *(TokenEvent(token, -1.5) for token in answer[1:])]
    ask = {"prompt": [a] * n, "echo": True, "logprobs": 1, "max_tokens": len(answer)}
    async with served(ScriptedEngine(script), tokenizer) as client:
        text, _, _ = await completion_stream(client, **ask)
    assert text == "a" * n + "bcdefgh"
    assert threads == {n <= 256}
