"""The near and the far batch: which way they decode, by hand and in the real scheduler."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from engines.scheduler_world import World

from fastdecode.engine.migration.cut_moves import Spill
from fastdecode.engine.scheduling.way_choice import FAR, NEAR
from fastdecode.engine.scheduling.ways import LONGEST_WAIT, BatchTimes, Way, best, rates
from fastdecode.engine.state.sequence import Sequence
from fastdecode.region.contract import PAGE_TOKENS

pytestmark = pytest.mark.quick

NEAR_TIMES = BatchTimes(rows=10, seconds=0.010, gpu_seconds=0.010)  # 1000 tokens/s


@pytest.mark.parametrize(
    ("far", "together", "slowdown", "way", "rate", "wait"),
    [
        # R-nodes that answer within the GPU's own attention: one step of 12 rows.
        (BatchTimes(2, 0.010, 0.005), 0.0102, 0.03, Way.TOGETHER, 12 / 0.0102, 0),
        # Slow R-nodes with many rows: a far step of 1 s takes 10 ms of the GPU.
        (BatchTimes(100, 1.0, 0.010), 1.0, 0.03, Way.APART, 0.99 * 1000 + 100, 0),
        # A far step of 20 ms takes 6 ms of it. With 3 % more than 8 near steps would have to pass until the next one.
        (BatchTimes(10, 0.020, 0.006), 0.020, 0.03, Way.APART, (1 - 0.06) * 1000 + 10 / 0.100, LONGEST_WAIT),
        (BatchTimes(10, 0.020, 0.006), 0.020, 0.5, Way.APART, (1 - 0.3) * 1000 + 10 / 0.020, 0),
        # One far row brings less than it costs, and 1 % of gain is too little.
        (BatchTimes(1, 0.020, 0.005), 0.020, 0.03, Way.NEAR, 1000, LONGEST_WAIT),
        (BatchTimes(20, 1.0, 0.010), 1.0, 0.03, Way.NEAR, 1000, LONGEST_WAIT),
    ],
)
def test_the_best_way_by_hand(far, together, slowdown, way, rate, wait):
    chosen = best(rates(NEAR_TIMES, far, together, slowdown))
    assert (chosen.way, chosen.wait) == (way, wait)
    assert chosen.tokens_per_second == pytest.approx(rate)


def world(gpu_pages=8, **options) -> World:
    made = World(leases=((gpu_pages, 16), (64, 16)), max_batch_tokens=512, prompts_apart=True, resident=1, **options)
    made.scheduler.way_choice.pays = lambda *_: True
    return made


class Clock:
    """Runs a world whose steps take chosen times."""

    def __init__(self, made: World, near: float, far: float):
        self.world, self.seconds = made, {NEAR: near, FAR: far, 2: 0.001}
        self.rows: list[dict[int, int]] = []  # of the steps of each round

    def rounds(self, n: int) -> None:
        """Begin a step in each slot that has work, and end the near step. The far step ends after the second round."""
        for i in range(n):
            begun = {}
            for slot in (2, NEAR, FAR):
                if slot not in self.world.flights and (plan := self.world.begin(slot)) is not None:
                    begun[slot] = len(plan.chunks)
            self.rows.append(begun)
            for slot in (2, NEAR) if i % 2 == 0 else (2, NEAR, FAR):
                if slot in self.world.flights:
                    self.end(slot)

    def end(self, slot: int) -> None:
        plan = self.world.flights.pop(slot)
        self.world.scheduler.complete(plan, [_drawn(chunk) for chunk in plan.chunks], self.seconds[slot])


def cut_after_a_page(made: World, seq: Sequence) -> None:
    """Let the R-node have the first page of a sequence on the GPU, as the spiller does."""
    made.cluster.nodes[0].link.drop_blocks = lambda *_: None
    Spill(made.cluster, seq, made.cluster.nodes[1], PAGE_TOKENS).switch()
    made.scheduler.running.go_home(seq)
    assert seq in made.scheduler.mini_batches[FAR]


def _drawn(chunk):
    return SimpleNamespace(token=1, error=None) if chunk.sample else None


def test_batches_are_divided_by_where_sequences_lie():
    made = world()
    for _ in range(12):
        made.add(PAGE_TOKENS - 40, 39)
    Clock(made, 0.01, 0.01).rounds(12)
    near, far = made.scheduler.mini_batches
    assert near and far
    assert all(seq.placed_on.resident for seq in near) and not any(seq.placed_on.resident for seq in far)


@pytest.mark.parametrize("cut", [False, True])
def test_far_rows_are_served_after_eight_near_steps_whatever_the_rate(cut):
    """An R-node that reads 1 KB/s: far rows, those of a cut sequence too, never pay."""
    made = world(gpu_pages=16 if cut else 8)
    near_and_far = [made.add(PAGE_TOKENS + 8 if cut else PAGE_TOKENS - 40, 39) for _ in range(4 if cut else 10)]
    made.cluster.nodes[1].link.bytes_per_second = 1e3
    clock = Clock(made, 0.01, 500.0)
    clock.rounds(4)
    if cut:
        cut_after_a_page(made, near_and_far[0])
    made.scheduler.way_choice.pays = lambda *_: False
    clock.rows.clear()
    clock.rounds(30)
    far = [i for i, rows in enumerate(clock.rows) if FAR in rows]
    assert len(far) >= 2 and all(b - a >= LONGEST_WAIT for a, b in pairwise(far))
    assert made.scheduler.way_choice.way is Way.NEAR
    assert all(NEAR in rows for rows in clock.rows)  # the GPU's rows wait for nobody


@pytest.mark.parametrize("slowdown", [0.03, 0.0])
def test_fast_r_nodes_join_the_steps_of_the_gpu(slowdown):
    """All of them, or where these may not become longer at all, those after which the far rows are due. Far steps would
    take more of the GPU's time."""
    made = world()
    choice = made.scheduler.way_choice
    made.cluster.nodes[1].link.bytes_per_second = 1e15
    choice._round_trip, choice._slowdown = 0.0, slowdown
    for _ in range(10):
        made.add(PAGE_TOKENS - 40, 39)
    clock = Clock(made, 0.01, 0.01)
    for _ in range(40):  # steps of several sizes tell that rows cost nearly nothing
        clock.rounds(1)
        choice._s_part.observe(1, 0.01)
        choice._s_part.observe(9, 0.01 + 1e-9)
        choice.way, choice._off = Way.NEAR, 0
    joint = [i for i, rows in enumerate(clock.rows) if rows.get(NEAR) == 10]
    assert made.cluster.totals.steps_together >= len(joint) > (10 if slowdown else 2)
    assert slowdown or all(b - a == LONGEST_WAIT + 1 for a, b in pairwise(joint))
    assert not any(FAR in rows for rows in clock.rows[joint[0] :])


@pytest.mark.parametrize("pays", [lambda *_: False, lambda near, far, numbers: not all(numbers)])
def test_newcomers_go_to_r_nodes_only_if_they_pay_or_the_gpu_cannot_hold_them(pays):
    """It does not matter whether the sequences pay that are there already."""
    made = world(gpu_pages=4)
    made.scheduler.way_choice.pays = pays
    small = [made.add(PAGE_TOKENS - 40, 39) for _ in range(6)]
    large = made.add(5 * PAGE_TOKENS, 39)
    Clock(made, 0.01, 0.01).rounds(12)
    assert large.placed_on.position == 1
    assert {seq.placed_on.position for seq in small if seq.node is not None} == {0}
    assert any(seq.node is None for seq in small)


def test_as_many_newcomers_go_to_r_nodes_as_pay():
    """Two pay, and more do not, however many wait."""
    made = world(gpu_pages=4)
    made.scheduler.way_choice.pays = lambda near, far, numbers: any(len(far) + more <= 2 for more in numbers)
    sequences = [made.add(PAGE_TOKENS - 40, 39) for _ in range(12)]
    Clock(made, 0.01, 0.01).rounds(6)
    assert sum(seq.placed_on.position == 1 for seq in sequences if seq.node is not None) == 2


def test_wrong_predictions_let_the_gpus_rows_go_first_and_are_measured_again(caplog):
    made = world(gpu_pages=16)
    for _ in range(4):
        made.add(10, 700)
    clock = Clock(made, 0.01, 0.01)
    clock.rounds(40)
    choice = made.scheduler.way_choice
    before = choice._s_part.seconds(4)
    clock.seconds[NEAR] = 0.1  # it can be learned, but every step is slower than the last
    for _ in range(60):
        clock.rounds(1)
        clock.seconds[NEAR] *= 1.15
    assert "took other times than predicted" in caplog.text
    assert choice._s_part.seconds(4) > 100 * before
    assert made.cluster.totals.measured_seconds > made.cluster.totals.predicted_seconds > 0


def test_far_rows_go_on_when_no_near_row_can():
    """The far batch has waited for three of eight near steps when the near rows end; and rows that lack pages count as
    rows, but have no steps."""
    made = world()
    made.cluster.nodes[1].link.bytes_per_second = 1e3
    for n in (6, 6, 6, 6, 6, 6, 6, 39, 39):
        made.add(PAGE_TOKENS - 40, n)
    clock = Clock(made, 0.01, 500.0)
    clock.rounds(10)
    assert not made.scheduler.mini_batches[NEAR] and len(made.scheduler.mini_batches[FAR]) == 2
    assert made.scheduler.way_choice.far_step and made.scheduler.take_changed()
    near = world(gpu_pages=2, watermark=0.0)
    for n in (2, 2, 2):
        near.add(PAGE_TOKENS - n, 39)
    clock = Clock(near, 0.01, 0.01)
    clock.rounds(20)
    rows = [step.get(FAR) for step in clock.rows]
    assert any(rows)
