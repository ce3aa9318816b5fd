"""`fastdecode-bench rotate`: two S-node processes give the tokens of one."""

from __future__ import annotations

import json
import subprocess
import sys

BENCH = [sys.executable, "-m", "fastdecode.bench.cli"]


def test_two_processes_give_the_tokens_of_one(tmp_path):
    model = tmp_path / "five"
    shape = ["--layers", "5", "--hidden", "64", "--intermediate", "96", "--heads", "4", "--kv-heads", "2"]
    subprocess.run([*BENCH, "checkpoint", "--out", str(model), *shape, "--vocab", "300"], check=True, timeout=60)
    size = ["--batch", "7", "--context", "130", "--steps", "6", "--rounds", "2", "--json"]
    done = subprocess.run([*BENCH, "rotate", "--model", str(model), *size], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens_compared"] == 3 * 2 * 7 * 6
    rates = {name: way["tokens_per_s"] for name, way in found["ways"].items()}
    assert len(rates) == 4 and min(rates.values()) > 0
    costs = [way["hand_over_us"] for way in found["ways"].values()]
    assert [cost is None for cost in costs] == [True, False, True, True]


def test_a_model_with_too_few_layers_is_a_sentence(tmp_path):
    shape = ["--layers", "3", "--hidden", "64", "--intermediate", "96", "--heads", "4", "--kv-heads", "2"]
    subprocess.run([*BENCH, "checkpoint", "--out", str(tmp_path), *shape, "--vocab", "300"], check=True, timeout=60)
    done = subprocess.run(
        [*BENCH, "rotate", "--model", str(tmp_path), "--context", "8"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("a model of 3 layers cannot rotate over 2 S-nodes")
