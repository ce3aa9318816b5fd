"""The costs of S-Part and R-nodes on one machine against hand-made numbers."""

from __future__ import annotations

import dataclasses

import pytest

from fastdecode.plan.colocation import Colocation, ColocationCost, colocation_cost, fastest
from fastdecode.plan.equations import StageTimes, System, Work, round_seconds, shared_seconds, stage_times
from fastdecode.plan.model import PlannedModel
from fastdecode.plan.profile import LinkTimes, Profile, RNodeProfile, SNodeProfile, SPartTimes, read_profile

#: One layer, 4 query heads and 2 KV heads of 8: a cached fp16 token has 64 bytes.
MODEL = PlannedModel("toy", 1, 4, 2, 8, 1000.0)
CELL = Colocation(
    r_nodes=1,
    kv_dtype="fp16",
    group=2,
    kv_bytes=1000.0,
    waited=0.5,
    layers=1,
    carried=1e3,
    parameters=1000.0,
    rows=5,
    s_part=4.0,
    lost=0.25,
)
LARGE = dataclasses.replace(CELL, kv_bytes=16000.0, waited=8.25, s_part=5.0)
TWO = dataclasses.replace(LARGE, r_nodes=2, waited=16.25, s_part=5.5, lost=0.5)
INT8 = dataclasses.replace(CELL, kv_dtype="int8", waited=0.25 + 1 / 3)
PROFILE = Profile(
    name="here",
    source="measured",
    in_turns=True,
    s_node=SNodeProfile(device="s", s_part=(SPartTimes(model="toy", parameters=1000, rows=((1, 1.0), (9, 5.0))),)),
    r_node=RNodeProfile(device="r", kv_gbps={"fp16": {"2": 8e-6}, "int8": {"2": 8e-6}}, memory=1e9),
    links={"shm": LinkTimes(layer_seconds=0.15, gbps=1e-5), "tcp": LinkTimes(layer_seconds=0.5, gbps=1e-6)},
    colocations=(CELL, LARGE, TWO, INT8),
)


def of_cell(cell):
    """The rows are on their way for 0.25 s: 0.15 s with the layer's latency and 0.1 s for their 1000 bytes."""
    return ColocationCost(cell.kv_gbps(0.15, 1e-4), cell.s_part - 3.0, cell.lost)


def test_costs_lie_between_the_measured_sizes_and_end_with_them():
    cells = PROFILE.colocations
    assert colocation_cost(cells, "fp16", 1, 1000.0, of_cell) == colocation_cost(cells, "fp16", 1, 10.0, of_cell)
    assert colocation_cost(cells, "fp16", 1, 10.0, of_cell) == pytest.approx((4e-6, 1.0, 0.25))
    assert colocation_cost(cells, "fp16", 1, 1e9, of_cell) == pytest.approx((2e-6, 2.0, 0.25))
    middle = colocation_cost(cells, "fp16", 1, 4000.0, of_cell)
    assert middle.kv_gbps == pytest.approx(1 / ((1 / 4e-6 + 1 / 2e-6) / 2)) and middle.s_extra == pytest.approx(1.5)


def test_several_r_nodes_change_another_format_as_they_change_the_measured_one():
    """Two R-nodes halve the speed of fp16, add 0.5 s to the S-Part and 0.25 to what is lost."""
    assert colocation_cost(PROFILE.colocations, "int8", 2, 1000.0, of_cell) == pytest.approx((1.5e-6, 1.5, 0.5))
    with pytest.raises(ValueError, match="over int4"):
        colocation_cost(PROFILE.colocations, "int4", 2, 1000.0, of_cell)


def test_in_turns_the_s_part_finds_its_weights_in_memory_and_attention_has_the_speed_of_turns():
    system = System.from_profile(PROFILE, "shm", MODEL, "fp16", 1)
    parts = stage_times(system, Work(rows=1, read_tokens=16000 / 64))
    assert parts.r_part == pytest.approx(16000 / 2e3)
    assert parts.s_part == pytest.approx(1.0 + 2.0)  # 5 rows take 3 s with nothing cached, and 5 s here
    assert stage_times(system, Work(rows=5, read_tokens=0)).s_part == pytest.approx(3.0)
    assert round_seconds([parts], system.in_turns)[0] == pytest.approx(parts.alone)


def test_r_nodes_of_one_machine_share_its_bandwidth():
    one, two = (stage_times(System.from_profile(PROFILE, "shm", MODEL, "fp16", n), Work(1, 250)) for n in (1, 2))
    assert two.r_part == pytest.approx(2 * one.r_part)
    uneven = stage_times(System.from_profile(PROFILE, "shm", MODEL, "fp16", 2), Work(1, 250), slowest_share=0.75)
    assert uneven.r_part == pytest.approx(1.5 * two.r_part)


def test_r_nodes_of_other_machines_cost_the_s_node_nothing():
    system = System.from_profile(PROFILE, "tcp", MODEL, "fp16", 2)
    assert system.colocations == () and stage_times(system, Work(1, 250)).r_part == pytest.approx(16000 / 8e3 / 2)


def test_a_model_with_other_weights_reads_them_in_proportion():
    system = System.from_profile(PROFILE, "shm", dataclasses.replace(MODEL, name="other", parameters=2000.0), "fp16", 1)
    assert system.reading(16000.0).s_extra == pytest.approx(2 * 2.0)


@pytest.mark.parametrize(("lost", "seconds"), [(0.0, 6), (0.5, 7), (1.0, 8)])
def test_overlap_hides_what_is_not_lost(lost, seconds):
    """The R-Part takes 6 s and the S-Part 2 s: together 6 s on two machines, and 8 s if the parts take turns."""
    parts = [StageTimes(1, 3, 0, 0, 0, lost=lost)] * 2
    assert round_seconds(parts, in_turns=False) == (seconds, "R-Part")
    assert shared_seconds([StageTimes(3, 1, 0, 0, 0, lost=lost)] * 2)["S-Part"] == seconds


def test_a_profile_keeps_what_was_measured(tmp_path):
    PROFILE.write(tmp_path / "p.json")
    assert read_profile(str(tmp_path / "p.json")) == PROFILE


def test_an_older_profile_has_another_name_for_the_section(tmp_path):
    PROFILE.write(tmp_path / "p.json")
    old = tmp_path / "old.json"
    old.write_bytes((tmp_path / "p.json").read_bytes().replace(b'"colocations"', b'"together"'))
    assert read_profile(str(old)) == PROFILE


def test_the_best_of_each_case_counts():
    noisy = dataclasses.replace(CELL, waited=0.45, s_part=9.0, lost=0.9)
    assert fastest([(CELL, LARGE), (noisy, LARGE)]) == (dataclasses.replace(CELL, waited=0.45), LARGE)


@pytest.mark.parametrize("change", [{"waited": 0.0}, {"lost": 1.5}, {"rows": 0}])
def test_numbers_that_cannot_be_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(CELL, **change)


def test_a_link_that_was_measured_too_slow_does_not_make_reading_too_fast():
    assert CELL.kv_gbps(5.0, 1e-6) == pytest.approx(1000 / 0.25 * 1e-9)
