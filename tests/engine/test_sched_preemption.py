"""Sequences that lose their place in the scheduler: preempted, paused, cancelled, or on an R-node that is lost."""

from __future__ import annotations

import pytest
from engines.scheduler_world import World

from fastdecode.region.contract import PAGE_TOKENS

pytestmark = pytest.mark.quick


def test_newest_is_preempted_and_comes_back_first():
    world = World([(4, 8)], mini_batches=1)
    old, new = world.add(PAGE_TOKENS, 134), world.add(PAGE_TOKENS - 4, 164)
    world.begin(0)
    while not world.scheduler.cluster.totals.preemptions:
        world.end(0)
        world.begin(0)
    behind = world.add(1, 1)
    assert list(world.scheduler.waiting) == [new, behind]
    had = new.n_generated
    assert had > 0 and new.cached == 0 and new.node is None
    world.run()
    assert [old.n_generated, new.n_generated] == [134, 164]
    assert world.ended.index(old) < world.ended.index(new)


def test_no_more_is_preempted_than_is_needed():
    """Two sequences want a page in the same step, and the first victim has two."""
    world = World([(6, 8)], mini_batches=1, max_batch_tokens=1000, watermark=0)
    first, second = (world.add(2 * PAGE_TOKENS - 2, 9) for _ in range(2))
    victim = world.add(PAGE_TOKENS + 36, 9)
    for _ in range(3):
        world.begin(0), world.end(0)
    assert world.begin(0) is None
    assert victim.node is None and world.scheduler.cluster.totals.preemptions == 1
    world.free()
    assert [chunk.seq for chunk in world.begin(0).chunks] == [first, second]
    world.run()
    assert world.scheduler.cluster.totals.preemptions == 1


def test_victim_in_flight_is_preempted_when_its_step_ends():
    world = World([(4, 8)], mini_batches=2, max_batch_tokens=2 * PAGE_TOKENS - 2, watermark=0)
    old, new = world.add(2 * PAGE_TOKENS - 2, 90), world.add(PAGE_TOKENS + 10, 90)
    world.begin(0), world.begin(1)
    assert (old.mini_batch, new.mini_batch) == (0, 1)
    world.end(0)
    for _ in range(2):  # `old` fills its second page, `new` stays in flight
        world.begin(0)
        world.end(0)
    assert world.begin(0) is None, "no page, and the newest sequence is in the middle of a step"
    assert new.node is not None
    world.end(1)
    assert world.begin(1) is None
    assert new.node is None and new in world.scheduler.waiting
    assert world.begin(0) is None, "its pages are not ours before the FREE is acknowledged"
    world.free()
    assert [chunk.seq for chunk in world.begin(0).chunks] == [old]
    world.run()


def test_a_request_of_higher_priority_pauses_another_and_nothing_is_recomputed():
    world = World([(400, 64)], mini_batches=1, max_batch_size=2)
    low = [world.add(100, 60, priority=5) for _ in range(2)]
    for _ in range(10):
        world.begin(0), world.end(0)
    urgent = world.add(50, 20)
    world.begin(0)
    assert low[1].paused and low[1].cached > 100, "the newest one waits and keeps its cache"
    world.end(0)
    world.run()
    assert world.ended == [urgent, *low]
    assert world.scheduler.cluster.totals.preemptions == 1
    assert world.appended == sum(len(seq.tokens) - 1 for seq in world.ended), "every token was cached once"


def test_a_request_of_higher_priority_gets_the_pages_of_a_paused_one():
    world = World([(10, 64)], mini_batches=1, watermark=0, max_batch_tokens=2000)
    low = [world.add(4 * PAGE_TOKENS, 60, priority=5), world.add(4 * PAGE_TOKENS, 60, priority=5)]
    world.begin(0), world.end(0)
    urgent = world.add(3 * PAGE_TOKENS, 20, priority=1)
    world.run()
    assert world.ended.index(urgent) < world.ended.index(low[1])
    assert [seq.n_generated for seq in (*low, urgent)] == [60, 60, 20]


def test_the_sequence_that_was_paused_longest_ago_is_dropped_first_and_as_a_whole():
    world = World([(20, 64)], mini_batches=1, max_batch_size=2, watermark=0, max_batch_tokens=2000)
    low = [world.add(3 * PAGE_TOKENS, 400, priority=9) for _ in range(2)]
    world.begin(0), world.end(0), world.begin(0), world.end(0)
    middle = [world.add(3 * PAGE_TOKENS, 400, priority=5) for _ in range(2)]
    for _ in range(4):
        world.begin(0), world.end(0)
    assert all(seq.paused for seq in low) and not any(seq.paused for seq in middle)
    urgent = world.add(6 * PAGE_TOKENS, 5)
    for _ in range(4):
        world.begin(0) and world.end(0)
        world.free()
    assert low[1].node is None and low[1].cached == 0, "the one that was paused first gave up all of its pages"
    assert low[0].paused and low[0].cached > 3 * PAGE_TOKENS
    world.run()
    assert len(world.ended) == 5 and world.ended[0] is urgent


def test_a_sequence_that_is_paused_for_an_older_sequence_of_the_step_has_no_row_in_the_step():
    """A block takes two pages, and one is free."""
    world = World([(9, 8)], mini_batches=1, watermark=0, max_batch_tokens=1000, block=2)
    old, new = world.add(2 * PAGE_TOKENS - 1, 20), world.add(PAGE_TOKENS + 20, 20)
    for _ in range(2):
        world.begin(0), world.end(0)
    assert world.begin(0) is None and new.node is None, "its pages go to the older sequence"
    world.run()
    assert [seq.n_generated for seq in (old, new)] == [20, 20]


def test_a_paused_sequence_can_be_cancelled_and_its_r_node_lost():
    world = World([(40, 64), (40, 64)], mini_batches=1, max_batch_size=2)
    low = [world.add(100, 60, priority=5) for _ in range(2)]
    for _ in range(3):
        world.begin(0), world.end(0)
    urgent = [world.add(50, 200) for _ in range(2)]
    for _ in range(4):
        world.begin(0), world.end(0)
    assert all(seq.paused for seq in low)
    world.scheduler.cancel(low[0])
    lost = low[1].node
    world.scheduler.running.node_lost(lost)
    assert low[1].node is None and low[1].cached == 0
    world.cached[lost.position].clear()
    lost.take_released()
    world.run()
    assert set(world.ended) == {low[1], *urgent}


def test_cancel_while_waiting_prefilling_decoding_and_in_flight():
    world = World([(40, 8)], mini_batches=1, max_batch_tokens=50)
    decoding, prefilling, waiting = world.add(5, 50), world.add(120, 5), world.add(5, 5)
    world.begin(0)
    world.end(0)
    assert prefilling.prefilling and waiting in world.scheduler.waiting
    world.begin(0)
    world.scheduler.cancel(waiting)
    assert waiting not in world.scheduler.waiting
    world.scheduler.cancel(prefilling)
    assert prefilling.node is not None, "not before its step has ended"
    world.end(0)
    assert prefilling.node is None
    world.scheduler.cancel(decoding)
    world.scheduler.cancel(decoding)
    world.free()
    world.assert_empty()


def test_lost_node_lets_its_sequences_be_recomputed_elsewhere():
    world = World([(20, 8), (20, 8)], mini_batches=2)
    seqs = [world.add(30, 100) for _ in range(4)]
    world.begin(0), world.begin(1)
    world.end(0), world.end(1)
    world.begin(0)
    lost = world.cluster.nodes[0]
    there = [seq for seq in seqs if seq.node is lost]
    flying = [chunk.seq for chunk in world.flights[0].chunks]
    assert there
    world.scheduler.running.node_lost(lost)
    for seq in there:
        assert (seq.node is lost) == (seq in flying), "those in flight go when their step ends"
    plan = world.flights.pop(0)
    world.scheduler.recompute(plan)
    assert not lost.n_sequences
    world.run()
    assert [seq.n_generated for seq in seqs] == [100] * 4
    assert world.scheduler.cluster.totals.preemptions == 0, "a loss is not a preemption"


def test_step_that_ends_well_on_a_lost_node_keeps_its_token():
    world = World([(20, 8), (20, 8)], mini_batches=1)
    seq = world.add(30, 10)
    world.begin(0)
    world.scheduler.running.node_lost(seq.node)
    world.end(0)
    assert seq.n_generated == 1 and seq in world.scheduler.waiting
    world.run()
    assert seq.n_generated == 10


def test_last_node_lost_fails_everything_by_name():
    world = World([(20, 8)], mini_batches=1, max_batch_size=1)
    running, waiting = world.add(30, 10), world.add(30, 10)
    world.begin(0), world.end(0)
    world.scheduler.running.node_lost(running.node)
    failed = world.scheduler.running.take_failed()
    assert [seq for seq, _ in failed] == [running, waiting]
    assert all("tcp://r0 was lost" in reason for _, reason in failed)
    assert not world.scheduler.running.take_failed()


def test_lost_node_fails_only_what_the_others_cannot_hold():
    world = World([(20, 8), (2, 8)], mini_batches=1, max_batch_tokens=1000)
    big, small = world.add(500, 10), world.add(50, 10)
    world.begin(0), world.end(0)
    world.scheduler.running.node_lost(world.cluster.nodes[0])
    assert [seq for seq, _ in world.scheduler.running.take_failed()] == [big]
    world.run()
    assert small.n_generated == 10


def test_replaced_link_starts_with_an_empty_book():
    world = World([(20, 8)], mini_batches=1)
    world.add(30, 10)
    world.begin(0), world.end(0)
    old = world.cluster.nodes[0]
    with pytest.raises(ValueError, match="alive"):
        world.cluster.replace_link(0, old.link)
    world.scheduler.running.node_lost(old)
    world.scheduler.running.take_failed()
    fresh = world.cluster.replace_link(0, old.link)
    assert (fresh.free_pages, fresh.load, fresh.pages_freeing, fresh.alive) == (20, 0, 0, True)
    world.cached[0].clear()
    seq = world.add(30, 10)
    world.run()
    assert seq.n_generated == 10
