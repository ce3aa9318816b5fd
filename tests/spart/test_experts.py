"""Mixtures of experts: their grouped products and their load. test_spart.py compares whole models with transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines.api_client import served
from engines.real_engine import real_engine
from engines.token_stream import submit
from models.checkpoints import make_checkpoint
from torch import Tensor

from fastdecode.engine.state.request import SamplingParams
from fastdecode.kernels import _native
from fastdecode.spart import load_model
from fastdecode.spart.checkpoints.config import Experts
from fastdecode.spart.decoder.block_ops import make_activation
from fastdecode.spart.decoder.experts import Mixture
from fastdecode.spart.linears import grouped_mm
from fastdecode.spart.linears.dense16 import multiplies_bf16
from fastdecode.spart.linears.experts import ExpertRows, LoopedExperts, StackedExperts
from fastdecode.spart.linears.rounding import quantise
from fastdecode.spart.linears.stack import make_experts
from fastdecode.text.tokenizer import Tokenizer

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_grouped_mm", [True, False])
@pytest.mark.parametrize("kind", ["looped", "stacked"])
def test_each_row_is_multiplied_with_its_experts_matrix(kind, has_grouped_mm, monkeypatch):
    if not has_grouped_mm:
        monkeypatch.setattr(grouped_mm, "_torch_can", lambda *_: False)
    weight, bias, x = torch.randn(5, 24, 16), torch.randn(5, 24), torch.randn(9, 16)
    experts = torch.tensor([0, 0, 0, 2, 2, 3, 3, 3, 3])  # none has expert 1 or 4
    rows = ExpertRows(experts, experts.bincount(minlength=5))
    linears = (
        StackedExperts(weight, bias)
        if kind == "stacked"
        else make_experts([([w], b) for w, b in zip(weight, bias, strict=True)], CPU, torch.float32)
    )
    assert isinstance(linears, StackedExperts if kind == "stacked" else LoopedExperts)
    expected = torch.stack([weight[e] @ row + bias[e] for e, row in zip(experts, x, strict=True)])
    torch.testing.assert_close(linears(x, rows), expected, atol=1e-5, rtol=1e-5)


def mixture_of(weights: str, act: torch.dtype, clamped: bool) -> tuple[Mixture, Callable[[Tensor], Tensor]]:
    """A mixture of 6 experts with biases, and the same in float64: a function of rows."""
    random = torch.Generator().manual_seed(1)
    n, used, hidden, inner = 6, 3, 96, 64
    config = Experts(n, used, inner, True, clamped_swiglu=(1.7, 0.5) if clamped else None)
    sizes = {"up": (2 * inner, hidden), "down": (hidden, inner)}
    matrices = {name: torch.randn(n, *size, generator=random).bfloat16() / 8 for name, size in sizes.items()}
    biases = {name: torch.randn(n, size[0], generator=random).bfloat16() / 4 for name, size in sizes.items()}
    router = torch.randn(n, hidden, generator=random)
    exact, linears = {}, []
    for name, weight in matrices.items():
        stored = list(weight)
        if weights != "16 bits":
            stored = [quantise(matrix.float(), int(weights[3:])) for matrix in stored]
        linears.append(make_experts(zip(([matrix] for matrix in stored), biases[name], strict=True), CPU, act))
        whole = weight if weights == "16 bits" else torch.stack([matrix.dequantise() for matrix in stored])
        exact[name] = whole.double()

    def reference(x: Tensor) -> Tensor:
        out = []
        for row in x.double():
            scores, chosen = (router.to(act).double() @ row).softmax(0).topk(used)
            results = []
            for e in chosen:
                gate, up = (exact["up"][e] @ row + biases["up"][e].double()).chunk(2)
                if clamped:
                    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5) + 1
                alpha = 1.7 if clamped else 1.0
                results.append(exact["down"][e] @ (gate * (gate * alpha).sigmoid() * up) + biases["down"][e].double())
            out.append((scores / scores.sum()) @ torch.stack(results))
        return torch.stack(out)

    return Mixture(config, router.to(act), None, None, *linears), reference


@pytest.mark.parametrize("isa", [isa for isa in _native.isa_supported() if isa != "scalar"])
@pytest.mark.parametrize("weights", ["16 bits", "int8", "int4"])
@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16])
def test_experts_in_c_equal_float64(isa, weights, clamped, act, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    mixture, reference = mixture_of(weights, act, clamped)
    mixture.run_in_c(False, act)
    if act is torch.bfloat16 and (weights != "16 bits" or not multiplies_bf16(CPU, 96)):
        assert mixture._native is None
        return
    assert mixture._native is not None
    x = torch.randn(150, 96, generator=torch.Generator().manual_seed(2)).to(act)
    want = reference(x)
    with torch.inference_mode():
        got = mixture(x, lambda up: pytest.fail("computed by torch"))
        alone = mixture(x[7:8], lambda up: pytest.fail("computed by torch"))
    assert mixture.load is not None and mixture.load.sum() == 3 * 151
    error = (got.double() - want).square().mean().sqrt() / want.std()
    assert error < (0.01 if act is torch.bfloat16 else 1e-6 if weights == "16 bits" else 2e-3)
    torch.testing.assert_close(alone, got[7:8])  # the router is multiplied by torch


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "glm4-moe"])
def test_experts_are_quantised_and_a_row_does_not_depend_on_others(name):
    directory = make_checkpoint(name)
    dense, int8 = (load_model(directory, dtype="fp32", weights=weights) for weights in ("dense", "int8"))
    assert int8.weight_bytes < dense.weight_bytes / 2
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        activate = make_activation(dense.config)
        exact, rounded = (model.weights.layers[1].mlp(x, activate) for model in (dense, int8))
        alone = int8.weights.layers[1].mlp(x[7:8], activate)
    assert (exact - rounded).square().mean().sqrt() < 0.03 * exact.std()
    torch.testing.assert_close(alone, rounded[7:8])


async def test_metrics_show_the_load_of_the_experts(tmp_path: Path) -> None:
    directory = make_checkpoint("qwen3-moe-dense")  # only layer 1 has experts: 6, of which a token uses 3
    async with (
        real_engine(directory, tmp_path) as engine,
        served(engine, Tokenizer.from_dir(directory)) as client,
    ):
        assert not engine.stats.expert_load
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        streams = [submit(engine, [5, 9, 44 + i], params) for i in range(3)]
        await asyncio.gather(*(drained(stream) for stream in streams))
        [(layer, rows)] = engine.stats.expert_load.items()
        assert (layer, len(rows), sum(rows)) == (1, 6, 3 * 3 * (3 + 4))  # the last token is not computed
        metrics = await client.metrics()
        assert metrics["fastdecode:expert_imbalance", "1"] == pytest.approx(max(rows) * 6 / sum(rows))
        assert metrics["fastdecode:experts_unused", "1"] == rows.count(0)
        mlp = engine.spart.model.weights.layers[1].mlp
        mlp.load = torch.zeros(6, dtype=torch.long)  # as the first step leaves it for a moment
        metrics = await client.metrics()
        assert [metrics[f"fastdecode:{name}", "1"] for name in ("expert_imbalance", "experts_unused")] == [0, 6]


async def drained(stream) -> None:
    async for _ in stream:
        pass
