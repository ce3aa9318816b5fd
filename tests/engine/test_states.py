"""Models whose layers keep states: a placed sequence has a slot, and its state has seen exactly its cached tokens."""

from __future__ import annotations

import asyncio

import pytest
from engines.scheduler_world import World
from engines.token_stream import submit
from engines.toy import ToyLink, ToySPart, continuation, tokens_of
from engines.toy_engine import generate, running, started

from fastdecode.engine.engine import Engine
from fastdecode.engine.state.request import SamplingParams
from fastdecode.region.contract import PAGE_TOKENS

pytestmark = pytest.mark.quick


def test_no_more_sequences_start_than_have_a_state():
    world = World([(400, 64)], state_slots=3)
    seqs = [world.add(40, 30) for _ in range(10)]
    world.begin(0)
    assert sum(seq.node is not None for seq in seqs) == 3
    assert world.scheduler.backlog(1) == 8, "seven wait, and one more would wait"
    world.end(0)
    world.run()
    assert set(world.ended) == set(seqs)
    assert world.scheduler.preemptions == 0
    world.assert_empty()


def test_a_paused_sequence_keeps_its_state():
    world = World([(400, 64)], mini_batches=1, max_seqs=2, state_slots=3)
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
    assert world.scheduler.preemptions == 1
    assert world.appended > sum(len(seq.tokens) - 1 for seq in world.ended), "the other one was recomputed"


def test_a_cancelled_sequence_and_a_lost_r_node_give_their_slots_back():
    world = World([(40, 64), (40, 64)], mini_batches=1, max_seqs=2, state_slots=4)
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


async def test_what_a_state_cannot_do_is_refused():
    link = ToyLink()
    with pytest.raises(ValueError, match="layers keep states has no prefix cache"):
        Engine(ToySPart([link], state_slots=4), [link], prefix_cache=True)
