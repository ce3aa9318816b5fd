"""Profiles: what is read back, what is refused, and where a missing number comes from."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fastdecode.plan.profile import (
    SHIPPED,
    LinkTimes,
    Profile,
    ProfileError,
    RNodeProfile,
    SNodeProfile,
    SPartTimes,
    fastest,
    median,
    merged,
)
from fastdecode.plan.profile import read_profile as read

TIMES = SPartTimes(model="m", parameters=100.0, rows=((1.0, 1.0), (5.0, 3.0)))
PROFILE = Profile(
    name="here",
    source="measured",
    s_node=SNodeProfile(device="s", s_part=(TIMES,)),
    r_node=RNodeProfile(device="r", kv_gbps={"fp16": {"1": 10.0, "4": 8.0}}, memory=1e9),
    links={"tcp": LinkTimes(layer_seconds=1e-5, gbps=2.0)},
)


def test_what_is_written_is_read(tmp_path):
    PROFILE.write(tmp_path / "p.json")
    assert read(str(tmp_path / "p.json")) == PROFILE


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.json")))
def test_profiles_that_ship_can_be_merged_and_say_what_they_come_from(name):
    profile = merged([PROFILE, read(name)])
    assert read(name).source == profile.source == ("measured" if name == "h200" else "data sheet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"source": "guess"}, "source is 'guess'"),
        ({"price": 1}, "there is no field 'price'; there are version, name"),
        ({"s_node": {"device": "s", "s_part": []}}, "no times"),
        ({"s_node": {"device": "s", "s_part": [{"model": "m", "parameters": 1, "rows": [[4, 1], [2, 1]]}]}}, "rise"),
        ({"s_node": {"device": "s", "s_part": [{"model": "m", "parameters": -1, "rows": [[1, 1]]}]}}, "parameters"),
        ({"s_node": {"device": "s", "s_part": [], "sockets": {"n": 0}}}, "cross_gbps"),
        ({"r_node": {"device": "r", "memory": 1, "kv_gbps": {"fp12": {"1": 1}}}}, "fp12"),
        ({"r_node": {"device": "r", "memory": 1, "kv_gbps": {"fp16": {"1": 0}}}}, "positive GB/s"),
        ({"r_node": {"device": "r", "memory": "1", "kv_gbps": {}}}, "memory"),
        ({"links": {"tcp": {"gbps": 1}}}, "links.tcp: the field 'layer_seconds' is missing"),
    ],
)
def test_a_profile_that_is_wrong_is_refused_with_the_field(change, message, tmp_path):
    PROFILE.write(tmp_path / "p.json")
    value = json.loads((tmp_path / "p.json").read_text()) | change
    (tmp_path / "p.json").write_text(json.dumps(value))
    with pytest.raises(ProfileError, match=message):
        read(str(tmp_path / "p.json"))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": "x"}'])
def test_a_file_that_is_no_profile_is_refused(text, tmp_path):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProfileError, match=r"p\.json"):
        read(str(tmp_path / "p.json"))


def test_a_missing_profile_names_those_that_ship():
    with pytest.raises(ProfileError, match="a10-epyc7452"):
        read("nowhere.json")


def test_times_between_and_beyond_the_rows():
    assert [TIMES.seconds(n) for n in (0.5, 1, 3, 5, 9)] == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert [TIMES.rows_in(t) for t in (0.5, 1.0, 2.0, 3.0, 5.0)] == [1, 1, 3, 5, 9]


def test_a_model_that_was_not_measured_takes_the_times_of_the_nearest_in_size():
    small, large = (dataclasses.replace(TIMES, model=name, parameters=n) for name, n in (("a", 10.0), ("b", 1000.0)))
    node = SNodeProfile(device="s", s_part=(small, large))
    assert node.times("a", 7.0) is small
    assert node.times("c", 500.0).rows == ((1.0, 0.5), (5.0, 1.5))


def test_a_group_that_was_not_measured_takes_the_next():
    r_node = PROFILE.r_node
    assert [r_node.bytes_per_second("fp16", group) for group in (1, 2, 4, 8)] == [10e9, 8e9, 8e9, 8e9]
    with pytest.raises(ProfileError, match="no speed of int4; it has fp16"):
        r_node.bytes_per_second("int4", 1)


def test_later_profiles_give_their_sections():
    other = Profile(name="there", source="data sheet", r_node=RNodeProfile(device="x", kv_gbps={}, memory=1.0))
    both = merged([dataclasses.replace(PROFILE, in_turns=True), other])
    assert both.r_node is other.r_node and both.s_node is PROFILE.s_node
    assert both.source == "data sheet" and not both.in_turns
    with pytest.raises(ProfileError, match="s_node"):
        merged([other])


def profile(rows, gbps, latency):
    return Profile(
        name="here",
        source="measured",
        s_node=SNodeProfile(device="cpu", s_part=(SPartTimes(model="m", parameters=1e8, rows=rows),)),
        r_node=RNodeProfile(device="cpu", kv_gbps={"fp16": {"1": gbps}}, memory=1e9),
        links={"shm": LinkTimes(layer_seconds=latency, gbps=1.0)},
    )


def test_the_fastest_times_of_several_profiles_count():
    best = fastest([profile(((1, 0.02), (8, 0.05)), 10.0, 2e-5), profile(((1, 0.03), (8, 0.04)), 8.0, 1e-5)])
    assert best == profile(((1, 0.02), (8, 0.04)), 10.0, 1e-5)


def test_the_median_of_every_number_of_several_profiles():
    some = (
        [((1, 0.02), (8, 0.05)), 10.0, 2e-5],
        [((1, 0.03), (8, 0.04)), 8.0, 1e-5],
        [((1, 0.01), (8, 0.09)), 9.0, 4e-5],
    )
    assert median([profile(*one) for one in some]) == profile(((1, 0.02), (8, 0.05)), 9.0, 2e-5)
    assert median([PROFILE]) == PROFILE
