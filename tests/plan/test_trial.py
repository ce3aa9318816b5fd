"""`fastdecode-plan trial` and the engine's cost run on this machine. No figure is judged: a busy machine has any."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest
from engines.virtual import gaps, serve, toy_system

from fastdecode.daemon.machine import usable_cpus
from fastdecode.plan.cli import main
from fastdecode.plan.engine_cost import EngineCost, engine_cost
from fastdecode.plan.published import LLAMA_7B

two_cpus = pytest.mark.skipif(len(usable_cpus()) < 2, reason="S-Part and R-Part need a CPU each")
ARGV = ["trial", "--requests", "5", "--input-tokens", "20", "--output-tokens", "12", "--max-batch-size", "2"]


@two_cpus
def test_a_load_is_served_and_simulated(capsys, tmp_path):
    path = str(tmp_path / "here.json")
    main([*ARGV, "--seconds", "0.1", "--schedule", "stable", "--passes", "2", "--out", path, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["profile"]["s_node"]["engine_row"] > 0 and not result["profile"]["in_turns"]
    main([*ARGV, "--profile", path, "--passes", "1"])
    text = capsys.readouterr().out
    assert "stable beside greedy: real" in text and "us a row" in text
    (row,) = result["rows"]
    for figures in (*row["passes"], row["simulated"]):
        assert figures["tokens_per_s"] == pytest.approx(5 * 12 / figures["seconds"])
    assert row["real"]["seconds"] == statistics.median(one["seconds"] for one in row["passes"])
    assert len(row["passes"]) == 2 and row["passes"][0] != row["passes"][1]
    assert row["error"] == pytest.approx(row["simulated"]["tokens_per_s"] / row["real"]["tokens_per_s"] - 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--passes", "0"], "at least 1"),
        (["--profile", "desktop-ddr4"], "s_node"),
        (["--profile", "a10-epyc7452"], "no link over shm"),
        (["--r-threads", "1000"], "more than the"),
        (["--input-tokens", "100000"], "positions"),
    ],
)
def test_what_cannot_be_is_refused(argv, message):
    with pytest.raises(SystemExit, match=message):
        main([*ARGV, *argv])


def test_the_engines_cost_is_a_line_through_two_batches():
    cost = EngineCost.from_steps(few=60e-6, many=1340e-6)
    assert (cost.row, cost.step) == (pytest.approx(10e-6), pytest.approx(50e-6))


async def test_the_engines_cost_is_that_of_its_own_code():
    cost = await engine_cost(LLAMA_7B, repeat=1)
    assert 1e-6 < cost.row < 0.01


def test_the_s_part_is_slower_beside_another_mini_batch():
    system = dataclasses.replace(toy_system(((1, 0.010), (516, 0.010)), 1e-9), overlap=1.3)
    load = [(0.0, 10, 20)] * 4
    for mini_batches, seconds in ((1, 0.010), (2, 2 * 1.3 * 0.010)):
        assert sorted(gaps(serve(load, system, mini_batches=mini_batches)))[10] == pytest.approx(seconds, rel=0.01)


def test_a_simulated_step_takes_the_engines_time_too():
    system = toy_system(((1, 0.010), (516, 0.010)), 1e-9)
    slow = dataclasses.replace(system, engine_step=0.003, engine_row=0.0005)
    load = [(0.0, 10, 20)] * 4
    for s, seconds in ((system, 0.010), (slow, 0.010 + 0.003 + 4 * 0.0005)):
        assert sorted(gaps(serve(load, s)))[10] == pytest.approx(seconds, rel=0.01)


@two_cpus
def test_streams_are_served_beside_disturbances(capsys, tmp_path):
    path = str(tmp_path / "here.json")
    argv = ["trial", "--disturb", "--requests", "3", "--output-tokens", "12", "--max-batch-size", "2"]
    argv += ["--long-prompt", "300", "--choices", "4", "--schedule", "greedy", "--seconds", "0.1"]
    main([*argv, "--out", path, "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["system"] for row in rows] == ["real"] * 3 + ["simulated"] * 3
    assert all(row["taken"] == 3 and not row["failed"] and not row["refused"] for row in rows)
    main([*argv, "--profile", path])
    assert capsys.readouterr().out.count("one request of 300 tokens with 4 choices") == 2
