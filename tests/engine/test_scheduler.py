"""The scheduler against a page book whose R-nodes only count: admission, chunks, mini-batches, shares and placement."""

from __future__ import annotations

import random

import pytest
from engines.scheduler_world import END, World

from fastdecode.engine.scheduling import queue
from fastdecode.engine.scheduling.budgets import StepBudget
from fastdecode.engine.scheduling.fairness import FairShares
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.region.contract import PAGE_TOKENS, blocks_for

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("prompts_apart", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_random_arrivals_ends_cancels(seed, prompts_apart, monkeypatch):
    """In any order of events, the accounts balance and every request ends with the right number of tokens."""
    rng = random.Random(seed)
    monkeypatch.setattr(queue, "MAX_PASSED", max_passed := rng.choice([0, 1, 5, 64]))
    priorities = [0] if seed % 2 else [-1, 0, 0, 3]
    leases = [(rng.choice([9, 14, 40]), rng.choice([3, 8, 64])) for _ in range(rng.choice([1, 1, 3]))]
    world = World(
        leases,
        rng.choice([1, 2, 3]),
        rng.choice([16, 64, 300]),
        rng.choice([3, 8]),
        rng.choice([0.01, 0.2]),
        rng.choice([None, 0, 400]),
        strict=prompts_apart,
        prompts_apart=prompts_apart,
    )
    capacity = world.cluster.capacity
    seqs, cancelled = [], set()
    for _ in range(1500):
        action = rng.random()
        if action < 0.07 and len(seqs) < 60:
            n_prompt = min(capacity, rng.choice([1, 5, 63, 64, 65, 128, rng.randint(1, 500)]))
            room = capacity + 1 - n_prompt
            max_new = min(room, rng.choice([1, 2, 64, 65, rng.randint(1, 300)]))
            seqs.append(
                world.add(n_prompt, max_new, rng.choice([None, rng.randint(1, max_new)]), rng.choice(priorities))
            )
        elif action < 0.075 and seqs:
            victim = rng.choice(seqs)
            if victim not in world.ended:
                world.scheduler.cancel(victim)
                cancelled.add(victim)
        elif action < 0.2:
            world.free()
        else:
            slot = rng.randrange(world.limits.slots)
            if slot in world.flights:
                world.end(slot)
            else:
                world.begin(slot)
    world.run()
    world.assert_empty()
    assert not world.scheduler.running.take_failed()
    assert set(world.ended) == set(seqs) - cancelled
    assert len(world.ended) == len(set(world.ended))
    for seq in world.ended:
        due = min(seq.max_new, world.lasts.get(seq, 10**9) - seq.n_prompt)
        assert seq.n_generated == due
        assert seq.finish_reason() == ("stop" if seq.tokens[-1] == END else "length")
    assert all(seq.passed_over <= max_passed for seq in seqs)
    if len(priorities) > 1:
        return
    overtakers = max((sum(o > n for o in world.admitted[:i]) for i, n in enumerate(world.admitted)), default=0)
    assert overtakers <= max_passed, "first come, first served, within the bound"


def test_random_runs_do_preempt():
    """Some of the random runs above must preempt, or they would not test preemption."""
    world = World([(6, 8)])
    for _ in range(6):
        world.add(64, 100)
    world.run()
    assert world.scheduler.cluster.totals.preemptions > 0
    assert len(world.ended) == 6


@pytest.mark.parametrize("n_prompt", [1, 63, 64, 65, 128])
@pytest.mark.parametrize("max_new", [1, 2, 64, 65])
def test_exact_lease_holds_its_tokens_and_no_page_more(n_prompt, max_new):
    """The last token is never cached: n tokens need pages for n - 1, and a lease of just that is enough, alone."""
    pages = max(blocks_for(n_prompt), blocks_for(n_prompt + max_new - 1))
    world = World([(pages, 1)])
    seq = world.add(n_prompt, max_new)
    most = 0
    while world.scheduler.waiting or world.scheduler.running:
        for mini_batch in range(2):
            if mini_batch in world.flights:
                world.end(mini_batch)
            elif world.begin(mini_batch):
                most = max(most, len(seq.pages))
    world.free()
    world.assert_empty()
    assert seq.n_generated == max_new
    assert most == pages
    assert world.scheduler.cluster.totals.preemptions == 0


def test_long_prompt_is_chunked_within_the_budget_beside_decoding_rows():
    world = World([(40, 8)], mini_batches=1, max_batch_tokens=100)
    first = world.add(10, 50)
    world.begin(0)
    world.end(0)
    long = world.add(250, 5)
    chunks = []
    for _ in range(3):
        plan = world.begin(0)
        assert plan.chunks[0].seq is first and not plan.chunks[0].prefill
        chunks.append((plan.chunks[1].n_tokens, plan.chunks[1].sample))
        world.end(0)
    assert chunks == [(99, False), (99, False), (52, True)]
    assert long.n_generated == 1
    assert first.n_generated == 4, "a running stream does not stall while a prompt is prefilled"
    world.run()


def test_prompts_apart_are_computed_beside_the_steps_of_decoding_sequences():
    """A long prompt takes steps of its own slot, in which no sequence decodes; the others decode meanwhile, in the
    steps of their mini-batches, and the sequence joins these when its prompt is computed."""
    world = World([(400, 64)], mini_batches=2, max_batch_tokens=100, prompts_apart=True)
    early = [world.add(10, 50) for _ in range(4)]
    prompts = world.limits.mini_batches
    assert [world.begin(slot) for slot in range(prompts)] == [None] * prompts, "only the slot of prompts admits"
    assert {chunk.seq for chunk in world.begin(prompts).chunks} == set(early)
    world.end(prompts)
    long = world.add(250, 5)
    for _ in range(3):
        assert [chunk.seq for chunk in world.begin(prompts).chunks] == [long]
        for slot in range(prompts):
            decoding = {chunk.seq for chunk in world.begin(slot).chunks}
            assert decoding == {seq for seq in early if seq.mini_batch == slot}
            world.end(slot)
        world.end(prompts)
    assert [seq.n_generated for seq in early] == [4] * 4
    assert world.begin(prompts) is None
    assert long in {chunk.seq for chunk in world.begin(long.mini_batch).chunks}


def test_a_prompt_starts_only_after_the_unfinished_one():
    world = World([(40, 8)], mini_batches=1, max_batch_tokens=100)
    long, short = world.add(150, 5), world.add(20, 5)
    assert [chunk.seq for chunk in world.begin(0).chunks] == [long]
    assert short in world.scheduler.waiting
    world.end(0)
    assert [(chunk.seq, chunk.n_tokens) for chunk in world.begin(0).chunks] == [(long, 50), (short, 20)]


def test_a_prompt_without_room_is_passed_over_within_a_bound(monkeypatch):
    monkeypatch.setattr(queue, "MAX_PASSED", 4)
    world = World([(10, 16)], mini_batches=1, max_batch_tokens=2000, watermark=0)
    running = world.add(5 * PAGE_TOKENS, 300)
    world.begin(0), world.end(0)
    long = world.add(8 * PAGE_TOKENS - 10, 3)
    short = [world.add(10, 3) for _ in range(9)]
    while running not in world.ended:
        world.begin(0), world.end(0)
        world.free()
    assert [seq.n_generated for seq in short] == [3] * 4 + [0] * 5, "no more than four go first"
    world.run()
    assert world.ended.index(long) < world.ended.index(short[4])
    assert world.scheduler.cluster.totals.preemptions == 0


def test_pages_that_are_freed_for_a_prompt_are_not_given_to_another():
    world = World([(10, 16)], mini_batches=1, max_batch_tokens=2000, watermark=0)
    world.cluster.prefix_cache = True
    world.add(8 * PAGE_TOKENS, 1)
    world.begin(0), world.end(0)
    big, small = world.add(9 * PAGE_TOKENS, 1), world.add(10, 1)
    assert world.begin(0) is None, "the cached prefix is being freed for the big prompt"
    world.free()
    assert [chunk.seq for chunk in world.begin(0).chunks] == [big, small]


@pytest.mark.parametrize("max_staged, waits", [(None, False), (1100, False), (1000, True), (0, True)])
def test_staged_prompts_are_bounded(max_staged, waits):
    world = World([(60, 16)], mini_batches=2, max_batch_tokens=128, max_staged=max_staged)
    first, second, short = world.add(600, 2), world.add(500, 2), world.add(20, 2)
    assert [chunk.seq for chunk in world.begin(0).chunks] == [first]
    assert [chunk.seq for chunk in world.begin(1).chunks] == [short if waits else second]
    world.run()
    assert {first, second, short} == set(world.ended)


@pytest.mark.parametrize("max_staged", [0, 500, 1000])
def test_with_a_strict_bound_r_nodes_attend_for_prompts_that_cannot_be_staged(max_staged):
    """`check_plan` sees that the bound holds in every step."""
    world = World([(60, 16)], mini_batches=2, max_batch_tokens=128, max_staged=max_staged, strict=True)
    long, fits, short = world.add(1200, 2), world.add(500, 2), world.add(1, 2)
    kinds = {}
    for _ in range(30):
        for mini_batch in (0, 1):
            if plan := world.begin(mini_batch):
                for chunk in plan.chunks:
                    if chunk.seq.prefilling:
                        kinds.setdefault(chunk.seq, set()).add(chunk.prefill)
                world.end(mini_batch)
        world.free()
    assert {long, fits, short} == set(world.ended)
    assert kinds == {long: {False}, fits: {max_staged >= 500}, short: {True}}


@pytest.mark.parametrize("start", [0, 1, 700, 9000])
@pytest.mark.parametrize("costs", [(1.0, 0.0), (0.0, 0.5), (3.0, 0.01), (1.0, 1e-9)])
def test_a_step_budget_grants_the_most_rows_that_its_work_allows(start, costs):
    row, pair = costs
    for work in (0.5, 10.0, 777.0, 12345.0):

        def cost(n):
            # Reading the keys before the chunk takes as long as 8 rows' attention to them.
            return sum(row + pair * (start + i) for i in range(1, n + 1)) + pair * 8 * start

        budget = StepBudget(rows=500, work=work, row_cost=row, pair_cost=pair, least=2)
        n = budget.chunk(start, 10_000)
        assert 2 <= n <= 500
        assert n == 2 or cost(n) <= work * (1 + 1e-6)
        assert n == 500 or cost(n + 1) > work * (1 - 1e-6)
        assert budget.take(start, 10_000) == n
        assert budget.chunk(0, 1) == 0, "after a chunk that was cut"


def test_burst_is_shared_between_mini_batches():
    """A burst fills one mini-batch's budget at once, but not beyond its share."""
    world = World([(400, 64)], max_batch_tokens=200)
    for _ in range(10):
        world.add(10, 20)
    assert len(world.begin(0).chunks) == 5
    assert len(world.begin(1).chunks) == 5


def test_a_sequence_that_was_held_goes_on_in_the_mini_batch_whose_step_comes_next():
    world = World([(400, 64)] * 2, max_batch_tokens=200)
    seqs = [world.add(10, 20) for _ in range(4)]
    world.begin(0), world.begin(1)
    world.end(0)
    seq = next(seq for seq in seqs if seq.mini_batch == 0)
    seq.frozen = True
    world.begin(0)
    target = next(node for node in world.cluster.nodes if node is not seq.node)
    handle, pages = target.admit(PAGE_TOKENS, None, seq.final_length, whole=True)
    world.cluster.loads.add(target.position, seq.mean_length)
    world.cached[target.position][handle] = seq.cached
    world.scheduler.migrate(seq, target, handle, pages, seq.cached)
    assert seq.mini_batch == 1 and seq.node is target, "a step of the other one has just begun"
    world.end(1)
    assert seq in [chunk.seq for chunk in world.begin(1).chunks]
    world.run()


def test_lopsided_mini_batches_are_evened_out():
    world = World([(400, 64)], max_batch_tokens=200)
    seqs = [world.add(10, 100) for _ in range(8)]
    world.begin(0), world.begin(1)
    assert [len(batch) for batch in world.scheduler.mini_batches] == [4, 4]
    for seq in seqs:
        if seq.mini_batch == 1:
            world.scheduler.cancel(seq)
    world.end(1)
    assert world.begin(1) is None
    world.end(0)
    world.scheduler.take_changed()
    assert len(world.begin(0).chunks) == 2
    assert world.scheduler.take_changed(), "the other is to be woken"
    assert len(world.begin(1).chunks) == 2
    world.run()


def test_full_queue_keeps_every_mini_batch_at_its_bound():
    world = World([(400, 64)], mini_batches=3, max_batch_size=4, max_batch_tokens=64)
    for _ in range(20):
        world.add(5, 30)
    for mini_batch in range(3):
        assert len(world.begin(mini_batch).chunks) == 4
    assert len(world.scheduler.waiting) == 8
    world.run()


def test_a_client_with_many_requests_does_not_hold_up_another():
    world = World([(400, 64)], mini_batches=1, max_batch_size=4)
    for _ in range(40):
        world.add(50, 20, client="many")
    world.begin(0), world.end(0)
    few = [world.add(50, 20, client="few") for _ in range(3)]
    world.run()
    assert max(map(world.ended.index, few)) < 12, "not behind all forty"


def test_clients_that_wait_get_equal_shares_of_tokens():
    """One client has long prompts, the other short ones and twice as many; both always have requests waiting."""
    world = World([(4000, 64)], mini_batches=2, max_batch_size=4, max_batch_tokens=2000)
    seqs = [world.add(400, 40, client="long") for _ in range(60)]
    seqs += [world.add(40, 40, client="short") for _ in range(600)]
    for _ in range(400):
        for mini_batch in (0, 1):
            world.begin(mini_batch), world.end(mini_batch)
        world.free()
    assert {seq.client for seq in world.scheduler.waiting} == {"long", "short"}
    served = {"long": 0, "short": 0}
    for seq in seqs:
        if seq.n_generated:
            served[seq.client] += seq.n_prompt + 2 * seq.n_generated
    assert 0.9 < served["long"] / served["short"] < 1.1


def test_a_client_that_joins_late_has_no_credit():
    shares = FairShares()
    shares.join("a")
    shares.charge("a", 1000)
    shares.join("b")
    assert shares.served("b") == 1000 and shares.contended
    shares.charge("b", 500)
    shares.leave("a")
    shares.leave("b")
    assert not shares.contended
    shares.join("c")
    assert shares.served("c") == 1500
    shares.join("a")
    assert shares.served("a") == 1500


def test_watermark_keeps_newcomers_from_the_last_pages():
    """Without the watermark, a preempted sequence would take its pages again at once, and be preempted again."""
    world = World([(10, 8)], mini_batches=1, max_batch_tokens=1000, watermark=0.3)
    first = world.add(6 * PAGE_TOKENS, 10)
    world.begin(0), world.end(0)
    second = world.add(PAGE_TOKENS, 2)
    world.begin(0), world.end(0)
    assert len(first.pages) == 7 and second.node is None, "3 of 10 pages are kept"
    world.run()
    assert world.scheduler.cluster.totals.preemptions == 0


def test_placement_takes_the_least_loaded_node_with_room():
    world = World([(20, 8), (10, 8)], mini_batches=1, max_batch_tokens=2000)
    placed = []
    for n_prompt, max_new in [(200, 1000), (200, 200), (200, 200), (200, 200), (1000, 20), (600, 20)]:
        seq = world.add(n_prompt, max_new)
        world.begin(0), world.end(0)
        placed.append(seq.node.position)
    # loads at the end: 1200, then 400, 800 and 1200 on the other; the 1000 have no room there, nor have the 600
    assert placed == [0, 1, 1, 1, 0, 0]


def test_sequence_that_outgrows_a_small_lease_moves_to_a_big_one():
    world = World([(20, 8), (3, 8)], mini_batches=1)
    world.add(64, 900)
    world.begin(0), world.end(0)
    seq = world.add(100, 300)
    world.begin(0), world.end(0)
    assert seq.node.n_pages == 3
    world.run()
    assert seq.n_generated == 300


def test_index_and_tag_come_back_with_a_new_generation():
    world = World([(20, 1)], mini_batches=1)
    first = world.add(5, 1)
    world.begin(0)
    handle = first.handle
    world.end(0)
    second = world.add(5, 1)
    assert world.begin(0) is None, "the only index is not free before the FREE is acknowledged"
    world.free()
    world.begin(0)
    assert second.handle == (handle.seq_index, handle.tag + 1)


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="max_batch_size"):
        SchedulerLimits(2, 64, 65)
    with pytest.raises(ValueError, match="mini_batches"):
        SchedulerLimits(0, 64, 8)
