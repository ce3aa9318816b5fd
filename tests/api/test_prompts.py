"""The fields about a prompt and a text: echo and scores of the prompt, cuts, special tokens, continuations; the
model's names and its defaults of sampling."""

from __future__ import annotations

import json

import openai
import pytest
import torch
from engines.api_client import MODEL, served
from engines.real_engine import real_engine
from engines.scripted_engine import ScriptedEngine
from models import tokenizers_made

from fastdecode.api.defaults import SamplingDefaults
from fastdecode.engine.state.request import TokenEvent
from fastdecode.text.tokenizer import Tokenizer

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind."
ASK = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "temperature": 0}


@pytest.fixture
async def client(checkpoint, tokenizer, tmp_path):
    """Its prompts are prefilled in chunks of at most 16 rows, so a scored prompt has several."""
    async with (
        real_engine(checkpoint, tmp_path, max_batch_tokens=16, max_batch_size=8, prefix_cache=True) as engine,
        served(engine, tokenizer) as client,
    ):
        yield client


def prompt_logprobs(model, ids):
    """log_softmax of the logits that precede each token but the first, [len(ids) - 1, vocab_size]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), -1)


# -- the prompt in the answer -----------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_echo_with_logprobs_equals_transformers(client, model, tokenizer, max_tokens):
    ids = tokenizer.encode(PROMPT)
    expected = prompt_logprobs(model, ids)
    answer = await client.openai.completions.create(**ASK | {"max_tokens": max_tokens}, echo=True, logprobs=2)
    choice, n = answer.choices[0], len(ids)
    assert choice.text.startswith(PROMPT) and answer.usage.completion_tokens == max_tokens
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    own = [expected[i, token].item() for i, token in enumerate(ids[1:])]
    assert logprobs.token_logprobs[1:n] == pytest.approx(own, abs=1e-3)
    best = expected.topk(2).values.tolist()
    for i in range(1, n):
        assert sorted(logprobs.top_logprobs[i].values(), reverse=True)[:2] == pytest.approx(best[i - 1], abs=1e-3)
    assert len(logprobs.tokens) == n + max_tokens
    assert "".join(logprobs.tokens[:n]) == PROMPT
    assert logprobs.text_offset[:n] == [len("".join(logprobs.tokens[:i])) for i in range(n)]
    assert all(offset >= len(PROMPT) for offset in logprobs.text_offset[n:])


async def test_echo_of_tokens_of_several_prompts_and_streamed(client, tokenizer):
    prompts = [tokenizer.encode("The lazy dog"), tokenizer.encode("Zwölf Boxkämpfer")]
    whole = await client.openai.completions.create(**ASK | {"prompt": prompts}, n=2, echo=True)
    plain = await client.openai.completions.create(**ASK | {"prompt": prompts}, n=2)
    heads = ["The lazy dog"] * 2 + ["Zwölf Boxkämpfer"] * 2
    assert [c.text for c in whole.choices] == [h + c.text for h, c in zip(heads, plain.choices, strict=True)]
    texts = [""] * 4
    async for chunk in await client.openai.completions.create(**ASK | {"prompt": prompts}, n=2, echo=True, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.quick
async def test_prompt_logprobs_equal_transformers(client, model, tokenizer):
    ids = tokenizer.encode(PROMPT)
    expected = prompt_logprobs(model, ids)
    status, body = await client.post("/v1/completions", ASK | {"prompt_logprobs": 3})
    assert status == 200
    entries = body["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(ids)
    for row, token, entry in zip(expected, ids[1:], entries[1:], strict=True):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(row[token].item(), abs=1e-3)
        assert own["rank"] == 1 + (row > row[token]).sum().item()
        assert own["decoded_token"] == tokenizer.token_bytes(token).decode(errors="backslashreplace")
        likeliest = {str(t) for t in row.topk(3).indices.tolist()}
        assert set(entry) == likeliest | {str(token)}


@pytest.mark.quick
async def test_prompt_logprobs_of_a_chat_are_beside_its_choices(client):
    """As vLLM has them: the choices share their prompt."""
    messages = [{"role": "user", "content": PROMPT}]
    fields = {"messages": messages, "max_tokens": 1, "n": 2, "prompt_logprobs": 0}
    status, body = await client.post("/v1/chat/completions", fields)
    assert status == 200, body
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert all("prompt_logprobs" not in choice for choice in body["choices"])


async def test_scored_prompts_through_the_transformers_backend(checkpoint, tmp_path, model, tokenizer):
    """The other backend computes the logits of all scored rows within the model's own pass."""
    pytest.importorskip("greenlet")
    async with (
        real_engine(checkpoint, tmp_path, backend="transformers", max_batch_tokens=16, max_batch_size=8) as engine,
        served(engine, tokenizer) as client,
    ):
        answer = await client.openai.completions.create(**ASK, echo=True, logprobs=0)
    ids = tokenizer.encode(PROMPT)
    expected = prompt_logprobs(model, ids)
    own = [expected[i, token].item() for i, token in enumerate(ids[1:])]
    assert answer.choices[0].logprobs.token_logprobs[1 : len(ids)] == pytest.approx(own, abs=1e-3)


async def test_a_cached_prefix_does_not_hide_the_scores(client):
    long = {"prompt": PROMPT * 10, "max_tokens": 1}
    first = await client.openai.completions.create(**ASK | long)
    scored = await client.openai.completions.create(**ASK | long, echo=True, logprobs=0)
    again = await client.openai.completions.create(**ASK | long)
    assert [a.usage.prompt_tokens_details.cached_tokens > 0 for a in (first, scored, again)] == [False, False, True]
    assert all(value is not None for value in scored.choices[0].logprobs.token_logprobs[1:])


async def test_a_cache_salt_of_any_length_takes_little_memory(tokenizer):
    """The engine keeps it with every prefix that it caches."""
    salts = [None, "", "x" * 1_000_000, "x" * 1_000_000, "x" * 999_999, "y"]
    engine = ScriptedEngine(*[[5]] * len(salts))
    async with served(engine, tokenizer) as client:
        for salt in salts:
            status, _ = await client.post("/v1/completions", {"prompt": "x", "cache_salt": salt})
            assert status == 200
    none, empty, *others = [params.cache_salt for params in engine.params]
    assert none == empty == "" and max(map(len, others)) == 64
    assert others[0] == others[1] and len(set(others)) == 3


async def test_cache_salt_keeps_prefixes_apart(client):
    async def cached(**fields):
        answer = await client.openai.completions.create(
            **ASK | {"prompt": PROMPT * 10, "max_tokens": 1}, extra_body=fields
        )
        return answer.usage.prompt_tokens_details.cached_tokens > 0

    salts = [{}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": "b"}]
    assert [await cached(**salt) for salt in salts] == [False, False, True, False, True, True]


# -- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_best_of_gives_the_likeliest(client):
    ask = ASK | {"temperature": 1.5, "seed": 4, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    every = await client.openai.completions.create(**ask, n=6, logprobs=0)
    means = [(sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs), c.text) for c in every.choices]
    best = await client.openai.completions.create(**ask, n=2, best_of=6)
    assert [c.text for c in best.choices] == [text for _, text in sorted(means, key=lambda pair: -pair[0])[:2]]
    assert [c.index for c in best.choices] == [0, 1]
    assert best.choices[0].logprobs is None
    assert best.usage == every.usage  # what was generated, not what is shown


async def test_truncate_prompt_tokens(client, tokenizer):
    ids = tokenizer.encode(PROMPT)
    short = await client.openai.completions.create(**ASK | {"prompt": ids[-7:]})
    cut = await client.openai.completions.create(**ASK, extra_body={"truncate_prompt_tokens": 7})
    assert (cut.choices[0].text, cut.usage.prompt_tokens) == (short.choices[0].text, 7)
    echo = await client.openai.completions.create(**ASK, echo=True, extra_body={"truncate_prompt_tokens": 7})
    assert echo.choices[0].text == tokenizer.decode(ids[-7:]) + short.choices[0].text
    huge = ASK | {"prompt": [5] * 5000}
    answer = await client.openai.completions.create(**huge, extra_body={"truncate_prompt_tokens": -1})
    assert answer.usage.prompt_tokens == 1024 - 5


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
async def test_special_tokens_and_stop_strings_in_the_text(tokenizer, spell, skip, include):
    pad, end = 2, 1
    script = [*spell("a"), pad, *spell("b"), TokenEvent(end, finish_reason="stop")]
    fields = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    async with served(ScriptedEngine(script, spell("one STOP two")), tokenizer) as client:
        answer = await client.openai.completions.create(**ASK, extra_body=fields)
        expected = "ab" if skip else "a<pad>b</s>" if include else "a<pad>b"
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
        answer = await client.openai.completions.create(**ASK, stop="STOP", extra_body=fields)
        assert answer.choices[0].text == ("one STOP" if include else "one ")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["<pad>"], "one"),
        (["<s>", "<pad>"], "one"),
        (["ne<pad>"], "o"),
        (["<pad> tw"], "one"),
        (["<pad>\n"], None),  # the text goes on otherwise
        (["pad", "<", ">"], None),  # parts of a special token's name are not in the text
        (["e t"], "on"),  # the text without special tokens has it
    ],
    ids=str,
)
async def test_a_stop_string_may_be_a_special_token(tokenizer, spell, stop, expected):
    """Special tokens are no text by default, and end it all the same."""
    script, text, whole = [*spell("one"), 2, *spell(" two"), 0, *spell("!")], "one<pad> two<s>!", "one two!"
    ask = ASK | {"max_tokens": 50, "stop": stop}
    async with served(ScriptedEngine(*[[*script]] * 4), tokenizer) as client:

        async def complete(**fields):
            return (await client.openai.completions.create(**ask, **fields)).choices[0]

        choice = await complete(logprobs=0)
        assert (choice.text, choice.finish_reason) == ((whole, "length") if expected is None else (expected, "stop"))
        streamed = ""
        async for chunk in await client.openai.completions.create(**ask, stream=True):
            streamed += chunk.choices[0].text
        assert streamed == choice.text
        kept = await complete(extra_body={"include_stop_str_in_output": True})
        assert kept.text in ([whole] if expected is None else [expected + s for s in stop])
        shown = await complete(extra_body={"skip_special_tokens": False})
        assert text.startswith(shown.text)
        assert shown.finish_reason == ("stop" if any(s in text for s in stop) else "length")


@pytest.mark.quick
@pytest.mark.parametrize("stop", ["</s>", "ne</s>"])
async def test_a_special_stop_string_of_a_sentence_piece_tokenizer(tmp_path, stop):
    tokenizer = Tokenizer.from_dir(tokenizers_made.metaspace(tmp_path))
    script = tokenizer.encode("it is one</s>more", add_special_tokens=False)
    async with served(ScriptedEngine(script), tokenizer) as client:
        choice = (await client.openai.completions.create(**ASK, stop=stop)).choices[0]
    assert (choice.text, choice.finish_reason) == (" it is one"[: -len(stop) + 4 or None], "stop")


@pytest.mark.quick
async def test_add_generation_prompt_and_continue_final_message(tmp_path):
    directory = tokenizers_made.byte_level(tmp_path, chat_template=tokenizers_made.CHATML)
    tokenizer = Tokenizer.from_dir(directory)
    engine = ScriptedEngine([5], [5], [5], [5])
    question, begun = {"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two"}
    in_parts = begun | {"content": [{"type": "text", "text": "user"}, {"type": "text", "text": "|"}]}
    async with served(engine, tokenizer) as client:
        for messages, fields in (
            ([question], {}),
            ([question], {"add_generation_prompt": False}),
            ([question, begun], {"continue_final_message": True}),
            ([question, in_parts], {"continue_final_message": True}),
        ):
            await client.openai.chat.completions.create(model=MODEL, messages=messages, extra_body=fields)
        prompts = [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in engine.prompts]
        head = "<|im_start|>user\nCount.<|im_end|>\n"
        turn = head + "<|im_start|>assistant\n"
        assert prompts == [turn, head, turn + "One, two", turn + "user\n|"]
        for fields in ({"add_generation_prompt": True}, {"messages": [question]}):
            body = {"messages": [question, begun], "continue_final_message": True} | fields
            status, answer = await client.post("/v1/chat/completions", body)
            assert (status, answer["error"]["param"]) == (400, "continue_final_message")


async def test_reasoning_apart_from_the_answer(tmp_path):
    """A template that shows <think> splits the message; a prompt that ends with it begins within the reasoning."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if open %}<think>{% endif %}{# </think> #}"
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path, chat_template=template))
    ids = {tokenizer.token_bytes(i): i for i in range(len(tokenizer.tokens_from(0)))}

    def spell(text):
        return [ids[bytes([b])] for b in text.encode()]

    scripts = ["<think>hm, hm</think>\n\nYes.", "hm, hm</think>Yes.", "<think>hm, hm</think>\n\nYes.", "Yes."]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "So?"}]}
    async with served(ScriptedEngine(*map(spell, scripts)), tokenizer) as client:
        for fields in ({}, {"chat_template_kwargs": {"open": True}}):
            message = (await client.openai.chat.completions.create(**chat, extra_body=fields)).choices[0].message
            assert (message.content, message.reasoning_content) == ("Yes.", "hm, hm")
        content = reasoning = ""
        async for chunk in await client.openai.chat.completions.create(**chat, stream=True):
            content += chunk.choices[0].delta.content or ""
            reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        assert (content, reasoning) == ("Yes.", "hm, hm")
        message = (await client.openai.chat.completions.create(**chat)).choices[0].message
        assert message.content == "Yes." and not hasattr(message, "reasoning_content")
    async with served(ScriptedEngine(spell(scripts[0])), tokenizer, reasoning_parser="none") as client:
        message = (await client.openai.chat.completions.create(**chat)).choices[0].message
        assert message.content == scripts[0]


async def test_a_grammar_holds_behind_the_reasoning(checkpoint, tmp_path):
    """A random model that must begin its answer with reasoning, which a bias ends."""
    pytest.importorskip("llguidance")
    from models.checkpoints import write_tokenizer

    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<think>{# </think> #}"
    directory = write_tokenizer(tmp_path, plain=("<think>", "</think>"), chat_template=template)
    tokenizer = Tokenizer.from_dir(directory)
    close, thought = str(tokenizer.token_id("</think>")), 0
    async with real_engine(checkpoint, tmp_path) as engine, served(engine, tokenizer) as client:
        for seed in range(4):
            answer = await client.openai.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "So?"}],
                seed=seed,
                max_completion_tokens=600,
                logit_bias={close: 7},
                extra_body={"guided_choice": ["yes", "no"], "ignore_eos": True},
            )
            choice = answer.choices[0]
            assert choice.finish_reason == "stop" and choice.message.content in ("yes", "no")
            thought += bool(getattr(choice.message, "reasoning_content", None))
    assert thought


# -- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.quick
async def test_defaults_of_sampling(tokenizer, tmp_path):
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 7, "repetition_penalty": "x"})
    )
    engine = ScriptedEngine([5], [5])
    async with served(engine, tokenizer, defaults=SamplingDefaults.from_dir(tmp_path)) as client:
        await client.post("/v1/completions", {"prompt": "x"})
        await client.post("/v1/completions", {"prompt": "x", "temperature": 1, "top_k": 0, "top_p": 1})
    params = [(p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty) for p in engine.params]
    assert params == [(0.6, 20, 0.95, 0.0, 1.0), (1.0, 0, 1.0, 0.0, 1.0)]


@pytest.mark.quick
async def test_the_default_length_of_a_chat(tmp_path):
    """generation_config's max_new_tokens, where a request gives no length of its own."""
    tokenizer = Tokenizer.from_dir(tokenizers_made.byte_level(tmp_path, chat_template=tokenizers_made.CHATML))
    engine, ask = ScriptedEngine([5], [5], [5]), {"messages": [{"role": "user", "content": "x"}]}
    defaults = SamplingDefaults.from_config({"max_new_tokens": 40})
    async with served(engine, tokenizer, defaults=defaults) as client:
        for path, body in (
            ("/v1/chat/completions", ask),
            ("/v1/chat/completions", ask | {"max_tokens": 7}),
            ("/v1/responses", {"input": "x"}),
        ):
            assert (await client.post(path, body))[0] == 200
    assert [p.max_tokens for p in engine.params] == [40, 7, 40]


@pytest.mark.quick
async def test_several_names(tokenizer):
    async with served(ScriptedEngine([5], [5]), tokenizer, names=("big", "org/big")) as client:
        assert [m.id async for m in client.openai.models.list()] == ["big", "org/big"]
        assert (await client.openai.models.retrieve("org/big")).id == "org/big"
        assert (await client.openai.completions.create(**ASK | {"model": "org/big"})).model == "org/big"
        status, answer = await client.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["model"]) == (200, "big")
        with pytest.raises(openai.NotFoundError, match="only 'big', 'org/big'"):
            await client.openai.completions.create(**ASK | {"model": "small"})
