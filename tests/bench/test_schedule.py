"""`fastdecode-bench schedule`: what it prints. The schedules themselves are judged in tests/engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdecode.bench.cli import main

TRACE = Path(__file__).parents[1] / "engine" / "traces" / "azure-conv-1024.csv"


def test_the_table_has_a_row_for_each_load_and_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    main(["schedule", "--requests", "64", "--batch", "8", "--output-tokens", "32", "--trace", str(TRACE)])
    table = capsys.readouterr().out
    assert [line.split("  ")[0] for line in table.splitlines()[1:-1]] == (
        ["known length"] * 2 + ["trace, at once"] * 3 + ["trace, arrivals"] * 2
    )
    assert "simulated" in table


def test_the_json_has_the_figures_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["schedule", "--requests", "64", "--batch", "8", "--output-tokens", "32", "--json"])
    greedy, stable = json.loads(capsys.readouterr().out)["known length"]
    assert greedy["gain"] == 1 and stable["peak"] < 0.8
    assert stable["gain"] == pytest.approx(stable["rate"] / greedy["rate"])


def test_a_crowd_holds_its_prompt_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["schedule", "--crowd", "20", "--prompt-tokens", "1280", "--json"])
    crowd = json.loads(capsys.readouterr().out)
    assert crowd["sharing"]["pages"] == 10 + 20
    assert crowd["apart"]["pages"] == 20
    assert crowd["sharing"]["lookup"] > 0


def test_a_trace_without_requests_to_learn_from_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no more than the 1024"):
        main(["schedule", "--requests", "1024", "--batch", "64", "--output-tokens", "4", "--trace", str(TRACE)])
