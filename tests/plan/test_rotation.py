"""Rotational pipelining: the closed form, against arithmetic by hand and the model of one S-node, and the simulation
beside it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fastdecode.plan import published
from fastdecode.plan.cli import main
from fastdecode.plan.equations import System, Work, part_times, round_seconds
from fastdecode.plan.model import PlannedModel, read_model
from fastdecode.plan.profile import LinkTimes, SPartTimes, read_profile
from fastdecode.plan.rotation import HandOver, Pipeline, most_gain, pipeline
from fastdecode.plan.rotation_simulation import simulate

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


# ---- event by event ----


@pytest.mark.parametrize("m", [1, 2, 3, 4, 6])
def test_simulated_servers_are_always_busy_in_laminas_balance(m):
    course = simulate(Pipeline(m, m + 1, s_part=1.0, r_part=1 / m), layers=16, steps=4)
    assert course.period == pytest.approx(1 + 1 / m)
    assert (course.s_idle, course.r_idle) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6))
    assert course.step == pytest.approx(16 * (1 + 1 / m))
    assert course.longest_step == pytest.approx(course.step)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    "times",
    [
        {"s_part": 3.0, "r_part": 0.5},
        {"s_part": 1.0, "r_part": 2.0},
        {"s_part": 1.0, "r_part": 0.5, "latency": 4.0},
        {"s_part": 1.0, "r_part": 0.5, "out": 3.0, "back": 0.5},
        {"s_part": 1.0, "r_part": 0.5, "out": 0.5, "back": 3.0},
        {"s_part": 2.0, "r_part": 1.0, "hand_over_latency": 2.5},
        {"s_part": 2.0, "r_part": 1.0, "hand_over_wire": 3.5},
    ],
)
def test_the_simulation_has_the_pace_of_the_closed_form(n, times):
    planned = Pipeline(2, n, **times)
    course = simulate(planned, layers=20, steps=6)
    assert course.period == pytest.approx(planned.period, rel=0.02)
    assert course.s_idle == pytest.approx(planned.s_idle, abs=0.02)
    assert course.r_idle == pytest.approx(planned.r_idle, abs=0.02)


def test_a_late_hand_over_is_waited_for_and_an_early_one_is_not():
    early = Pipeline(2, 3, s_part=2.0, r_part=1.0, hand_over_latency=0.9)
    assert simulate(early, 16, 4).hand_over_wait == 0
    late = dataclasses.replace(early, hand_over_latency=1.75)
    assert simulate(late, 16, 4).hand_over_wait == pytest.approx(0.75, rel=0.01)


def test_times_that_vary_cost_a_balance_without_slack_and_not_an_s_node_that_binds():
    balanced, bound = Pipeline(2, 3, s_part=1.0, r_part=0.5), Pipeline(2, 4, s_part=1.0, r_part=0.1)
    assert simulate(balanced, 16, 16, spread=0.2).period > 1.05 * balanced.period
    assert simulate(bound, 16, 16, spread=0.2).period == pytest.approx(bound.period, rel=0.04)


SHAPE = ["--r-nodes", "8", "--context", "512", "--steps", "2"]


def rotate(model, *argv, capsys):
    main(["rotate", "--model", str(model), "--profile", "a10-epyc7452", *SHAPE, *argv])
    return capsys.readouterr().out


@pytest.fixture
def llama_7b(tmp_path):
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16", "hidden_act": "silu",
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_rotate_prints_a_row_for_each_number_of_mini_batches(llama_7b, capsys):
    found = json.loads(rotate(llama_7b, "--batch", "300", "--s-nodes", "1,2,3", "--json", capsys=capsys))
    keys = [(row["s_nodes"], row["mini_batches"], row["rotates"]) for row in found["rows"]]
    assert keys == [(1, 1, False), (1, 2, False), (2, 2, False), (2, 3, True), (2, 4, False), (3, 3, False),
                    (3, 4, True), (3, 6, False)]  # fmt: skip
    for row in found["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["predicted_tokens_per_second"], rel=0.02)
        assert row["r_nodes"] == 8 * row["s_nodes"]
        assert row["tbt"] * row["tokens_per_second"] == pytest.approx(300 * row["s_nodes"], rel=0.02)
        assert row["hand_over_bytes"] == (row["rows"] * 4096 * 2 if row["rotates"] else 0)
    table = rotate(llama_7b, "--batch", "300", "--s-nodes", "2", capsys=capsys)
    assert "simulated, not measured" in table and "2 S-nodes: rotation has" in table


def test_one_s_node_has_the_step_that_recommend_predicts(llama_7b, capsys):
    """The S-Part binds, so that the way of a mini-batch by itself does not count."""
    found = json.loads(rotate(llama_7b, "--batch", "300", "--s-nodes", "1", "--json", capsys=capsys))
    model = dataclasses.replace(published.LLAMA_7B, parameters=read_model(llama_7b).parameters)
    seconds = published.step_seconds(published.system(read_profile("a10-epyc7452"), model, 8), 300, 512)
    assert found["rows"][1]["tbt"] == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--batch", "100000"], "holds 3814 sequences of 512 tokens"),
        (["--batch", "1"], "does not make two mini-batches"),
        (["--s-nodes", "0"], "must be at least 1"),
    ],
)
def test_a_bad_call_is_a_sentence(llama_7b, capsys, argv, sentence):
    with pytest.raises(SystemExit, match=sentence):
        rotate(llama_7b, *argv, capsys=capsys)


def test_rotate_draws_a_plot(llama_7b, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rotate(llama_7b, "--s-nodes", "1,2", "--plot", str(tmp_path / "plot.png"), capsys=capsys)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
