"""The scheduler against a page book whose R-nodes only count."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from fastdecode.engine.cluster import Cluster
from fastdecode.engine.ledger import pages_for
from fastdecode.engine.request import SamplingParams
from fastdecode.engine.scheduler import Scheduler
from fastdecode.engine.scheduling import queue
from fastdecode.engine.scheduling.budgets import StepBudget
from fastdecode.engine.scheduling.fairness import FairShares
from fastdecode.engine.scheduling.plan import Plan, SchedulerLimits
from fastdecode.engine.sequence import Sequence
from fastdecode.region.contract import PAGE_TOKENS

pytestmark = pytest.mark.quick

END = 7  # the end token of every sequence here
WORD = 1


class World:
    """R-nodes that record every append; the caller begins and ends steps and acknowledges FREEs."""

    def __init__(
        self,
        leases=((40, 64),),
        mini_batches=2,
        max_batch_tokens=128,
        max_seqs=16,
        watermark=0.01,
        max_staged=None,
        strict=False,
    ):
        links = [
            SimpleNamespace(url=f"tcp://r{i}", lease=SimpleNamespace(n_pages=pages, max_seqs=seqs, page_bytes=4096))
            for i, (pages, seqs) in enumerate(leases)
        ]
        self.cluster = Cluster(links, watermark)
        self.limits = SchedulerLimits(mini_batches, max_batch_tokens, max_seqs, max_staged, strict)
        self.scheduler = Scheduler(self.cluster, self.limits)
        self.flights: dict[int, Plan] = {}
        self.cached: list[dict[tuple[int, int], int]] = [{} for _ in links]  # per R-node: handle -> tokens appended
        self.appended = 0  # tokens, recomputed ones counted again
        self.ended: list[Sequence] = []
        self.admitted: list[int] = []  # orders of arrival, as they were first given a chunk
        self.lasts: dict[Sequence, int] = {}  # the length at which END comes
        self.staged: set[Sequence] = set()  # prompts that took several steps
        self._orders = 0

    def add(self, n_prompt, max_new, end_after=None, priority=0, client="") -> Sequence:
        seq = Sequence(
            request_id=f"r{self._orders}",
            order=self._orders,
            tokens=[WORD] * n_prompt,
            n_prompt=n_prompt,
            max_new=max_new,
            params=SamplingParams(priority=priority, client=client),
            seed=0,
            end_tokens=frozenset({END}),
        )
        self._orders += 1
        if end_after is not None:
            self.lasts[seq] = n_prompt + end_after
        self.scheduler.add(seq)
        return seq

    def begin(self, mini_batch: int) -> Plan | None:
        assert mini_batch not in self.flights
        plan = self.scheduler.schedule(mini_batch)
        if plan is not None:
            self.check_plan(plan)
            self.flights[mini_batch] = plan
            for chunk in plan.chunks:
                self.append(chunk)
            self.admitted += sorted({chunk.seq.order for chunk in plan.chunks} - set(self.admitted))
        self.check_book()
        return plan

    def end(self, mini_batch: int) -> list[Sequence]:
        """End a step in flight; returns the sequences that finished."""
        plan = self.flights.pop(mini_batch)
        sampled = []
        for chunk in plan.chunks:
            last = len(chunk.seq.tokens) + 1 == self.lasts.get(chunk.seq)
            sampled.append(SimpleNamespace(token=END if last else WORD, error=None) if chunk.sample else None)
        outcomes = self.scheduler.complete(plan, sampled)
        done = [o.seq for o in outcomes if o.finish_reason]
        self.ended += done
        self.check_book()
        return done

    def free(self) -> bool:
        """Acknowledge every FREE; True if there was one."""
        any_freed = False
        for node, cached in zip(self.cluster.nodes, self.cached, strict=True):
            released = node.take_released()
            for seq in released:
                del cached[seq.handle]
            node.acknowledge_free(released)
            any_freed |= bool(released)
        return any_freed

    def append(self, chunk) -> None:
        """Append a chunk as an R-node would, with an R-node's checks."""
        seq = chunk.seq
        cached = self.cached[seq.node.position]
        if seq.cached == 0:
            assert not any(index == seq.handle.seq_index for index, _ in cached), (
                "an index is used again before its FREE"
            )
            cached[seq.handle] = 0
        assert cached[seq.handle] == seq.cached
        cached[seq.handle] += chunk.n_tokens
        self.appended += chunk.n_tokens
        used = sum(map(pages_for, cached.values()))
        assert used <= seq.node.n_pages, "the lease is over-committed"

    def check_plan(self, plan: Plan) -> None:
        assert plan.n_tokens <= self.limits.max_batch_tokens
        assert len({chunk.seq for chunk in plan.chunks}) == len(plan.chunks) <= self.limits.max_seqs
        kinds = [(chunk.prefill, chunk.seq.node.position) for chunk in plan.chunks]
        assert kinds == sorted(kinds), "decoding rows first, each kind in order of link"
        for chunk in plan.chunks:
            assert chunk.n_tokens >= 1
            assert pages_for(chunk.seq.cached + chunk.n_tokens) <= len(chunk.seq.pages), "a chunk without a page"
            assert chunk.seq.mini_batch == plan.mini_batch
            flying = [c.seq for other in self.flights.values() for c in other.chunks]
            assert chunk.seq not in flying, "in two steps at once"
            assert chunk.sample == (chunk.seq.cached + chunk.n_tokens == len(chunk.seq.tokens))
            if chunk.prefill and not chunk.sample:
                self.staged.add(chunk.seq)
        if self.limits.max_staged_tokens is not None:
            staged = [s.prefill_end for s in self.staged if s.node is not None and s.prefilling]
            alone = len(staged) == 1 and not self.limits.strict_staging
            assert alone or sum(staged) <= self.limits.max_staged_tokens

    def check_book(self) -> None:
        members = [seq for batch in self.scheduler.mini_batches for seq in batch]
        assert len(set(members)) == len(members), "in two mini-batches at once"
        assert not set(members) & set(self.scheduler.waiting)
        for i, batch in enumerate(self.scheduler.mini_batches):
            assert all(seq.mini_batch == i for seq in batch)
            assert len(batch) <= self.limits.max_seqs
            assert sum(seq.prefilling for seq in batch) <= 1 or i in self.flights, "two unfinished prompts"
        for node in self.cluster.nodes:
            running = self.scheduler.running_on(node)
            counted = sum(len(seq.pages) for seq in running)
            assert node.free_pages >= 0
            assert node.free_pages + counted + node.pages_freeing + node.pages_evictable == node.n_pages
            assert node.n_sequences == len(running) == sum(seq.node is node for seq in members)
            assert node.load == sum(seq.final_length for seq in running)
        ranks = [(seq.priority, seq.order) for seq in self.scheduler.waiting]
        assert ranks == sorted(ranks)

    def run(self, limit=100_000) -> None:
        """All mini-batches in turn until nothing is left."""
        for _ in range(limit):
            moved = False
            for mini_batch in range(self.limits.mini_batches):
                if mini_batch in self.flights:
                    self.end(mini_batch)
                    moved = True
                moved |= self.begin(mini_batch) is not None
            moved |= self.free()
            if not self.scheduler.has_work and not self.flights:
                self.free()
                return
            assert moved, "there is work and nothing moves"
        raise AssertionError("it does not end")

    def assert_empty(self) -> None:
        assert not self.scheduler.has_work and not self.flights
        for node, cached in zip(self.cluster.nodes, self.cached, strict=True):
            assert not cached and node.free_pages == node.n_pages and node.load == 0 and not node.n_sequences


@pytest.mark.parametrize("seed", range(12))
def test_random_arrivals_ends_cancels(seed, monkeypatch):
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
            mini_batch = rng.randrange(world.limits.mini_batches)
            if mini_batch in world.flights:
                world.end(mini_batch)
            else:
                world.begin(mini_batch)
    world.run()
    world.assert_empty()
    assert not world.scheduler.take_failed()
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
    assert world.scheduler.preemptions > 0
    assert len(world.ended) == 6


@pytest.mark.parametrize("n_prompt", [1, 63, 64, 65, 128])
@pytest.mark.parametrize("max_new", [1, 2, 64, 65])
def test_exact_lease_holds_its_tokens_and_no_page_more(n_prompt, max_new):
    """The last token is never cached: n tokens need pages for n - 1, and a lease of just that is enough, alone."""
    pages = max(pages_for(n_prompt), pages_for(n_prompt + max_new - 1))
    world = World([(pages, 1)])
    seq = world.add(n_prompt, max_new)
    most = 0
    while world.scheduler.has_work:
        for mini_batch in range(2):
            if mini_batch in world.flights:
                world.end(mini_batch)
            elif world.begin(mini_batch):
                most = max(most, len(seq.pages))
    world.free()
    world.assert_empty()
    assert seq.n_generated == max_new
    assert most == pages
    assert world.scheduler.preemptions == 0


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
    assert world.scheduler.preemptions == 0


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
            return sum(row + pair * (start + i) for i in range(1, n + 1))

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
    world.scheduler.changed = False
    assert len(world.begin(0).chunks) == 2
    assert world.scheduler.changed, "the other is to be woken"
    assert len(world.begin(1).chunks) == 2
    world.run()


def test_full_queue_keeps_every_mini_batch_at_its_bound():
    world = World([(400, 64)], mini_batches=3, max_seqs=4, max_batch_tokens=64)
    for _ in range(20):
        world.add(5, 30)
    for mini_batch in range(3):
        assert len(world.begin(mini_batch).chunks) == 4
    assert len(world.scheduler.waiting) == 8
    world.run()


def test_newest_is_preempted_and_comes_back_first():
    world = World([(4, 8)], mini_batches=1)
    old, new = world.add(PAGE_TOKENS, 134), world.add(PAGE_TOKENS - 4, 164)
    world.begin(0)
    while not world.scheduler.preemptions:
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
    assert victim.node is None and world.scheduler.preemptions == 1
    world.free()
    assert [chunk.seq for chunk in world.begin(0).chunks] == [first, second]
    world.run()
    assert world.scheduler.preemptions == 1


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


def test_a_client_with_many_requests_does_not_hold_up_another():
    world = World([(400, 64)], mini_batches=1, max_seqs=4)
    for _ in range(40):
        world.add(50, 20, client="many")
    world.begin(0), world.end(0)
    few = [world.add(50, 20, client="few") for _ in range(3)]
    world.run()
    assert max(map(world.ended.index, few)) < 12, "not behind all forty"


def test_clients_that_wait_get_equal_shares_of_tokens():
    """One client has long prompts, the other short ones and twice as many; both always have requests waiting."""
    world = World([(4000, 64)], mini_batches=2, max_seqs=4, max_batch_tokens=2000)
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


def test_a_request_of_higher_priority_pauses_another_and_nothing_is_recomputed():
    world = World([(400, 64)], mini_batches=1, max_seqs=2)
    low = [world.add(100, 60, priority=5) for _ in range(2)]
    for _ in range(10):
        world.begin(0), world.end(0)
    urgent = world.add(50, 20)
    world.begin(0)
    assert low[1].paused and low[1].cached > 100, "the newest one waits and keeps its cache"
    world.end(0)
    world.run()
    assert world.ended == [urgent, *low]
    assert world.scheduler.preemptions == 1
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
    world = World([(20, 64)], mini_batches=1, max_seqs=2, watermark=0, max_batch_tokens=2000)
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


def test_a_paused_sequence_can_be_cancelled_and_its_r_node_lost():
    world = World([(40, 64), (40, 64)], mini_batches=1, max_seqs=2)
    low = [world.add(100, 60, priority=5) for _ in range(2)]
    for _ in range(3):
        world.begin(0), world.end(0)
    urgent = [world.add(50, 200) for _ in range(2)]
    for _ in range(4):
        world.begin(0), world.end(0)
    assert all(seq.paused for seq in low)
    world.scheduler.cancel(low[0])
    lost = low[1].node
    world.scheduler.node_lost(lost)
    assert low[1].node is None and low[1].cached == 0
    world.cached[lost.position].clear()
    lost.take_released()
    world.run()
    assert set(world.ended) == {low[1], *urgent}


def test_watermark_keeps_newcomers_from_the_last_pages():
    """Without the watermark, a preempted sequence would take its pages again at once, and be preempted again."""
    world = World([(10, 8)], mini_batches=1, max_batch_tokens=1000, watermark=0.3)
    first = world.add(6 * PAGE_TOKENS, 10)
    world.begin(0), world.end(0)
    second = world.add(PAGE_TOKENS, 2)
    world.begin(0), world.end(0)
    assert len(first.pages) == 7 and second.node is None, "3 of 10 pages are kept"
    world.run()
    assert world.scheduler.preemptions == 0


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
    world.scheduler.node_lost(lost)
    for seq in there:
        assert (seq.node is lost) == (seq in flying), "those in flight go when their step ends"
    plan = world.flights.pop(0)
    world.scheduler.recompute(plan)
    assert not lost.n_sequences
    world.run()
    assert [seq.n_generated for seq in seqs] == [100] * 4
    assert world.scheduler.preemptions == 0, "a loss is not a preemption"


def test_step_that_ends_well_on_a_lost_node_keeps_its_token():
    world = World([(20, 8), (20, 8)], mini_batches=1)
    seq = world.add(30, 10)
    world.begin(0)
    world.scheduler.node_lost(seq.node)
    world.end(0)
    assert seq.n_generated == 1 and seq in world.scheduler.waiting
    world.run()
    assert seq.n_generated == 10


def test_last_node_lost_fails_everything_by_name():
    world = World([(20, 8)], mini_batches=1, max_seqs=1)
    running, waiting = world.add(30, 10), world.add(30, 10)
    world.begin(0), world.end(0)
    world.scheduler.node_lost(running.node)
    failed = world.scheduler.take_failed()
    assert [seq for seq, _ in failed] == [running, waiting]
    assert all("tcp://r0 was lost" in reason for _, reason in failed)
    assert not world.scheduler.take_failed()


def test_lost_node_fails_only_what_the_others_cannot_hold():
    world = World([(20, 8), (2, 8)], mini_batches=1, max_batch_tokens=1000)
    big, small = world.add(500, 10), world.add(50, 10)
    world.begin(0), world.end(0)
    world.scheduler.node_lost(world.cluster.nodes[0])
    assert [seq for seq, _ in world.scheduler.take_failed()] == [big]
    world.run()
    assert small.n_generated == 10


def test_replaced_link_starts_with_an_empty_book():
    world = World([(20, 8)], mini_batches=1)
    world.add(30, 10)
    world.begin(0), world.end(0)
    old = world.cluster.nodes[0]
    with pytest.raises(ValueError, match="alive"):
        world.cluster.replace_link(0, old.link)
    world.scheduler.node_lost(old)
    world.scheduler.take_failed()
    fresh = world.cluster.replace_link(0, old.link)
    assert (fresh.free_pages, fresh.load, fresh.pages_freeing, fresh.alive) == (20, 0, 0, True)
    world.cached[0].clear()
    seq = world.add(30, 10)
    world.run()
    assert seq.n_generated == 10


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
    with pytest.raises(ValueError, match="max_seqs"):
        SchedulerLimits(2, 64, 65)
    with pytest.raises(ValueError, match="mini_batches"):
        SchedulerLimits(0, 64, 8)
