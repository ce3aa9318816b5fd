"""Drafts of an MTP head that has learned some of the model's texts, so that some drafts are right and some are wrong:
the tokens stay the ones of `generate`, and the ones that are drawn without drafts."""

from __future__ import annotations

import asyncio
import functools
import random
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from engines.make_engine import make_engine
from engines.real_engine import real_engine
from engines.token_stream import submit, tokens_of
from models.checkpoints import VOCAB_SIZE, make_checkpoint
from models.hf_models import save_model
from models.mtp_made import make_head
from nodes.rnode_process import r_node_processes

from fastdecode.engine.state.request import SamplingParams
from fastdecode.spart import SPart, load_model
from fastdecode.transports.registry import connect

GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
LENGTHS = (3, 120, 150, 270)
NATIVE = ("qwen3.5", "qwen3-next", "qwen3.5-moe", "glm4-moe", "deepseek-v3")
OF_TRANSFORMERS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")


def text(n, seed=0, vocab_size=VOCAB_SIZE):
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(n)]


def generated(judge, prompt, n=60):
    ids = judge.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, eos_token_id=None)
    return ids[0, len(prompt) :].tolist()


@functools.cache
def learned(name):
    """A checkpoint whose head knows some of the texts that `generate` makes of the prompts, and these texts."""
    target = Path(tempfile.mkdtemp(prefix="fastdecode-mtp-"))
    directory = make_checkpoint(name) if name in NATIVE else save_model(name, target)
    head = make_head(directory)
    judge = head.model
    prompts = [text(n, n, judge.config.vocab_size) for n in LENGTHS]
    wanted = [generated(judge, prompt) for prompt in prompts]
    head.learn([prompt + tokens for prompt, tokens in zip(prompts[:2], wanted, strict=False)], 80)
    return head.save(directory, target / "with head"), prompts, wanted, judge


@pytest.mark.parametrize(
    ("name", "drafts"),
    [*((name, drafts) for name in NATIVE for drafts in (1, 3)), *((name, 2) for name in OF_TRANSFORMERS)],
)
async def test_drafts_change_no_token_and_save_steps(name, drafts, tmp_path):
    """Two mini-batches, prompts in chunks."""
    path, prompts, wanted, _ = learned(name)
    async with real_engine(path, tmp_path, mtp=drafts, state_slots=40, backend="auto") as engine:
        answers = await asyncio.gather(*(tokens_of(submit(engine, prompt, GREEDY)) for prompt in prompts))
        assert answers == wanted
        totals = engine.stats.totals
        assert 0 < totals.guessed_right < totals.guessed
        before = totals.steps
        assert await tokens_of(submit(engine, prompts[0], GREEDY)) == wanted[0]
        assert engine.stats.totals.steps - before < 60
        states = engine.cluster.states
        assert states is None or states.free == states.total


async def test_sampled_tokens_and_choices_are_those_without_drafts(tmp_path):
    path, prompts, _, _ = learned("qwen3.5")
    params = SamplingParams(max_tokens=60, temperature=0.5, top_p=0.9, seed=7, ignore_eos=True, logprobs=1)
    penalised = SamplingParams(max_tokens=40, temperature=0.0, frequency_penalty=0.3, ignore_eos=True)
    answers = []
    for drafts in (0, 2):
        async with real_engine(path, tmp_path, mtp=drafts, state_slots=60, prefix_cache=True) as engine:
            streams = [submit(engine, prompt, one) for prompt in prompts for one in (params, penalised)]
            queues = [asyncio.Queue() for _ in range(4)]
            engine.submit_choices(prompts[3], params, {str(k): queue.put_nowait for k, queue in enumerate(queues)})
            answers.append(await asyncio.gather(*map(tokens_of, streams)))
            answers[-1] += [[(await queue.get()).token for _ in range(60)] for queue in queues]
            totals = engine.stats.totals
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0][-4:]))) == 4
    assert 0 < totals.guessed_right < totals.guessed


async def test_a_prefix_hit_in_mid_prompt(tmp_path):
    path, prompts, wanted, judge = learned("qwen3.5")
    other = [*prompts[3], *text(9, 1)]
    async with real_engine(path, tmp_path, mtp=2, state_slots=40, prefix_cache=True) as engine:
        assert await tokens_of(submit(engine, prompts[3], GREEDY)) == wanted[3]
        assert await tokens_of(submit(engine, prompts[3], GREEDY)) == wanted[3]
        assert await tokens_of(submit(engine, other, GREEDY)) == generated(judge, other)
        assert engine.stats.totals.prefix_hits >= 2 * 256


async def test_preempted_sequences_go_on(tmp_path):
    path, prompts, wanted, _ = learned("qwen3.5")
    given, expected = [*prompts, *[prompts[1]] * 8], [*wanted, *[wanted[1]] * 8]
    async with real_engine(path, tmp_path, mtp=2, state_slots=40, kv_bytes=2 << 20) as engine:
        streams = [submit(engine, prompt, GREEDY) for prompt in given]
        assert await asyncio.gather(*map(tokens_of, streams)) == expected
        totals = engine.stats.totals
        assert totals.preemptions > 0 and totals.guessed_right > 0


async def test_a_killed_r_node_costs_no_token():
    path, prompts, wanted, _ = learned("qwen3.5")
    model = load_model(path, device="cpu", dtype=torch.float32, mtp=2)
    with r_node_processes(*["tcp://127.0.0.1:0"] * 2, kv_bytes=64 << 20) as nodes:
        hello = model.hello(2, 64, "fp32", 32 << 20, 32)
        links = [await connect(node.url, hello, None) for node in nodes]
        spart = SPart(model, links, state_slots=40)
        engine = make_engine(spart, links, max_batch_tokens=64, max_batch_size=16, guesses=2)
        await engine.start()
        try:
            streams = [submit(engine, prompt, GREEDY) for prompt in prompts * 2]
            firsts = [(await anext(stream)).token for stream in streams]
            assert all(node.n_sequences for node in engine.cluster.nodes)
            nodes[1].end(signal.SIGKILL)
            rest = await asyncio.gather(*map(tokens_of, streams))
            assert [[first, *tokens] for first, tokens in zip(firsts, rest, strict=True)] == wanted * 2
            assert [node.alive for node in engine.stats.nodes] == [True, False]
            assert engine.stats.totals.guessed_right > 0
        finally:
            await engine.stop()
            for link in engine.spart.links:
                await link.close()


async def test_a_head_that_is_wrong_is_asked_seldom(tmp_path):
    """Drafts of a random head do not pay: after the first ones a sequence gets one in 32 tokens, or a few more if the
    machine is so busy that steps with drafts seem to cost nothing. All tokens would have three each."""
    directory = make_checkpoint("qwen3.5")
    path = make_head(directory).save(directory, tmp_path / "m")
    async with real_engine(path, tmp_path, mtp=3, state_slots=40) as engine:
        params = SamplingParams(max_tokens=320, temperature=0.0, ignore_eos=True)
        await tokens_of(submit(engine, text(20), params))
        totals = engine.stats.totals
    assert 0 < totals.guessed < 160
