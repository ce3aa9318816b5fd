"""`fastdecode-bench schedule`: what it prints. The schedules themselves are judged in tests/engine."""

from __future__ import annotations

import json

import pytest

from fastdecode.bench.cli import main


def test_a_crowd_holds_its_prompt_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["schedule", "--crowd", "20", "--prompt-tokens", "1280", "--json"])
    crowd = json.loads(capsys.readouterr().out)
    assert crowd["sharing"]["pages"] == 10 + 20
    assert crowd["apart"]["pages"] == 20
    assert crowd["sharing"]["lookup"] > 0
