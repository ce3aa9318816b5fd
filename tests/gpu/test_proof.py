"""scripts/prove_on_gpu.py from end to end, on the simulated driver: no part fails, and no time is in the results."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu import cuda_driver
from sources.folders import ROOT
from transformers import AutoModelForCausalLM

from fastdecode.demo import model_dir

pytestmark = [pytest.mark.tools, pytest.mark.timeout(300)]

sys.path.insert(0, str(ROOT / "scripts"))

from gpu_proof import parts, peers, serving  # noqa: E402
from gpu_proof.setting import Setting  # noqa: E402

#: The parts that are runs of tests, which the whole suite runs anyway.
TESTS = {"tests", "watchdog", "steps"}


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def prove(out: Path, *arguments: str) -> dict[str, Any]:
    """The results of a run without a GPU."""
    if reason := cuda_driver.missing():
        pytest.skip(reason)
    if cuda_driver.has_driver():
        pytest.skip("this machine has a driver of its own")
    command = [sys.executable, str(ROOT / "scripts/prove_on_gpu.py"), "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "proof.json").read_text())


def test_the_proof_runs_here(tmp_path):
    names = [name for name in parts.PARTS if name not in TESTS]
    assert names == [
        *("machine", "tokens", "exchanges", "throughput", "prompts", "r-node", "weights", "attention", "round-trip")
    ]
    assert set(parts.PARTS) > TESTS
    proof = prove(tmp_path, *(argument for name in names for argument in ("--only", name)))
    assert proof["simulated"] is True and proof["card"] == "simulated"
    states = {part["name"]: part["status"] for part in proof["parts"]}
    assert states == dict.fromkeys(names, "passed") | dict.fromkeys(("exchanges", "r-node"), "skipped")
    results = [part["results"] | {"seconds": part["seconds"]} for part in proof["parts"]]
    assert "simulated" in leaves(results) and not any(isinstance(leaf, float) for leaf in leaves(results))
    found = {part["name"]: part["results"] for part in proof["parts"]}
    (cell,) = found["throughput"]["cells"]
    assert found["throughput"]["exchange"] == "direct"  # of a CPU; "bypass" on a GPU
    assert {cell[name] for name in ("tokens_per_s", "s_tokens_per_s", "r_tokens_per_s")} == {"simulated"}
    peers = [(cell["peer"], cell["tokens_per_s"]) for cell in found["throughput"]["peers"]]
    assert peers == [(name, "simulated") for name in ("kv on the GPU", "kv copied", "transformers")]
    prompts = [
        (cell["system"], cell["prompts"], cell["tokens"], cell.get("beside")) for cell in found["prompts"]["prompts"]
    ]
    assert prompts == [
        ("fastdecode", 1, 64, None),
        ("fastdecode", 4, 16, None),
        ("fastdecode", 4, 16, "2 streams"),
        ("transformers", 1, 64, None),
        ("transformers", 4, 16, None),
    ]
    assert found["prompts"]["prompts"][2]["tbt_p99_ms"] == "simulated"
    assert found["prompts"]["first steps"] == [{"sequences": 2, "longest_gap_ms": "simulated", "later_ms": "simulated"}]
    assert [cell["rows"] for cell in found["weights"]["cells"]] == [1, 4, 16, 64, 512]
    attended = found["attention"]["cells"]
    assert [cell["kv_dtype"] for cell in attended] == ["fp16", "bf16", "int8"]
    assert all(float(cell["difference"]) < 0.03 for cell in attended)
    trips = found["round-trip"]["cells"]
    assert {cell["transport"] for cell in trips} == {"shm", "tcp"} and all(cell["equal"] for cell in trips)
    page = (tmp_path / "proof.md").read_text()
    assert "no time and no rate below means anything" in page and "torch cannot use the simulated driver" in page
    assert "| kv copied | 4 | 16 | simulated | simulated |" in page


def test_a_part_at_its_bound_keeps_what_it_has(tmp_path):
    """Two seconds are too few for the parts, and none is left for the last one."""
    proof = prove(tmp_path, "--minutes", "0.05", "--only", "machine", "--only", "steps", "--only", "weights")
    assert [part["status"] for part in proof["parts"]] == ["passed", "cut", "skipped"]
    assert proof["parts"][1]["results"]["steps of each test"] == 20_000
    assert "raise --minutes" in proof["parts"][2]["reason"]


def test_work_at_the_bound_of_its_share_leaves_time_for_the_rest(tmp_path):
    setting = Setting.here(tmp_path, tmp_path, steps=1, memory_gib=1.0, minutes=1.0)
    setting.begin(60.0)
    with setting.share(0.0, "work"):
        setting.left()
    assert setting.results == {"work": "the part has reached its bound"}
    assert setting.left() > 30


@pytest.mark.parametrize("kind", [peers.GPUCache, peers.CopiedCache])
def test_peers_attend(kind):
    """Each query head to all cached tokens and the step's own, in float64."""
    torch.manual_seed(0)
    shape = SimpleNamespace(n_q_heads=4, n_kv_heads=2, head_size=8, n_layers=3, row_sizes=(32, 32, 32))
    model = SimpleNamespace(device=torch.device("cpu"), config=shape, dtype=torch.float32)
    cache = kind(model, 5, 7)
    if kind is peers.CopiedCache:
        cache.begin()
    for layer in range(3):
        stored = cache.caches[layer].double()
        cache.q.normal_()
        cache.kv.normal_()
        cache.post(layer)
        k, v = torch.cat([stored[:, :, :7], cache.kv.double().view(5, 4, 1, 8)], dim=2).split(2, dim=1)
        q = cache.q.double().view(5, 2, 2, 8)
        want = (q @ k.mT / 8**0.5).softmax(3) @ v
        torch.testing.assert_close(cache.o.double(), want.reshape(5, -1), rtol=1e-5, atol=1e-5)


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
