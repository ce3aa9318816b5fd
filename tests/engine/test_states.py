"""Models whose layers keep states: a placed sequence has a slot, and its state has seen exactly its cached tokens."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest
from engines.make_engine import make_engine
from engines.scheduler_world import World
from engines.token_stream import submit, tokens_of
from engines.toy import POISON, ToyLink, ToySPart, continuation
from engines.toy_engine import ASK, ask, generate, keeping, running, started

from fastdecode.engine.state.request import SamplingParams
from fastdecode.region.contract import PAGE_TOKENS

pytestmark = pytest.mark.quick


def text(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(POISON) for _ in range(n)]


def test_no_more_sequences_start_than_have_a_state():
    world = World([(400, 64)], state_slots=3)
    seqs = [world.add(40, 30) for _ in range(10)]
    world.begin(0)
    assert sum(seq.node is not None for seq in seqs) == 3
    assert world.scheduler.backlog(1) == 8, "seven wait, and one more would wait"
    world.end(0)
    world.run()
    assert set(world.ended) == set(seqs)
    assert world.scheduler.cluster.totals.preemptions == 0
    world.assert_empty()


def test_a_paused_sequence_keeps_its_state():
    world = World([(400, 64)], mini_batches=1, max_batch_size=2, state_slots=3)
    low = [world.add(100, 60, priority=5) for _ in range(2)]
    for _ in range(10):
        world.begin(0), world.end(0)
    urgent, slot = world.add(50, 20), low[1].state
    world.begin(0)
    assert low[1].paused and low[1].state is slot
    world.end(0)
    world.run()
    assert world.ended == [urgent, *low]
    assert world.appended == sum(len(seq.tokens) - 1 for seq in world.ended), "nothing was recomputed"


def test_a_request_of_higher_priority_takes_the_state_of_another():
    world = World([(400, 64)], mini_batches=1, state_slots=2)
    low = [world.add(100, 60, priority=5) for _ in range(2)]
    for _ in range(10):
        world.begin(0), world.end(0)
    urgent = world.add(50, 20)
    world.run()
    assert world.ended == [urgent, *low]
    assert world.scheduler.cluster.totals.preemptions == 1
    assert world.appended > sum(len(seq.tokens) - 1 for seq in world.ended), "the other one was recomputed"


def test_a_cancelled_sequence_and_a_lost_r_node_give_their_slots_back():
    world = World([(40, 64), (40, 64)], mini_batches=1, max_batch_size=2, state_slots=4)
    low = [world.add(100, 60, priority=5) for _ in range(2)]
    for _ in range(3):
        world.begin(0), world.end(0)
    urgent = [world.add(50, 200) for _ in range(2)]
    for _ in range(4):
        world.begin(0), world.end(0)
    assert all(seq.paused for seq in low) and not world.cluster.states.free
    world.scheduler.cancel(low[0])
    assert world.cluster.states.free == 1
    lost = low[1].node
    world.scheduler.running.node_lost(lost)
    assert low[1].state is None
    world.cached[lost.position].clear()
    lost.take_released()
    world.run()
    assert set(world.ended) == {low[1], *urgent} and world.cluster.states.free == 4


@pytest.mark.parametrize("options", [{}, {"mini_batches": 3}, {"schedule": "stable"}], ids=str)
async def test_every_answer_is_right_with_fewer_slots_than_requests(options):
    async with started(ToyLink("tcp://first"), ToyLink("tcp://second"), state_slots=5, **options) as engine:
        await generate(engine, 40, 60)


async def test_sequences_that_lack_pages_are_recomputed_with_their_states():
    async with started(ToyLink(n_pages=9), state_slots=8) as engine:
        prompt = list(range(3, 3 + PAGE_TOKENS))
        params = SamplingParams(temperature=0.0, max_tokens=200)
        streams = [submit(engine, [i, *prompt], params) for i in range(6)]
        answers = await asyncio.gather(*map(tokens_of, streams))
        assert answers == [continuation([i, *prompt], 200) for i in range(6)]
        assert engine.stats.totals.preemptions > 0


async def test_a_lost_r_node_costs_no_tokens():
    first, second = ToyLink("tcp://first"), ToyLink("tcp://second")
    async with running(first, second, state_slots=12) as (engine, _):
        params = SamplingParams(temperature=0.0, max_tokens=200)
        streams = [submit(engine, [i, 5, 6], params) for i in range(12)]
        tokens = [[(await anext(stream)).token] for stream in streams]
        second.kill()
        for i, stream in enumerate(streams):
            assert tokens[i] + await tokens_of(stream) == continuation([i, 5, 6], 200)
        assert engine.cluster.states.free == 12


# -- snapshots --------------------------------------------------------------------------------------------------------


async def test_a_prompt_begins_where_there_is_a_snapshot_of_its_state():
    link = ToyLink()
    async with keeping(link, state_slots=16) as (engine, _):
        assert await ask(engine, text(700)) == 0
        assert await ask(engine, text(700)) == 5 * PAGE_TOKENS, "the last page border before the last token"
        assert await ask(engine, text(700)[:300] + text(400, 1)) == 0, "its pages are cached, the state after them not"
        assert await ask(engine, text(700)[:300] + text(400, 2)) == 2 * PAGE_TOKENS, "where the one before has parted"
        assert await ask(engine, text(700)[:641]) == 5 * PAGE_TOKENS
        assert await ask(engine, text(700)[:640]) == 2 * PAGE_TOKENS, "the last token must be computed"


async def test_a_conversation_goes_on_from_its_last_state():
    link, history = ToyLink(), text(200)
    async with keeping(link, state_slots=4, mini_batches=1) as (engine, _):
        cached = 0
        for turn in range(5):
            assert await ask(engine, history) == cached
            cached = len(history) + 9  # all but the last token of the answer
            history += continuation(history, 10) + text(30, turn)


async def test_a_long_prompt_leaves_a_snapshot_every_some_thousand_tokens():
    link, prompt = ToyLink(n_pages=400), text(9000)
    async with keeping(link, state_slots=16) as (engine, _):
        assert await ask(engine, prompt) == 0
        assert await ask(engine, [*prompt[:5000], 7]) == 4096
        assert await ask(engine, [*prompt[:8500], 7]) == 8192


async def test_prompts_that_come_together_wait_for_the_snapshot_of_the_first():
    link, prompt = ToyLink(), text(700)
    async with keeping(link, state_slots=16) as (engine, _):
        reused = await asyncio.gather(*(ask(engine, [*prompt, 7, i]) for i in range(8)))
        assert sorted(reused) == [0] + [5 * PAGE_TOKENS] * 7


async def test_the_snapshot_used_longest_ago_goes_first():
    link = ToyLink(n_pages=200)
    async with keeping(link, state_slots=8, mini_batches=1) as (engine, _):
        prompts = [text(300, i) for i in range(3)]
        assert [await ask(engine, prompt) for prompt in prompts] == [0, 0, 0]
        assert [await ask(engine, prompt) for prompt in prompts[1:]] == [256, 256]
        assert await ask(engine, prompts[0]) == 0


async def test_snapshots_leave_slots_to_guesses():
    async with keeping(ToyLink(n_pages=200), state_slots=8, mini_batches=1) as (engine, _):
        for i in range(12):
            await ask(engine, text(300, i))
            assert engine.cluster.states.unused >= 2
        assert await ask(engine, text(300, 11)) == 256


async def test_snapshots_leave_every_slot_to_sequences():
    async with keeping(ToyLink(n_pages=200), state_slots=8, mini_batches=1) as (engine, spart):
        for i in range(6):
            await ask(engine, text(300, i))
        spart.gate.clear()
        streams = [submit(engine, text(20, 100 + i), ASK) for i in range(8)]
        await asyncio.sleep(0.05)
        spart.gate.set()
        assert await asyncio.gather(*map(tokens_of, streams)) == [continuation(text(20, 100 + i), 10) for i in range(8)]
        assert engine.stats.totals.preemptions == 0


@pytest.mark.parametrize("state_slots", [1, 2])
async def test_a_prompt_takes_the_slot_of_the_snapshot_it_begins_from_if_there_is_no_other(state_slots):
    async with keeping(ToyLink(), state_slots=state_slots, mini_batches=1) as (engine, _):
        history = text(200)
        await ask(engine, history)
        history += continuation(history, 10) + text(30, 1)
        assert await ask(engine, history) == 209


async def test_a_refused_fork_computes_the_state_anew():
    link = ToyLink()
    async with keeping(link, state_slots=16) as (engine, _):
        await ask(engine, text(700))
        link.refuse_forks = True
        assert await ask(engine, text(700)) == 0


async def test_what_a_state_cannot_do_is_refused():
    link = ToyLink()
    with pytest.raises(ValueError, match="layers keep states has no prefill S-nodes"):
        make_engine(ToySPart([link], state_slots=4), [link], prefill_nodes=SimpleNamespace())
