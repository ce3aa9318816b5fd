"""`fastdecode-plan measure` and `validate` run on this machine. No figure is judged here: a busy machine has any."""

from __future__ import annotations

import json

import pytest

from fastdecode.demo import model_dir
from fastdecode.plan.cli import main
from fastdecode.plan.measure import StepTime, link_times, row_gbps
from fastdecode.plan.profile import read_profile
from fastdecode.plan.published import LLAMA_7B


def test_a_measured_profile_is_whole_and_can_be_planned_with(tmp_path, capsys):
    path = str(tmp_path / "here.json")
    argv = ["--rows", "3,1", "--kv-dtype", "int8", "--group", "1", "--kv-bytes", "64KiB", "--transport", "tcp"]
    main(["measure", "--out", path, "--seconds", "0.1", *argv])
    printed = capsys.readouterr().out
    profile = read_profile(path)
    assert profile.source == "measured" and profile.in_turns
    assert [n for n, _ in profile.s_node.s_part[0].rows] == [1, 3]
    assert set(profile.r_node.kv_gbps["int8"]) == {"1", "4"} and set(profile.links) == {"tcp"}
    assert "attention over int8" in printed and "tcp:" in printed
    main(["recommend", "--profile", path, "--input-tokens", "100", "--output-tokens", "50", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["source"] == "measured" and {c["mini_batches"] for c in result["choices"]} == {1}


def test_points_are_decoded_and_set_beside_predictions(capsys):
    points = ["--point", "2,128,fp16,1", "--point", "3,128,int4,2"]
    main(["validate", "--model", str(model_dir()), "--seconds", "0.1", "--point-seconds", "0.1", *points, "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["batch"], row["context"], row["kv_dtype"], row["r_nodes"]) for row in rows] == [
        (2, 128, "fp16", 1),
        (3, 128, "int4", 2),
    ]
    for row in rows:
        assert row["measured"] > 0
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)


def test_a_run_that_was_stopped_goes_on_with_what_is_missing(capsys, tmp_path):
    state = tmp_path / "state.json"
    argv = ["validate", "--model", str(model_dir()), "--seconds", "0.1", "--point-seconds", "0.1"]
    argv += ["--point", "2,128,fp16,1", "--point", "3,128,fp16,1", "--state", str(state)]
    main([*argv, "--stop-after", "0"])
    assert "2 measurement(s) are missing" in capsys.readouterr().out
    profile = json.loads(state.read_bytes())["profiles"][0]
    main([*argv[:-4], *argv[-2:], "--json"])  # the first point alone
    first = json.loads(capsys.readouterr().out)
    main([*argv, "--json"])
    both = json.loads(capsys.readouterr().out)
    assert first["profile"] == both["profile"] == profile
    assert len(both["rows"]) == 2 and both["rows"][0] == first["rows"][0] and not both["missing"]


def test_another_file_is_no_state(tmp_path):
    (tmp_path / "state.json").write_text('{"profile": {}}')
    with pytest.raises(SystemExit, match=r"state\.json is not a state of"):
        main(["validate", "--model", str(model_dir()), "--state", str(tmp_path / "state.json")])


def test_a_links_times_by_hand():
    """100 rows more take half a second on their way and a quarter of one at the R-node."""
    steps = [StepTime(1, 0.1, 0.032, 0.01), StepTime(101, 0.1, 0.032 + 0.75, 0.01 + 0.25)]
    link = link_times(LLAMA_7B, steps)
    assert link.layer_seconds == pytest.approx(0.001)
    assert link.gbps == pytest.approx(100 * 32 * 4 * 4096 * 2 / 0.5 / 1e9)
    assert row_gbps(LLAMA_7B, steps) == pytest.approx(2 * link.gbps)
    assert link_times(LLAMA_7B, [steps[0], steps[0]]).gbps == pytest.approx(1000)
