"""`fastdecode-bench drain`: what it prints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_streams_of_a_drained_r_node_all_move(transport):
    command = [sys.executable, "-m", "fastdecode.bench.cli", "drain", "--json", "--streams", "8", "--context", "140"]
    run = subprocess.run([*command, "--transport", transport], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["moved"], found["recomputed"]) == (found["streams"], 0) and found["streams"]
    assert sum(found["steps_missed"].values()) == 16 and found["mebibytes"] > 0
    assert found["gap_ms_during"]["longest"] >= found["gap_ms_before"]["median"] > 0
    assert found["longest_beyond_undisturbed_in_usual_steps"] <= found["longest_beyond_median_in_usual_steps"]
