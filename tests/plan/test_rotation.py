"""Rotational pipelining: the closed form, against arithmetic by hand and the model of one S-node."""

from __future__ import annotations

import dataclasses

import pytest

from fastdecode.plan.equations import System, Work, part_times, round_seconds
from fastdecode.plan.model import PlannedModel
from fastdecode.plan.profile import LinkTimes, SPartTimes
from fastdecode.plan.rotation import HandOver, Pipeline, most_gain, pipeline

MODEL = PlannedModel("toy", 4, 4, 2, 8, 1000.0)
SYSTEM = System(
    MODEL, SPartTimes(model="toy", parameters=1000, rows=((1, 1.0), (9, 5.0))), LinkTimes(layer_seconds=0.5, gbps=1e-6),
    "fp16", 640.0, 2, engine_step=0.25, engine_row=0.125, overlap=1.5,
)  # fmt: skip
FREE = HandOver(0.0, 1e9)


@pytest.mark.parametrize("m", [1, 2, 3, 7])
def test_neither_side_idles_in_laminas_balance(m):
    """t_R = t_S / m: each mini-batch is at an S-node m parts of the period, and at the R-nodes the last part."""
    balanced = Pipeline(m, m + 1, s_part=1.0, r_part=1 / m)
    assert balanced.period == pytest.approx(1 + 1 / m)
    assert balanced.s_idle == pytest.approx(0) and balanced.r_idle == pytest.approx(0)
    one_each = dataclasses.replace(balanced, mini_batches=m)
    assert one_each.s_idle == pytest.approx(1 / (m + 1))
    assert one_each.r_idle == pytest.approx(1 / (m + 1))


def test_one_s_node_with_two_mini_batches_is_the_model_that_was_there():
    for batch, length in ((6, 2), (6, 40), (16, 3), (2, 2)):
        parts = part_times(SYSTEM, Work(batch / 2, batch / 2 * length))
        seconds, binding = round_seconds([parts] * 2, in_turns=False)
        ours = pipeline(SYSTEM, batch, length, 1, 2, FREE)
        bounds = {name: MODEL.n_layers * value for name, value in ours.bounds.items()}
        # There, a mini-batch that goes through its layers by itself meets no other one that slows its S-Part down.
        alone = bounds["one mini-batch"] - (parts.overlap - 1) * parts.s_part
        assert alone == pytest.approx(parts.alone)
        if binding != "one mini-batch":
            assert bounds[binding] == pytest.approx(seconds)


def test_hidden_states_cost_nothing_while_the_r_nodes_attend():
    pace = Pipeline(2, 3, s_part=2.0, r_part=1.0, hand_over_latency=0.5, hand_over_wire=0.5)
    assert pace.period == 3.0 and pace.s_idle == 0
    late = dataclasses.replace(pace, hand_over_latency=1.5)
    assert (late.period, late.binding) == (4.0, "one mini-batch")
    assert dataclasses.replace(late, mini_batches=4).period == 4.0 == 4 / 2 * 2.0  # they stay, nothing is handed over
    narrow = dataclasses.replace(pace, hand_over_wire=3.0, hand_over_latency=0.0)
    assert narrow.bounds["wire"] == 4.5


def test_time_on_the_way_adds_to_the_period_in_balance():
    balanced = Pipeline(2, 3, s_part=2.0, r_part=1.0)
    assert dataclasses.replace(balanced, latency=0.25).period == balanced.period + 0.25
    two_each = Pipeline(2, 4, s_part=1.5, r_part=0.75)
    assert dataclasses.replace(two_each, latency=0.25).period == two_each.period


def test_the_most_that_rotation_gains():
    """By a search over fixed costs and R-Part times: sequences 1, t_S = a + b x, t_R = r x."""
    for m in (2, 3, 4):

        def period(n, a, b, r, m=m):
            return Pipeline(m, n, s_part=a + b / n, r_part=r / n).period

        gains = [
            min(period(m, a / 50, 1, r / 25), period(2 * m, a / 50, 1, r / 25)) / period(m + 1, a / 50, 1, r / 25)
            for a in range(100)
            for r in range(1, 100)
        ]
        assert max(gains) - 1 <= most_gain(m) + 1e-9
        assert max(gains) - 1 > most_gain(m) - 0.03
        # The point of the docstring: f = a n / (m P) = n / m^2 with P = a n / m + b / m in balance, r = P.
        n, f = m + 1, (m + 1) / m**2
        a = f / (n * (1 - f))
        r = a * n / m + 1 / m
        exact = min(period(m, a, 1, r), period(2 * m, a, 1, r)) / period(n, a, 1, r) - 1
        assert exact == pytest.approx(most_gain(m))


def test_a_pipeline_takes_the_parts_of_the_system():
    ours = pipeline(SYSTEM, 9, 40, 2, 3, HandOver(0.125, 1e-6))
    assert ours.s_part == pytest.approx((1.5 * 2.0 + 0.25 + 3 * 0.125) / 4)
    assert ours.r_part == pytest.approx(3 * 40 * 64 / (2 * 640))  # a cached token has 64 bytes in a layer
    assert ours.out == pytest.approx(3 * 128 / 1e3) and ours.back == pytest.approx(3 * 64 / 1e3)
    assert ours.latency == 0.5
    assert ours.hand_over_wire == pytest.approx(3 * 4 * 8 * 2 / 1e3) and ours.hand_over_latency == 0.125
