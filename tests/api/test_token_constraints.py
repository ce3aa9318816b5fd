"""min_tokens, bad_words and allowed_token_ids through the real server; transformers' generate judges the tokens."""

from __future__ import annotations

import pytest
import torch
from engines.api_client import MODEL, served
from engines.scripted_engine import ScriptedEngine
from models.checkpoints import VOCAB_SIZE

PROMPT = "The quick brown fox"
ASK = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
VARIED = {"repetition_penalty": 2.0}  # without it the model says one token over and over
END = 1


async def compare(client, model, tokenizer, ask, **options):
    """The answer to `ask` has the text that transformers generates greedily with `options`; returns its tokens."""
    ids = tokenizer.encode(PROMPT)
    out = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, repetition_penalty=2.0, **options)
    expected = out[0, len(ids) :].tolist()
    answer = await client.openai.completions.create(**ASK, extra_body=VARIED | ask)
    assert answer.usage.completion_tokens == len(expected)
    assert answer.choices[0].text == tokenizer.decode(ids + expected)[len(PROMPT) :]
    return expected


@pytest.mark.quick
@pytest.mark.parametrize("least", [0, 1, 7, 24])
async def test_min_tokens_equals_transformers(client, model, tokenizer, least):
    likely_end = {"logit_bias": {str(END): 60}}
    expected = await compare(
        client,
        model,
        tokenizer,
        likely_end | {"min_tokens": least},
        min_new_tokens=least,
        sequence_bias={(END,): 60.0},
    )
    assert len(expected) == min(least + 1, 24)


async def test_min_tokens_forbids_stop_token_ids_too(client, model, tokenizer):
    generated = await compare(client, model, tokenizer, {})
    stop = generated[2]
    answer = await client.openai.completions.create(**ASK, extra_body=VARIED | {"stop_token_ids": [stop]})
    assert answer.usage.completion_tokens == 3
    extra = VARIED | {"stop_token_ids": [stop], "min_tokens": 10}
    assert (await client.openai.completions.create(**ASK, extra_body=extra)).usage.completion_tokens >= 10


async def test_the_text_of_the_first_min_tokens_is_not_searched_for_stop_strings(tokenizer):
    spell = {tokenizer.token_bytes(i): i for i in range(VOCAB_SIZE)}
    tokens = [spell[bytes([b])] for b in b"a.b.c.d."]
    for least, expected in ((0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c")):
        async with served(ScriptedEngine(tokens), tokenizer) as client:
            answer = await client.openai.completions.create(**ASK, stop=".", extra_body={"min_tokens": least})
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")


@pytest.mark.quick
async def test_bad_words_equal_transformers(client, model, tokenizer):
    """Words of one token and of several, taken from what the model would say without them."""
    generated = await compare(client, model, tokenizer, {})
    words = [tokenizer.decode(generated[:1]), tokenizer.decode(generated[2:4]), tokenizer.decode(generated[5:8])]
    variants = {tuple(tokenizer.encode(s + w.lstrip(), add_special_tokens=False)) for w in words for s in ("", " ")}
    without = await compare(
        client, model, tokenizer, {"bad_words": words}, bad_words_ids=[list(word) for word in variants]
    )
    assert without != generated


@pytest.mark.quick
async def test_allowed_token_ids_equal_transformers(client, model, tokenizer):
    allowed = [END, *range(40, 60), VOCAB_SIZE - 1]
    expected = await compare(
        client, model, tokenizer, {"allowed_token_ids": allowed}, prefix_allowed_tokens_fn=lambda *_: allowed
    )
    assert set(expected) <= set(allowed)


async def test_a_mask_holds_for_drawn_tokens_and_against_a_bias(client, tokenizer):
    """A bias of 100 does not bring back a token that is not allowed."""
    allowed = list(range(40, 60))
    extra = {"allowed_token_ids": allowed, "logit_bias": {"200": 100}, "ignore_eos": True, "repetition_penalty": 1.3}
    answer = await client.openai.completions.create(
        **ASK | {"temperature": 2.0}, n=4, seed=5, logprobs=0, extra_body=extra
    )
    texts = {tokenizer.token_bytes(token).decode(errors="replace") for token in allowed}
    for choice in answer.choices:
        assert set(choice.logprobs.tokens) <= texts


async def test_tokens_that_nothing_allows_are_an_error_and_cost_nobody_else(client, tokenizer):
    async def ask(fields):
        return await client.post("/v1/completions", ASK | fields)

    [word] = tokenizer.encode("x", add_special_tokens=False)
    status, body = await ask({"allowed_token_ids": [word], "bad_words": ["x"]})
    assert (status, body["error"]["code"]) == (400, "invalid_value")
    assert "allow no next token" in body["error"]["message"]
    assert (await ask({}))[0] == 200
