"""scripts/prove_on_gpu.py from end to end, on the simulated driver: no part fails, and no time is in the results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from gpu import cuda_driver
from sources.folders import ROOT

pytestmark = [pytest.mark.tools, pytest.mark.timeout(300)]

sys.path.insert(0, str(ROOT / "scripts"))

from gpu_proof import page, parts  # noqa: E402

#: The parts that are runs of tests, which the whole suite runs anyway.
TESTS = {"tests", "watchdog", "steps"}


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def test_the_proof_runs_here(tmp_path):
    if reason := cuda_driver.missing():
        pytest.skip(reason)
    if cuda_driver.has_driver():
        pytest.skip("this machine has a driver of its own")
    names = [name for name in parts.PARTS if name not in TESTS]
    assert names == ["machine", "tokens", "exchanges", "round-trip", "throughput"] and set(parts.PARTS) > TESTS
    only = [argument for name in names for argument in ("--only", name)]
    command = [sys.executable, str(ROOT / "scripts/prove_on_gpu.py"), "--quick", "--out", str(tmp_path), *only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["simulated"] is True and proof["memory_gib"] == 24.0
    states = {part["name"]: part["status"] for part in proof["parts"]}
    assert states == dict.fromkeys(names, "passed") | {"exchanges": "skipped"}
    results = [part["results"] | {"seconds": part["seconds"]} for part in proof["parts"]]
    assert "simulated" in leaves(results) and not any(isinstance(leaf, float) for leaf in leaves(results))
    (cell,) = proof["parts"][4]["results"]["cells"]
    assert {cell[name] for name in ("tokens_per_s", "s_tokens_per_s", "r_tokens_per_s")} == {"simulated"}
    trips = proof["parts"][3]["results"]["cells"]
    assert {cell["transport"] for cell in trips} == {"shm", "tcp"} and all(cell["equal"] for cell in trips)
    text = (tmp_path / "proof.html").read_text()
    assert "no time and no rate below means anything" in text and "torch cannot use the simulated driver" in text


def test_a_page_has_a_plot_of_every_series():
    pytest.importorskip("matplotlib")
    cell = {"model": "Llama-3-8B", "kv_dtype": "int8", "batch": 32, "tokens_per_s": 1.5, "vllm_tokens_per_s": 1.0}
    part = {"name": "throughput", "status": "passed", "reason": "", "results": {"cells": [cell, cell | {"batch": 64}]}}
    text = page.html({"simulated": False, "parts": [part]})
    assert text.count("<svg") == 1 and "Llama-3-8B int8 vllm_tokens" in text and "<td>1.5</td>" in text
