"""The API over a real engine, R-node and checkpoint; results are compared with transformers."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
import torch
from engines.api_client import MODEL, served
from engines.real_engine import real_engine
from engines.toy import until

PROMPT = "The quick brown fox"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
ASK = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
CHAT = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}


def greedy(model, ids, n):
    """The greedy continuation of a prompt by transformers: at most n token ids."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False)
    return out[0, len(ids) :].tolist()


def chat_prompt(tokenizer, messages):
    """The token ids of a conversation: the template itself writes the special tokens."""
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_models(client):
    assert [m.id async for m in client.openai.models.list()] == [MODEL]
    assert (await client.openai.models.retrieve(MODEL)).owned_by == "fastdecode"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.openai.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


@pytest.mark.quick
async def test_models_show_the_longest_sequence_that_the_kv_cache_holds(checkpoint, tokenizer, tmp_path):
    async with real_engine(checkpoint, tmp_path, kv_bytes=2**19) as engine, served(engine, tokenizer) as client:
        shown = (await client.openai.models.retrieve(MODEL)).max_model_len
        assert 128 < shown < engine.max_model_len
        with pytest.raises(openai.BadRequestError) as caught:
            await client.openai.completions.create(**ASK | {"prompt": [5] * shown})
        assert caught.value.code == "context_length_exceeded"
        answer = await client.openai.completions.create(**ASK | {"prompt": [5] * (shown - 1)})
        assert answer.usage.completion_tokens == 1


@pytest.mark.quick
async def test_completion_equals_the_greedy_text_of_transformers(client, model, tokenizer):
    ids = tokenizer.encode(PROMPT)
    expected = greedy(model, ids, 12)
    answer = await client.openai.completions.create(**ASK)
    assert answer.choices[0].text == tokenizer.decode(ids + expected)[len(tokenizer.decode(ids)) :]
    assert answer.choices[0].finish_reason == ("stop" if expected[-1] == 1 else "length")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(expected))
    assert usage.total_tokens == len(ids) + len(expected)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer._request_id == answer.id


@pytest.mark.quick
async def test_chat_equals_the_greedy_text_of_transformers(client, model, tokenizer):
    ids = chat_prompt(tokenizer, MESSAGES)
    expected = greedy(model, ids, 12)
    answer = await client.openai.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == tokenizer.decode(expected)
    assert answer.choices[0].message.role == "assistant"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(expected))
    assert answer.object == "chat.completion"


@pytest.mark.parametrize("n", [1, 3])
async def test_streamed_and_whole_completions_agree(client, n):
    ask = ASK | {"temperature": 1.0, "seed": 11, "n": n, "prompt": [PROMPT, "The lazy dog"]}
    whole = await client.openai.completions.create(**ask)
    texts, reasons, usage = [""] * 2 * n, [None] * 2 * n, None
    async for chunk in await client.openai.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == list(range(2 * n))
    assert usage == whole.usage


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 3])
async def test_streamed_and_whole_chats_agree(client, n):
    ask = CHAT | {"temperature": 1.0, "seed": 11, "n": n}
    whole = await client.openai.chat.completions.create(**ask)
    texts, reasons, roles, usage = [""] * n, [None] * n, [None] * n, None
    async for chunk in await client.openai.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] = roles[choice.index] or choice.delta.role
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert roles == ["assistant"] * n
    assert usage == whole.usage


async def test_prompts_in_all_four_forms(client, tokenizer):
    one, two = tokenizer.encode(PROMPT), tokenizer.encode("Zwölf")
    texts = {}
    for prompt in (PROMPT, "Zwölf"):
        answer = await client.openai.completions.create(**ASK | {"prompt": prompt})
        texts[prompt] = answer.choices[0].text
    for prompt in ([PROMPT, "Zwölf"], [one, two]):
        answer = await client.openai.completions.create(**ASK | {"prompt": prompt})
        assert [choice.text for choice in answer.choices] == list(texts.values())
        assert answer.usage.prompt_tokens == len(one) + len(two)
    answer = await client.openai.completions.create(**ASK | {"prompt": one})
    assert answer.choices[0].text == texts[PROMPT]


async def test_a_seed_fixes_every_choice(client):
    wild = {"temperature": 2.0, "max_tokens": 40}

    async def texts(n, seed):
        answer = await client.openai.completions.create(**ASK | {"n": n, "seed": seed} | wild)
        return [choice.text for choice in answer.choices]

    three = await texts(3, 5)
    assert three == await texts(3, 5)
    assert len(set(three)) == 3
    assert await texts(1, 5) == three[:1]
    assert await texts(1, -5) == await texts(1, -5)
    assert await texts(1, None) != await texts(1, None)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"temperature": 2},
        {"top_p": 0.5},
        {"top_p": 0},
        {"extra_body": {"top_k": 1}},
        {"extra_body": {"top_k": -1}},
        {"extra_body": {"min_p": 0.1}},
        {"stop": ["a", "b"]},
        {"user": "someone"},
        {"seed": 2**63 - 1},
    ],
    ids=str,
)
async def test_supported_fields(client, fields):
    answer = await client.openai.completions.create(**ASK | {"temperature": 1.0} | fields)
    assert answer.usage.completion_tokens >= 1
    answer = await client.openai.chat.completions.create(**CHAT | {"temperature": 1.0} | fields)
    assert answer.usage.completion_tokens >= 1


@pytest.mark.parametrize("fields", [{"extra_body": {"top_k": 1}}, {"top_p": 0}, {"extra_body": {"min_p": 1}}], ids=str)
async def test_the_narrowest_sampling_is_greedy(client, fields):
    best = await client.openai.completions.create(**ASK)
    answer = await client.openai.completions.create(**ASK | {"temperature": 1.0} | fields)
    assert answer.choices[0].text == best.choices[0].text


@pytest.mark.parametrize("penalty", [1.0, 1.7, 0.6])
@pytest.mark.parametrize("bias", [{}, {None: -0.3}, {None: -100.0, 9: 0.4}], ids=str)
async def test_bias_and_repetition_penalty_equal_transformers(client, model, tokenizer, penalty, bias):
    """A bias for None applies to the first token of the answer without a bias."""
    ids = tokenizer.encode(PROMPT)
    [first] = greedy(model, ids, 1)
    bias = {first if token is None else token: value for token, value in bias.items()}
    out = model.generate(
        torch.tensor([ids]),
        max_new_tokens=40,
        do_sample=False,
        repetition_penalty=penalty,
        sequence_bias={(token,): value for token, value in bias.items()} or None,
    )
    expected = out[0, len(ids) :].tolist()
    answer = await client.openai.completions.create(
        **ASK | {"max_tokens": 40, "logit_bias": {str(token): value for token, value in bias.items()}},
        extra_body={"repetition_penalty": penalty},
    )
    assert answer.usage.completion_tokens == len(expected)
    assert answer.choices[0].text == tokenizer.decode(ids + expected)[len(tokenizer.decode(ids)) :]


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 1.5), (-0.1, 2.0)])
async def test_frequency_and_presence_penalties_follow_openais_formula(client, model, tokenizer, frequency, presence):
    """Compare with OpenAI's formula, applied to the logits of transformers."""
    ids = chat_prompt(tokenizer, MESSAGES)
    generated = []
    while len(generated) < 40 and generated[-1:] != [1]:
        with torch.no_grad():
            logits = model(torch.tensor([ids + generated])).logits[0, -1].double()
        counts = torch.tensor(generated, dtype=torch.long).bincount(minlength=len(logits))
        generated.append(int((logits - counts * frequency - (counts > 0) * presence).argmax()))
    penalties = {"frequency_penalty": frequency, "presence_penalty": presence, "max_completion_tokens": 40}
    answer = await client.openai.chat.completions.create(**CHAT | penalties)
    assert answer.choices[0].message.content == tokenizer.decode(generated)


async def test_stop_token_ids_and_ignore_eos(client, model, tokenizer):
    ids = tokenizer.encode(PROMPT)
    expected = greedy(model, ids, 12)
    stop = expected[4]
    first = expected.index(stop)
    answer = await client.openai.completions.create(**ASK, extra_body={"stop_token_ids": [stop]})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", first + 1)
    answer = await client.openai.completions.create(**ASK | {"max_tokens": 200}, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 200)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_logprobs_equal_transformers(client, model, tokenizer, streamed):
    ids = tokenizer.encode(PROMPT)
    generated = greedy(model, ids, 12)
    with torch.no_grad():
        logits = model(torch.tensor([ids + generated])).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)
    best = expected.topk(3).values.tolist()
    answer = await client.openai.completions.create(**ASK, logprobs=3, stream=streamed)
    choices = [chunk.choices[0] async for chunk in answer] if streamed else answer.choices
    logprobs = [value for choice in choices for value in choice.logprobs.token_logprobs]
    top = [alternatives for choice in choices for alternatives in choice.logprobs.top_logprobs]
    shown = [token for token in generated if token != 1]
    assert logprobs == pytest.approx([expected[i, token].item() for i, token in enumerate(shown)], abs=1e-3)
    assert [sorted(t.values(), reverse=True) for t in top] == [pytest.approx(b, abs=1e-3) for b in best[: len(shown)]]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_chat_logprobs(client, streamed):
    answer = await client.openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=streamed)
    choices = [chunk.choices[0] async for chunk in answer] if streamed else answer.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert entries
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
        assert len(entry.top_logprobs) == 2 and entry.bytes is not None
    text = "".join(c.delta.content or "" for c in choices) if streamed else choices[0].message.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == text


async def test_text_parts_and_roles(client, tokenizer):
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "are you?"}]
    developer = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    joined = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who\nare you?"}]
    a = await client.openai.chat.completions.create(**CHAT | {"messages": developer})
    b = await client.openai.chat.completions.create(**CHAT | {"messages": joined})
    assert (a.choices, a.usage) == (b.choices, b.usage)


async def test_an_answer_can_be_sent_back(client):
    """An answer, dumped by the client's own classes, is a valid message of the next request."""
    answer = await client.openai.chat.completions.create(**CHAT)
    messages = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    assert (await client.openai.chat.completions.create(**CHAT | {"messages": messages})).usage.completion_tokens


# -- clients that disconnect, queues that fill ------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
async def test_a_client_that_disconnects_while_decoding_frees_its_pages(client, engine, streamed):
    ask = ASK | {"max_tokens": 900, "n": 2}

    async def read():
        answer = await client.openai.completions.create(**ask, stream=streamed, extra_body={"ignore_eos": True})
        async for _ in answer:
            pass

    reading = asyncio.create_task(read())
    await until(lambda: engine.stats.running == 2 and engine.totals.generated_tokens > 4)
    assert engine.stats.nodes[0].pages_used > 0
    reading.cancel()
    await asyncio.wait([reading])
    await until(lambda: engine.stats.nodes[0].pages_used == 0 and engine.stats.running == 0)
    assert engine.totals.generated_tokens < 1800
    metrics = await client.metrics()
    assert metrics["fastdecode:num_requests_running", ""] == 0
    assert metrics["fastdecode:kv_cache_usage_perc", ""] == 0
    assert metrics["fastdecode:request_success_total", "abort"] == 2


async def test_a_client_that_disconnects_leaves_the_queue(checkpoint, tokenizer, tmp_path):
    async with (
        real_engine(checkpoint, tmp_path, mini_batches=1, max_batch_size=1) as engine,
        served(engine, tokenizer) as client,
    ):
        endless = ASK | {"max_tokens": 900, "extra_body": {"ignore_eos": True}, "stream": True}
        running = await client.openai.completions.create(**endless)
        await anext(running)
        waiting = asyncio.create_task(client.openai.completions.create(**ASK))
        await until(lambda: engine.stats.waiting == 1)
        waiting.cancel()
        await until(lambda: engine.stats.waiting == 0)
        assert engine.stats.running == 1
        await running.close()
        await until(lambda: engine.stats.nodes[0].pages_used == 0)


async def test_a_full_queue_is_a_429(checkpoint, tokenizer, tmp_path):
    async with (
        real_engine(checkpoint, tmp_path, mini_batches=1, max_batch_size=1, max_queued=1) as engine,
        served(engine, tokenizer) as client,
    ):
        endless = ASK | {"max_tokens": 900, "extra_body": {"ignore_eos": True}, "stream": True}
        running = await client.openai.completions.create(**endless)
        await anext(running)
        waiting = await client.openai.completions.create(**endless)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.openai.completions.create(**ASK)
        assert caught.value.response.headers["Retry-After"] == "1"
        assert (await client.metrics())["fastdecode:admission_rejections_total", ""] == 1
        await running.close()
        await waiting.close()


async def test_a_request_that_gives_way_is_paused_and_goes_on(checkpoint, tokenizer, tmp_path):
    async with (
        real_engine(checkpoint, tmp_path, mini_batches=1, max_batch_size=1) as engine,
        served(engine, tokenizer) as client,
    ):
        ask = ASK | {"max_tokens": 200, "extra_body": {"ignore_eos": True, "priority": 3}}
        alone = (await client.openai.completions.create(**ask)).choices[0].text
        assert engine.stats.totals.preemptions == 0
        giving_way = await client.openai.completions.create(**ask, stream=True)
        text = (await anext(giving_way)).choices[0].text
        await client.openai.completions.create(**ASK)
        assert engine.stats.totals.preemptions == 1
        text += "".join([c.choices[0].text async for c in giving_way])
        assert text == alone
        assert engine.scheduler.recomputed_tokens == 0, "no prompt was placed twice"


async def test_many_streams_at_once_get_their_own_texts(client, tokenizer):
    asks = [ASK | {"prompt": [3 + i] * (1 + 7 * i), "seed": i, "temperature": 1.0} for i in range(12)]
    alone = [(await client.openai.completions.create(**ask)).choices[0].text for ask in asks]

    async def streamed(ask):
        return "".join([c.choices[0].text async for c in await client.openai.completions.create(**ask, stream=True)])

    assert await asyncio.gather(*map(streamed, asks)) == alone


async def test_usage_counts_the_cached_tokens_of_a_conversation(checkpoint, model, tokenizer, tmp_path):
    async with (
        real_engine(checkpoint, tmp_path, prefix_cache=True) as engine,
        served(engine, tokenizer) as client,
    ):
        messages, reused = [{"role": "user", "content": "word " * 60}], []
        for _ in range(3):
            answer = await client.openai.chat.completions.create(**CHAT | {"messages": messages})
            expected = greedy(model, chat_prompt(tokenizer, messages), 12)
            assert answer.choices[0].message.content == tokenizer.decode(expected)
            reused.append(answer.usage.prompt_tokens_details.cached_tokens)
            assert reused[-1] < answer.usage.prompt_tokens
            reply = {"role": "assistant", "content": answer.choices[0].message.content}
            messages += [reply, {"role": "user", "content": "And then?"}]
        assert reused[0] == 0 < 128 <= reused[1] <= reused[2]
        metrics = await client.metrics()
        assert metrics["fastdecode:prefix_cache_hits_total", ""] == sum(reused)
        assert metrics["fastdecode:prefix_cache_queries_total", ""] == metrics["fastdecode:prompt_tokens_total", ""]


# -- health and metrics -----------------------------------------------------------------------------------------------


async def test_health_names_the_r_nodes(client, engine):
    async with client.http.get("/health") as response:
        body = await response.json()
        assert (response.status, body["status"]) == (200, "ok")
    node = engine.stats.nodes[0]
    assert body["nodes"][0]["url"] == node.url and body["nodes"][0]["isa"] == node.isa in body["isa"]
    await engine.stop()
    async with client.http.get("/health") as response:
        assert response.status == 503
    with pytest.raises(openai.InternalServerError) as caught:
        await client.openai.completions.create(**ASK)
    assert (caught.value.status_code, caught.value.code) == (503, "not_ready")


async def test_metrics_count_requests_and_tokens(client, tokenizer):
    answer = await client.openai.completions.create(**ASK, n=2, extra_body={"ignore_eos": True})
    metrics = await client.metrics()
    tokens, prompt = answer.usage.completion_tokens, answer.usage.prompt_tokens
    assert metrics["fastdecode:generation_tokens_total", ""] == tokens == 24
    assert metrics["fastdecode:prompt_tokens_total", ""] == 2 * prompt  # each choice prefills its own
    assert metrics["fastdecode:request_success_total", "length"] == 2
    assert metrics["fastdecode:num_preemptions_total", ""] == 0
    counts = {
        "time_to_first_token_seconds": 2,
        "inter_token_latency_seconds": tokens - 2,
        "e2e_request_latency_seconds": 2,
        "request_queue_time_seconds": 2,
    }
    for name, count in counts.items():
        assert metrics[f"fastdecode:{name}_count", ""] == count
        assert 0 <= metrics[f"fastdecode:{name}_sum", ""] < math.inf
    nodes = {name: value for (name, labels), value in metrics.items() if labels.endswith("r.sock")}
    assert nodes["fastdecode:r_node_alive"] == 1
    assert nodes["fastdecode:r_node_attention_seconds_total"] > 0
    assert nodes["fastdecode:r_node_calls_total"] > 0
    assert metrics["fastdecode:s_wait_for_r_seconds_total", ""] > 0
