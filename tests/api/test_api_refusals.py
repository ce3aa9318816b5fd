"""The requests that the API refuses: status, OpenAI's error object and the name of the field."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib

import aiohttp
import openai
import pytest
import yarl
from engines.api_client import MODEL, served
from engines.real_engine import real_engine
from models.checkpoints import MAX_POSITIONS, make_checkpoint

from fastdecode.api.answers import Answer

pytestmark = pytest.mark.quick

MESSAGES = [{"role": "user", "content": "Who are you?"}]
ASK = {"model": MODEL, "prompt": "The quick", "max_tokens": 4}
CHAT = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 4}

NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "stop": None,
    "user": None,
    "logprobs": None,
    "stream_options": None,
    "n": None,
    "model": None,  # where one is served, a request need not name it
    "metadata": {"run": "7"},
    "store": True,
    "skip_special_tokens": True,
    "priority": 0,
    "use_beam_search": False,
    "min_tokens": 0,
    "request_id": "abc",
    "chat_id": "abc",
}
NEUTRAL_COMPLETION = NEUTRAL | {"echo": False, "suffix": None, "best_of": 1}
NEUTRAL_CHAT = NEUTRAL | {
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "functions": None,
    "modalities": ["text"],
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "top_logprobs": None,
}


async def test_fields_that_ask_for_nothing_are_accepted(client):
    for path, body in (("/v1/completions", ASK | NEUTRAL_COMPLETION), ("/v1/chat/completions", CHAT | NEUTRAL_CHAT)):
        status, answer = await client.post(path, body)
        assert status == 200, answer


BAD_BOTH = [
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "much"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"the": 1}}, "logit_bias.the"),
    ({"logit_bias": {"-5": 1}}, "logit_bias.-5"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": True}}, "logit_bias.5"),
    ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias.05"),
    ({"logit_bias": {"384": 1}}, "logit_bias"),  # the first id beyond the vocabulary
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"nonsense": 1}, "nonsense"),
    ({"nonsense": None}, "nonsense"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"user": 5}, "user"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"metadata": "x"}, "metadata"),
    ({"priority": -1}, "priority"),  # only giving way can be asked for
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5}, "min_tokens"),  # more than max_tokens
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [384]}, "allowed_token_ids"),  # the first id beyond the vocabulary
    ({"use_beam_search": True}, "use_beam_search"),
    ({"model": 5}, "model"),
]
BAD_COMPLETION = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [384]}, "prompt"),  # the first id beyond the vocabulary
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [1] * MAX_POSITIONS}, "prompt"),
    ({"prompt": ["x"] * 100, "n": 100}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": MESSAGES}, "messages"),
]
BAD_CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "mood": "sad"}]}, "messages[0].mood"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"store": 1}, "store"),
    ({"reasoning_effort": "endless"}, "reasoning_effort"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 3}, "max_tokens"),  # together with another max_completion_tokens
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs.continue_final_message"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_BOTH + BAD_COMPLETION, ids=lambda value: str(value)[:40])
async def test_a_bad_completion_is_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.openai.completions.create(model=MODEL, prompt="", extra_body=ASK | fields)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert caught.value.message


@pytest.mark.parametrize(("fields", "param"), BAD_BOTH + BAD_CHAT, ids=lambda value: str(value)[:40])
async def test_a_bad_chat_is_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.openai.chat.completions.create(model=MODEL, messages=[], extra_body=CHAT | fields)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


async def test_a_prompt_beyond_the_context_has_its_own_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.openai.completions.create(**ASK | {"prompt": [5] * MAX_POSITIONS})
    assert caught.value.code == "context_length_exceeded"


async def test_an_unknown_model(client):
    for create, ask in ((client.openai.completions.create, ASK), (client.openai.chat.completions.create, CHAT)):
        with pytest.raises(openai.NotFoundError) as caught:
            await create(**ask | {"model": "gpt-5"})
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_a_model_without_a_chat_template(engine, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "_templates", {})
    async with served(engine, tokenizer) as client:
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            await client.openai.chat.completions.create(**CHAT)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b'{"temperature": NaN}', b'{"temperature": 1e999}', b"\xff", b"[" * 5000]
)
async def test_bodies_that_are_not_json_objects(client, body):
    async with client.http.post("/v1/completions", data=body, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_body_of_another_type(client):
    async with client.http.post("/v1/completions", data=b'{"prompt": "x"}') as response:
        assert response.status == 415
        assert "application/json" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Encoding": "br"}, 415, "unsupported_encoding"),
        ({"Content-Encoding": "zstd"}, 415, "unsupported_encoding"),
        ({"Content-Encoding": "rot13"}, 415, "unsupported_encoding"),
        ({"Content-Encoding": "gzip"}, 400, "invalid_body"),
        ({"Content-Encoding": "deflate"}, 400, "invalid_body"),
        ({"Expect": "200-ok"}, 417, "expectation_failed"),
        ({"Content-Encoding": "\udcff"}, 415, "unsupported_encoding"),  # the byte 255, which no text has
        ({"Expect": "\udcff"}, 417, "expectation_failed"),
    ],
    ids=ascii,
)
async def test_codings_and_expectations_that_are_not_known(client, caplog, headers, status, code):
    caplog.set_level(logging.INFO, "fastdecode.api.access")
    headers = {"Content-Type": "application/json", **headers}
    async with client.http.post("/v1/completions", data=b"no gzip", headers=headers) as response:
        assert response.status == status
        error = (await response.json())["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == code
        if status == 415:
            assert response.headers["Accept-Encoding"] == "gzip, deflate"  # RFC 9110, 15.5.16
    [line] = [record for record in caplog.records if record.name == "fastdecode.api.access"]
    assert line.fields["error"] == error["message"] and json.dumps(error["message"]) in line.getMessage()


@pytest.mark.parametrize(
    ("coding", "encode"),
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data, wbits=-zlib.MAX_WBITS)),
        ("identity", bytes),
    ],
    ids=["gzip", "upper case", "deflate", "deflate without a header", "identity"],
)
async def test_codings_that_are_known(client, coding, encode):
    headers = {"Content-Type": "application/json", "Content-Encoding": coding, "Expect": "100-continue"}
    body = encode(json.dumps(ASK | {"max_tokens": 1}).encode())
    async with client.http.post("/v1/completions", data=body, headers=headers) as response:
        assert response.status == 200, await response.text()


async def test_an_unknown_expectation_where_no_route_fits(client):
    for method, path, status in (("POST", "/v1/nothing", 404), ("DELETE", "/v1/completions", 405)):
        async with client.http.request(method, path, headers={"Expect": "200-ok"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (417, "expectation_failed")
        async with client.http.request(method, path, headers={"Expect": "100-continue"}) as response:
            assert response.status == status
            assert (await response.json())["error"]["message"].endswith(("here", path))
            assert response.headers.get("Allow") == ("POST" if status == 405 else None)


async def test_a_small_body_that_becomes_a_large_one(engine, tokenizer):
    async with served(engine, tokenizer, max_body_bytes=10_000) as client:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        data = gzip.compress(b" " * 5_000_000)
        assert len(data) < 10_000
        async with client.http.post("/v1/completions", data=data, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (413, "body_too_large")


async def test_a_body_too_large(engine, tokenizer):
    async with served(engine, tokenizer, max_body_bytes=10_000) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.openai.completions.create(**ASK | {"prompt": "x" * 1_000_000})
        assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
        assert (await client.openai.completions.create(**ASK)).usage  # the server goes on


async def test_unknown_paths_and_methods(client):
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/a/b", 404),
    ):
        async with client.http.request(method, path) as response:
            assert response.status == status
            error = (await response.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert ("Allow" in response.headers) == (status == 405)


async def test_a_path_with_two_lines_is_one_line_in_the_access_log(client, caplog):
    """Otherwise a client could write lines of its own into the log."""
    caplog.set_level(logging.INFO, "fastdecode.api.access")
    async with client.http.get(yarl.URL("/x%0A127.0.0.1", encoded=True)) as response:
        assert response.status == 404
    [line] = [record.getMessage() for record in caplog.records if record.name == "fastdecode.api.access"]
    assert line.startswith("GET /x%0A127.0.0.1 404 ") and "\n" not in line


async def test_the_api_key(engine, tokenizer):
    async with served(engine, tokenizer, api_keys=["sesame"], key="sesame") as client:
        assert (await client.openai.completions.create(**ASK)).usage
    for key in ("Sesame", "sesame2", "x"):
        async with served(engine, tokenizer, api_keys=["sesame"], key=key) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.openai.completions.create(**ASK)
            assert caught.value.code == "invalid_api_key"
            async with client.http.get("/metrics") as response:
                assert response.status == 401
            async with client.http.get("/nothing") as response:
                assert response.status == 401
            async with client.http.get("/health") as response:
                assert response.status == 200
            async with aiohttp.request("GET", f"http://127.0.0.1:{client.server.port}/v1/models") as response:
                assert response.status == 401  # no header


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer sesame", "X-API-Key": "other"}, 200),
        ({"Authorization": "Bearer other", "X-API-Key": "sesame"}, 200),
        ({"Authorization": "Basic sesame"}, 401),
        ({"Authorization": "Bearer other", "X-API-Key": "another"}, 401),
    ],
    ids=str,
)
async def test_one_of_two_keys_suffices(engine, tokenizer, headers, status):
    async with served(engine, tokenizer, api_keys=["sesame"], key="sesame") as client:
        url = f"http://127.0.0.1:{client.server.port}/v1/models"
        async with aiohttp.request("GET", url, headers=headers) as response:
            assert response.status == status


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_json_too_deep_to_be_repeated_is_refused(client, path):
    deep = b'{"a":' * 300 + b"1" + b"}" * 300
    body = b'{"model": "%b", "stream": true, "input": "x", "prompt": "x", "metadata": %b}' % (MODEL.encode(), deep)
    headers = {"Content-Type": "application/json"}
    async with client.http.post(path, data=body, headers=headers) as response:
        assert response.status == 400
        assert "deep" in (await response.json())["error"]["message"]


async def test_a_fault_behind_the_headers_of_a_stream_ends_the_connection(client, monkeypatch):
    """A second status line would stand within the body."""
    monkeypatch.setattr(Answer, "end", lambda *_, **__: 1 / 0)
    received = b""
    async with client.http.post("/v1/completions", json=ASK | {"stream": True}) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            async for chunk in response.content.iter_any():
                received += chunk
    assert b"HTTP/1.1" not in received


async def test_more_choices_than_the_queue_can_ever_take(tokenizer, tmp_path):
    """A 400, because no retry after a 429 could succeed."""
    async with (
        real_engine(make_checkpoint("llama-gqa"), tmp_path, max_queued=3) as engine,
        served(engine, tokenizer) as client,
    ):
        assert len((await client.openai.completions.create(**ASK, n=3)).choices) == 3
        for body, param in ((ASK | {"n": 4}, "n"), (ASK | {"prompt": [[5], [6]], "n": 2}, "n"), (CHAT | {"n": 4}, "n")):
            status, answer = await client.post(
                "/v1/chat/completions" if "messages" in body else "/v1/completions", body
            )
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "too_many_choices")
            assert "4 choices; this server queues at most 3 (--max-queued)" in answer["error"]["message"]
        status, answer = await client.post("/v1/completions", ASK | {"prompt": [[5], [6], [7], [8]]})
        assert (status, answer["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: minus one\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: " + b"x" * 20000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["length", "header", "version", "long", "chunk"],
)
async def test_bytes_that_are_not_http_get_a_400_and_a_line_in_the_log(client, caplog, sent):
    reader, writer = await asyncio.open_connection("127.0.0.1", client.server.port)
    writer.write(sent)
    assert (await reader.readline()).split()[1] == b"400"
    writer.close()
    (record,) = [r for r in caplog.records if r.name.startswith(("fastdecode", "aiohttp")) and r.levelno >= 30]
    assert record.levelname == "WARNING" and record.exc_info is None
    assert "not HTTP" in record.getMessage() and "\n" not in record.getMessage() and len(record.getMessage()) < 400
    assert (await client.openai.completions.create(**ASK)).choices
