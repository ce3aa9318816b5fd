"""Placement by the predicted time of the R-Part: bandwidths, windows, and who goes where."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from fastdecode.engine.scheduling.cluster import Cluster
from fastdecode.engine.scheduling.options import EngineOptions
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.engine.scheduling.rtime import Loads, assign, layer_groups
from fastdecode.engine.scheduling.scheduler import Scheduler
from fastdecode.engine.state.bandwidth import Bandwidth
from fastdecode.engine.state.request import SamplingParams
from fastdecode.engine.state.sequence import Sequence
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.shape import LayerReads
from fastdecode.transports.base import Lease, StepCost

pytestmark = pytest.mark.quick


def step_seconds(lengths, places, costs, windows):
    """The R-Part of a step by the definition: layer by layer, the slowest R-node."""
    total = 0.0
    for window in windows:
        busy = [0.0] * len(costs)
        for length, node in zip(lengths, places, strict=True):
            busy[node] += costs[node] * (min(length, window) if window else length)
        total += max(busy)
    return total


def sequence(order, n_prompt, max_new):
    return Sequence(
        request_id=str(order),
        order=order,
        tokens=[1] * n_prompt,
        n_prompt=n_prompt,
        max_new=max_new,
        params=SamplingParams(),
        seed=0,
        end_tokens=frozenset(),
    )


@dataclass(eq=False)
class CountedLink:
    """As much of a link as a cluster reads."""

    url: str
    lease: SimpleNamespace
    resident: bool = False


def cluster_of(speeds, windows=(0, 0), n_pages=100_000, page_bytes=PAGE_TOKENS * 1000):
    """A cluster whose R-nodes have shown these bandwidths, in bytes a second."""
    lease = Lease(n_pages, n_pages, 1000, page_bytes, "", 1, "sim")
    links = [CountedLink(f"tcp://r{i}", lease) for i in range(len(speeds))]
    cluster = Cluster(links, EngineOptions(), map(LayerReads, windows))
    for link, speed in zip(links, speeds, strict=True):
        for kv_bytes in 5 * (5 * [10**6] + 5 * [10**7] + 5 * [10**8]):
            cluster.observe({link: StepCost(round((1e-4 + kv_bytes / speed) * 1e9), kv_bytes)})
    return cluster


@pytest.mark.parametrize("seed", range(30))
def test_twelve_sequences_on_a_fast_and_a_slow_r_node_are_within_a_tenth_of_the_best(seed):
    """The best of all 4096 placements is found by trying them; R-nodes of 1 and 4 GB/s."""
    rng = random.Random(seed)
    windows = rng.choice([(0,), (0, 512), (4096, 0, 1024)])
    cluster = cluster_of([1e9, 4e9], windows)
    scheduler = Scheduler(cluster, EngineOptions(SchedulerLimits(1, 4096, 64)))
    draw = rng.choice([lambda: rng.randint(1, 4000), lambda: round(rng.lognormvariate(5, 1.2)) + 1, lambda: 300])
    seqs = [sequence(i, draw(), rng.choice([50, 1000])) for i in range(12)]
    for seq in seqs:
        scheduler.add(seq)
    while len(scheduler.running) < 12:
        plan = scheduler.schedule(0)
        scheduler.complete(plan, [SimpleNamespace(token=1, error=None) if c.sample else None for c in plan.chunks])
    lengths = [seq.n_prompt + seq.max_new / 2 for seq in seqs]
    chosen = [seq.placed_on.position for seq in seqs]
    costs = [1.0, 0.25]
    best = min(step_seconds(lengths, places, costs, windows) for places in itertools.product((0, 1), repeat=12))
    assert step_seconds(lengths, chosen, costs, windows) <= 1.1 * best


@pytest.mark.parametrize("seed", range(20))
def test_newcomers_are_distributed_beside_a_present_load(seed):
    rng = random.Random(seed)
    windows = rng.choice([(0,), (0, 700, 700)])
    costs = [rng.choice([1.0, 0.5, 0.25]) for _ in range(3)]
    present = [(rng.randrange(3), rng.randint(1, 3000)) for _ in range(6)]
    lengths = [rng.randint(1, 3000) for _ in range(7)]
    groups = layer_groups(map(LayerReads, windows))
    loads = Loads(groups, [[0.0] * len(groups) for _ in costs])
    for node, length in present:
        loads.add(node, length)
    before = [row[:] for row in loads.tokens]
    places = assign(loads, costs, lengths, [[0, 1, 2]] * 7)
    assert loads.tokens == before
    all_lengths, fixed = [length for _, length in present] + lengths, tuple(node for node, _ in present)

    def seconds(p):
        return step_seconds(all_lengths, [*fixed, *p], costs, windows)

    assert seconds(places) <= 1.1 * min(map(seconds, itertools.product(range(3), repeat=7)))


def test_an_r_node_without_room_gets_nothing():
    loads = Loads(((LayerReads(), 1),), [[0.0], [0.0]])
    assert assign(loads, [1.0, 0.01], [500, 400, 300], [[0], [0, 1], [0]]) == [0, 1, 0]


def test_bandwidth_is_told_from_the_fixed_time_of_a_step():
    rng, bandwidth = random.Random(0), Bandwidth()
    assert bandwidth.bytes_per_second is None
    bandwidth.observe(5000, 0)  # a step that only appends
    assert bandwidth.bytes_per_second is None
    for _ in range(200):
        kv_bytes = rng.randint(10**5, 10**6)
        bandwidth.observe(round((3e-4 + kv_bytes / 8e9) * rng.uniform(0.95, 1.05) * 1e9), kv_bytes)
    assert bandwidth.bytes_per_second == pytest.approx(8e9, rel=0.3)


def test_bandwidth_follows_a_change():
    bandwidth = Bandwidth()
    for speed in (8e9, 2e9):
        for i in range(400):
            kv_bytes = 10**6 + 10**4 * (i % 50)
            bandwidth.observe(round(kv_bytes / speed * 1e9), kv_bytes)
        assert bandwidth.bytes_per_second == pytest.approx(speed, rel=0.05)


def test_an_unmeasured_r_node_counts_as_the_others():
    cluster = cluster_of([2e9, 6e9])
    cluster.nodes[1].bandwidth = Bandwidth()
    assert cluster.costs[0] == cluster.costs[1] == pytest.approx(500 / 2e9, rel=0.01)


def test_equal_r_nodes_count_as_equal_while_other_processes_delay_their_steps():
    """Each step takes up to half as long again; an eighth of them takes ten times as long."""
    rng, cluster = random.Random(0), cluster_of(8 * [8e9])
    for i in range(300):
        times = {}
        for node in cluster.nodes:
            kv_bytes = rng.randint(10**6, 2 * 10**6)
            delay = rng.uniform(1, 1.5) * (10 if rng.random() < 0.125 else 1)
            times[node.link] = StepCost(round((1e-4 + kv_bytes / 8e9) * delay * 1e9), kv_bytes)
        cluster.observe(times)
        assert i < 75 or len(set(cluster.costs)) == 1


@pytest.mark.parametrize("slow", [1e9, 2e9, 4e9])
def test_an_r_node_of_half_the_bandwidth_is_told_from_equal_ones(slow):
    cluster = cluster_of([8e9, 8.4e9, slow, 7.6e9])
    fast, *others = [cluster.costs[i] for i in (0, 1, 3)]
    assert others == [fast, fast] and cluster.costs[2] == pytest.approx(fast * 8e9 / slow, rel=0.05)


def test_the_account_of_loads_is_empty_when_everything_has_ended():
    cluster = cluster_of([1e9, 4e9], windows=(0, 256))
    scheduler = Scheduler(cluster, EngineOptions(SchedulerLimits(2, 512, 16)))
    for i in range(10):
        scheduler.add(sequence(i, 100 * (i + 1), 30))
    while scheduler.waiting or scheduler.running:
        for mini_batch in (0, 1):
            if plan := scheduler.schedule(mini_batch):
                tokens = [SimpleNamespace(token=1, error=None) if c.sample else None for c in plan.chunks]
                scheduler.complete(plan, tokens)
    assert all(abs(tokens) < 1e-6 for row in cluster.loads.tokens for tokens in row)


def test_mini_batches_are_evened_out_by_their_r_part_not_by_count():
    """One long sequence and many short ones: the long one's mini-batch gets fewer."""
    cluster = cluster_of([1e9])
    scheduler = Scheduler(cluster, EngineOptions(SchedulerLimits(2, 9000, 64)))
    for i, n in enumerate([8000] + [200] * 30):
        scheduler.add(sequence(i, n, 100))
    for _ in range(40):
        for mini_batch in (0, 1):
            plan = scheduler.schedule(mini_batch)
            scheduler.complete(plan, [SimpleNamespace(token=1, error=None) if c.sample else None for c in plan.chunks])
    loads = [sum(seq.cached + PAGE_TOKENS for seq in batch) for batch in scheduler.mini_batches]
    assert min(loads) > 0.9 * max(loads)
    assert sorted(map(len, scheduler.mini_batches))[0] < 10
