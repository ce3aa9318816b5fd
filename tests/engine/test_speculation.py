"""Speculative decoding: the same tokens as without, and fewer steps."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from engines.real_engine import real_engine
from engines.scheduler_world import WORD, World
from engines.token_stream import submit, tokens_of
from models.checkpoints import VOCAB_SIZE, make_checkpoint, reference
from models.greedy import prompts
from models.hf_models import save_model

from fastdecode.engine.state.guesser import Guesser
from fastdecode.engine.state.request import SamplingParams
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.step.batch import Sampled


@pytest.mark.parametrize("backend", ["native", "transformers"])
async def test_guesses_change_no_token_and_save_steps(backend, tmp_path):
    """Tiny random models run in circles, so some guesses are right; prompts that repeat make wrong ones."""
    rng = random.Random(0)
    loop = [rng.randrange(3, VOCAB_SIZE) for _ in range(9)]
    given = [loop * 4, [rng.randrange(3, VOCAB_SIZE) for _ in range(200)], loop[:5] * 20, [5]]
    sampled = SamplingParams(max_tokens=60, temperature=0.7, top_p=0.9, seed=7, ignore_eos=True, logprobs=1)
    options = [
        SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True),
        sampled,
        SamplingParams(max_tokens=60, temperature=0.0, frequency_penalty=0.3, ignore_eos=True),
    ]
    answers, steps = [], []
    for guesses in (0, 7):
        async with real_engine(make_checkpoint("llama-gqa"), tmp_path, backend=backend, guesses=guesses) as engine:
            streams = [submit(engine, p, params) for p in given for params in options]
            answers.append(await asyncio.gather(*map(tokens_of, streams)))
            # Alone, a sequence that runs in circles takes as many steps as it has tokens, or fewer.
            before = engine.stats.totals.steps
            answers[-1].append(await tokens_of(submit(engine, loop * 4, options[0])))
            steps.append(engine.stats.totals.steps - before)
            totals = engine.stats.totals
    assert answers[0] == answers[1]
    assert 0 < totals.guessed_right < totals.guessed
    assert steps[1] < steps[0]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("qwen3.5", "native"),
        ("qwen3-next", "native"),
        ("falcon_h1", "transformers"),
        ("lfm2", "transformers"),
        ("qwen3_5_text", "transformers"),
    ],
)
@pytest.mark.parametrize("state_slots", [40, 5], ids=["", "few slots"])
async def test_a_state_forgets_wrong_guesses(name, backend, state_slots, tmp_path, monkeypatch):
    """Random models with states do not run in circles, so the guesses are the tokens of `generate` with mistakes."""
    path = save_model(name, tmp_path / "m") if backend == "transformers" else make_checkpoint(name)
    chance, judge, wanted = random.Random(1), reference(path), {}
    for n in (3, 50, 150):
        prompt = [chance.randrange(3, 128) for _ in range(n)]
        ids = judge.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None)
        wanted[tuple(prompt)] = ids[0].tolist()

    def guess(self, tokens, n):
        (whole,) = (ids for prompt, ids in wanted.items() if tuple(tokens[: len(prompt)]) == prompt)
        return [token if chance.random() < 0.8 else 3 for token in whole[len(tokens) : len(tokens) + n]]

    monkeypatch.setattr(Guesser, "guess", guess)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    async with real_engine(path, tmp_path, backend=backend, guesses=4, state_slots=state_slots) as engine:
        streams = [submit(engine, list(prompt), params) for prompt in wanted]
        answers = await asyncio.gather(*map(tokens_of, streams))
        totals, states = engine.stats.totals, engine.cluster.states
        assert states.free == states.total
    assert [[*prompt, *tokens] for prompt, tokens in zip(wanted, answers, strict=True)] == list(wanted.values())
    assert 0 < totals.guessed_right < totals.guessed


async def test_guesses_behind_a_prompt_that_shares_all_tokens_but_one(tmp_path, monkeypatch):
    """Its first step goes on from a snapshot with one row, as a step without guesses does."""
    [prompt] = prompts([PAGE_TOKENS + 1])
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    options = {"guesses": 2, "state_slots": 16, "prefix_cache": True}
    async with real_engine(make_checkpoint("qwen3.5"), tmp_path, **options) as engine:
        monkeypatch.setattr(Guesser, "guess", lambda *_: [])
        wanted = await tokens_of(submit(engine, prompt, params))

        def guess(self, tokens, n):
            """Right guesses in every other step."""
            done = len(tokens) - len(prompt)
            return wanted[done : done + n] if done % 4 == 1 else []

        monkeypatch.setattr(Guesser, "guess", guess)
        assert await tokens_of(submit(engine, prompt, params)) == wanted
        totals = engine.stats.totals
        assert totals.prefix_hits == PAGE_TOKENS and totals.guessed_right > 0


async def test_a_guess_beyond_the_end_is_not_delivered(tmp_path):
    prompt = [5, 6, 7, 8] * 10
    async with real_engine(make_checkpoint("llama-gqa"), tmp_path) as engine:
        plain = await tokens_of(submit(engine, prompt, SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)))
    stop = plain[70]
    expected = plain[: plain.index(stop) + 1]
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True, stop_token_ids=frozenset({stop}))
    async with real_engine(make_checkpoint("llama-gqa"), tmp_path, guesses=7, prefix_cache=True) as engine:
        assert await tokens_of(submit(engine, prompt, params)) == expected
        assert await tokens_of(submit(engine, prompt, params)) == expected  # from the prefix cache


def test_guesses_that_are_all_right_leave_rows_for_a_new_prompt():
    world = World([(400, 64)], mini_batches=1, max_batch_tokens=32, guesses=8)
    scheduler = world.scheduler
    for _ in range(12):
        world.add(5, 1000)
    for _ in range(12):
        plan = scheduler.schedule(0)
        drawn = [Sampled(WORD, after_drafts=[Sampled(WORD)] * len(chunk.guesses)) for chunk in plan.chunks]
        scheduler.complete(plan, [one if chunk.sample else None for one, chunk in zip(drawn, plan.chunks, strict=True)])
    assert scheduler.cluster.totals.guessed_right > 0
    new = world.add(20, 5)
    assert new in [chunk.seq for chunk in scheduler.schedule(0).chunks]


def test_a_guess_is_what_followed_the_last_tokens_before():
    guesser = Guesser()
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3]
    assert guesser.guess(tokens, 2) == [4, 5]
    assert guesser.guess(tokens, 8) == [4, 5, 9, 1, 2, 3, 4, 5]
    tokens += [7, 8, 1, 2, 3]
    assert guesser.guess(tokens, 2) == [7, 8]  # the last occurrence counts
    assert guesser.guess([*tokens, 6], 2) == []


def test_a_long_prompt_is_indexed_over_several_calls():
    tokens = list(range(20_000))
    guesser = Guesser()
    for _ in range(10):
        guesser.guess(tokens, 2)
    assert guesser.guess([*tokens, 17_000, 17_001, 17_002], 2) == [17_003, 17_004]


def test_the_rate_follows_the_guesses():
    guesser = Guesser()
    first = guesser.rate
    guesser.judged(4, 4)
    assert first < guesser.rate < 1
    for _ in range(20):
        guesser.judged(0, 4)
    assert guesser.rate < 0.1
