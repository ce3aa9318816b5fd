"""What a smaller KV-cache costs the demo model, every token decoded through an R-node; transformers judges fp32."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys

import pytest
import torch
from nodes.rnode_process import RNodeProcess

from fastdecode.bench.perplexity import cut, nats_by_position
from fastdecode.demo import heldout_text, model_dir
from fastdecode.spart import load_model
from fastdecode.text.tokenizer import Tokenizer
from fastdecode.transports.registry import connect

SEQUENCES, LENGTH = 32, 160
#: Relative change of perplexity against the fp32 cache.
BUDGET = {"fp16": 0.001, "bf16": 0.001, "int8": 0.003, "int4": 0.02, "int8-int4": 0.01}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    node = RNodeProcess(f"shm://{tmp_path_factory.mktemp('r')}/r.sock", 1 << 28)
    yield node
    node.end()


@pytest.fixture(scope="module")
def model():
    return load_model(model_dir(), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def ids():
    return cut(Tokenizer.from_dir(model_dir()), heldout_text(), SEQUENCES, LENGTH)


async def perplexity(model, node, ids, kv_dtype) -> float:
    link = await connect(node.url, model.hello(1, SEQUENCES, kv_dtype, None, SEQUENCES), None)
    try:
        return math.exp(nats_by_position(model, link, ids).mean())
    finally:
        await link.close()


async def test_perplexity_of_each_kv_format(model, node, ids):
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()
    rows = torch.from_numpy(ids)
    with torch.inference_mode():
        judged = math.exp(judge(rows, labels=rows).loss.item())
    exact = await perplexity(model, node, ids, "fp32")
    assert exact == pytest.approx(judged, rel=1e-5)
    for kv_dtype, budget in BUDGET.items():
        assert await perplexity(model, node, ids, kv_dtype) == pytest.approx(exact, rel=budget), kv_dtype


def test_a_run_that_is_cut_off_prints_what_it_has():
    argv = ["perplexity", "--kv-dtype", "fp32", "--kv-dtype", "int8", "--length", "500", "--sequences", "24", "--json"]
    run = subprocess.Popen(
        [sys.executable, "-m", "fastdecode.bench.cli", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdout and run.stderr
    seen = b""
    while not re.search(rb"KV int8:[^\r]* [1-9]\d*/499 ", seen):
        piece = run.stderr.read1()
        assert piece, seen.decode()
        seen += piece
    run.send_signal(signal.SIGTERM)
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 128 + signal.SIGTERM
    result = json.loads(out)
    whole, part = result["rows"]
    assert whole["tokens"] == result["tokens"] == 11976 and whole["change"] is None
    assert 0 < part["tokens"] < 11976 and part["tokens"] % 24 == 0
    assert abs(part["change"]) < 0.02  # against the same tokens of fp32, not against all of them
