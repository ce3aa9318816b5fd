"""scripts/prove_on_gpu.py from end to end, on the simulated driver: no part fails, and no time is in the results."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu import cuda_driver
from sources.folders import ROOT
from transformers import AutoModelForCausalLM

from fastdecode.demo import model_dir

pytestmark = [pytest.mark.tools, pytest.mark.timeout(300)]

sys.path.insert(0, str(ROOT / "scripts"))

from gpu_proof import page, parts, serving  # noqa: E402

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
    assert cell["exchange"] == "direct"  # of a CPU; "bypass" on a GPU
    assert {cell[name] for name in ("tokens_per_s", "s_tokens_per_s", "r_tokens_per_s")} == {"simulated"}
    trips = proof["parts"][3]["results"]["cells"]
    assert {cell["transport"] for cell in trips} == {"shm", "tcp"} and all(cell["equal"] for cell in trips)
    text = (tmp_path / "proof.html").read_text()
    assert "no time and no rate below means anything" in text and "torch cannot use the simulated driver" in text


def choices(model: Any, dtype: torch.dtype) -> list[Any]:
    """What a server would say of the last tokens of the proof's prompts, by transformers."""
    model = model.to(dtype)
    made = []
    for prompt in serving.prompts():
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        top = logits.topk(5)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        tops = [dict(zip(map(str, ids), values, strict=True)) for ids, values in rows]
        logprobs = {"token_logprobs": top.values[:, 0].tolist(), "top_logprobs": tops}
        made.append({"text": str(prompt), "logprobs": logprobs})
    return made


def test_log_probabilities_are_compared_with_a_tolerance_that_rounding_keeps():
    """Between fp32 and float64 the model's numbers differ, by less than the tolerance. Those of another model, whose
    weights are a thousandth off, differ by more."""
    model = AutoModelForCausalLM.from_pretrained(model_dir()).eval()
    bound = serving.tolerance(model_dir())
    exact, single = choices(model, torch.float64), choices(model, torch.float32)
    differences = list(map(serving.difference, exact, single))
    assert 0 < max(differences) < bound
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-3 * torch.randn_like(parameter))
    assert min(map(serving.difference, exact, choices(model, torch.float32))) > bound
    assert serving.difference(exact[0], {**exact[0], "text": "another"}) == math.inf


def test_a_page_has_a_plot_of_every_series():
    pytest.importorskip("matplotlib")
    cell = {"model": "Llama-3-8B", "kv_dtype": "int8", "batch": 32, "tokens_per_s": 1.5, "vllm_tokens_per_s": 1.0}
    part = {"name": "throughput", "status": "passed", "reason": "", "results": {"cells": [cell, cell | {"batch": 64}]}}
    text = page.html({"simulated": False, "parts": [part]})
    assert text.count("<svg") == 1 and "Llama-3-8B int8 vllm_tokens" in text and "<td>1.5</td>" in text
