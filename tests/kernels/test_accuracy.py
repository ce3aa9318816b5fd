"""Attention over each KV-cache format against float64: real K and V of the demo model, and hostile ranges of values.

Every error is relative, |O - reference| / |reference| of a row of O. A kernel's budget covers its
arithmetic alone: the reference reads the cached values. A format's budget covers the rounding of K and V too: the
reference reads the values before they were cached.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from attention import kv_accuracy as accuracy
from attention.kernel_budget import BF16, FLOATS, INT7, INT8, INT16, budget
from nodes.rnode_process import RNodeProcess

from fastdecode.bench.perplexity import cut
from fastdecode.demo import heldout_text, model_dir
from fastdecode.kernels import _native
from fastdecode.region.contract import KV_DTYPES
from fastdecode.spart import load_model
from fastdecode.text.tokenizer import Tokenizer
from fastdecode.transports.registry import connect

ISAS = _native.isa_supported()
ADVERSARIAL = accuracy.adversarial()

#: Budgets of a kernel's arithmetic: over all rows of any input, and for the worst row of the demo model. The first is
#: relative to what the weights multiply (accuracy.multiplied), if that is more than V.
KERNEL = {FLOATS: (5e-6, 2e-5), INT16: (6e-4, 5e-3), INT8: (3e-2, 0.15), BF16: (6e-3, 5e-2)}
KERNEL[INT7] = (6e-2, 0.3)
#: Budgets of a format, for the demo model: over all rows, and for the worst row.
MODEL = {"fp32": (1e-6, 2e-5), "fp16": (8e-4, 6e-3), "bf16": (6e-3, 5e-2), "int8": (1.5e-2, 0.2), "int4": (0.2, 1.5)}
MODEL["int8-int4"] = (0.1, 0.3)
#: Budgets of a format, over all rows of a hostile range.
FORMAT = {"fp32": 5e-6, "fp16": 2e-3, "bf16": 1e-2, "int8": 6e-2, "int4": 1.0, "int8-int4": 0.15}
#: Budgets where a format cannot hold the values: fp16 saturates at 65504 and is subnormal below 6e-5, integers are zero
#: below 1e-33.
LOST = {
    "beyond fp16": {"fp16": 1.0},
    "huge": {"fp16": 1.0},
    "below fp16": {"fp16": 5e-2},
    "subnormal": {"fp32": 2e-4, "fp16": 1.0, "bf16": 0.5, "int8": 1.0, "int4": 4.0, "int8-int4": 4.0},
}


@pytest.fixture(scope="module")
def model_cases(tmp_path_factory) -> list[accuracy.Case]:
    model = load_model(model_dir(), device="cpu", dtype=torch.float32)
    ids = cut(Tokenizer.from_dir(model_dir()), heldout_text(), 2, 140)
    node = RNodeProcess(f"shm://{tmp_path_factory.mktemp('r')}/r.sock", 1 << 26)

    async def decode() -> list[accuracy.Case]:
        link = await connect(node.url, model.hello(2, len(ids), "fp32", None, len(ids)), None)
        try:
            return accuracy.captured(model, link, ids)
        finally:
            await link.close()

    try:
        return asyncio.run(decode())
    finally:
        node.end()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_real_k_and_v_of_every_layer_and_head(model_cases, kv_dtype):
    assert len(model_cases) == 5 * 2 * 2 and model_cases[0].q.shape == (140, 4, 32)
    for isa, (kernel, whole) in accuracy.errors(ISAS, kv_dtype, model_cases).items():
        for error, (all_rows, worst) in (
            (kernel, KERNEL[budget(isa, kv_dtype)]),
            (whole, MODEL[kv_dtype]),
        ):
            assert error.pooled <= all_rows and error.worst <= worst, (isa, error)


def test_captured_k_and_v_equal_those_of_transformers(model_cases):
    """K and V of the last layer, whose inputs have all passed through the R-node."""
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()
    ids = torch.from_numpy(cut(Tokenizer.from_dir(model_dir()), heldout_text(), 2, 140))
    with torch.inference_mode():
        layer = judge(ids, use_cache=True).past_key_values.layers[4]
    cases = model_cases[-4:]  # sequence 0's two heads, then sequence 1's
    for case, (sequence, head) in zip(cases, np.ndindex(2, 2), strict=True):
        np.testing.assert_allclose(case.k, layer.keys[sequence, head], atol=2e-4)
        np.testing.assert_allclose(case.v, layer.values[sequence, head], atol=2e-4)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_hostile_ranges(name, kv_dtype):
    cases = ADVERSARIAL[name]
    (case,) = cases
    v = case.v.astype(np.float64)
    wider = max(1.0, np.linalg.norm(accuracy.multiplied(case.v, kv_dtype)) / max(np.linalg.norm(v), 1e-30))
    for q_len in (1, 64):  # token by token, and as one block
        for isa, (kernel, whole) in accuracy.errors(ISAS, kv_dtype, cases, q_len).items():
            lost = LOST.get(name, {}).get(kv_dtype, FORMAT[kv_dtype])
            allowed = KERNEL[budget(isa, kv_dtype)][0] * wider
            if name == "subnormal":  # the results have few bits themselves
                flushed = kv_dtype == "bf16" and isa in ("avx512bf16", "amx")  # to zero, by the dot products
                allowed = max(allowed, 1.0 if flushed else 2e-4)
            assert kernel.pooled <= allowed, (isa, q_len, kernel)
            assert whole.pooled <= max(lost, 1.1 * allowed), (isa, q_len, whole)


def test_a_wrong_result_is_an_error():
    case = ADVERSARIAL["normal"][0]
    exact = accuracy.reference(case, case.k, case.v)
    error = accuracy.Error()
    error.add(exact, exact)
    assert (error.pooled, error.worst) == (0, 0)
    error.add(exact * 1.01, exact)
    assert error.pooled == pytest.approx(0.01 / 2**0.5) and error.worst == pytest.approx(0.01)
    error.add(np.ones((1, 1, 8)), np.zeros((1, 1, 8)))
    assert error.worst == np.inf
