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


#: Mixtures of 6 experts, with what their routers have besides.
MIXTURES = {
    "softmax": Experts(6, 3, 64, True),
    "clamped": Experts(6, 3, 64, True, clamped_swiglu=(1.7, 0.5), bias=True),
    "scaled": Experts(6, 3, 64, False, router_scale=0.5, scale=1.5),  # with a scale of each expert
    "least sum": Experts(6, 3, 64, True, sigmoid=True, least_sum=1.7, single_router=True),
    "groups": Experts(6, 3, 64, True, sigmoid=True, single_router=True, groups=3, used_groups=2, group_best=2),
}


def chosen_by(config: Experts, outputs: Tensor, correction: Tensor) -> tuple[list[int], Tensor]:
    """The experts of a row by its router's outputs, in float64, and their shares."""
    outputs = outputs * config.router_scale
    scores = outputs.sigmoid() if config.sigmoid else outputs.softmax(0)
    wanted, size = scores + correction, config.n // config.groups
    groups = sorted(
        range(config.groups), key=lambda g: -wanted[g * size : (g + 1) * size].topk(config.group_best)[0].sum()
    )
    allowed = [e for e in range(config.n) if e // size in groups[: config.used_groups]]
    chosen = sorted(allowed, key=lambda e: -wanted[e])[: config.used]
    shares = scores[chosen]
    if config.renormalise:
        shares = shares / shares.sum().clamp(min=config.least_sum)
    return chosen, shares * config.scale


def mixture_of(weights: str, act: torch.dtype, kind: str) -> tuple[Mixture, Callable[[Tensor], Tensor]]:
    """A mixture with biases, and the same in float64: a function of rows."""
    random = torch.Generator().manual_seed(1)
    config = MIXTURES[kind]
    n, hidden, inner, clamped = config.n, 96, config.intermediate_size, config.clamped_swiglu
    sizes = {"up": (2 * inner, hidden), "down": (hidden, inner)}
    matrices = {name: torch.randn(n, *size, generator=random).bfloat16() / 8 for name, size in sizes.items()}
    biases = {name: torch.randn(n, size[0], generator=random).bfloat16() / 4 for name, size in sizes.items()}
    router = torch.randn(n, hidden, generator=random).to(torch.float32 if config.single_router else act)
    router_bias = torch.randn(n, generator=random).to(act) if config.bias else None
    correction = torch.randn(n, generator=random) / 8 if config.sigmoid else None
    scales = torch.rand(n, generator=random) + 0.5 if kind == "scaled" else None
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
            outputs = router.double() @ row + (0 if router_bias is None else router_bias.double())
            chosen, shares = chosen_by(config, outputs, torch.zeros(n) if correction is None else correction)
            if scales is not None:
                shares = shares * scales[chosen].double()
            results = []
            for e in chosen:
                gate, up = (exact["up"][e] @ row + biases["up"][e].double()).chunk(2)
                if clamped:
                    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5) + 1
                alpha = 1.7 if clamped else 1.0
                results.append(exact["down"][e] @ (gate * (gate * alpha).sigmoid() * up) + biases["down"][e].double())
            out.append(shares @ torch.stack(results))
        return torch.stack(out)

    return Mixture(config, router, router_bias, correction, *linears, expert_scale=scales), reference


@pytest.mark.parametrize("isa", [isa for isa in _native.isa_supported() if isa != "scalar"])
@pytest.mark.parametrize("weights", ["16 bits", "int8", "int4"])
@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16])
def test_experts_in_c_equal_float64(isa, weights, kind, act, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    mixture, reference = mixture_of(weights, act, kind)
    mixture.run_in_c(False, act)
    if act is torch.bfloat16 and (weights != "16 bits" or not multiplies_bf16(CPU, 96)):
        assert mixture.native is None
        return
    assert mixture.native is not None
    x = torch.randn(150, 96, generator=torch.Generator().manual_seed(2)).to(act)
    want = reference(x)
    with torch.inference_mode():
        got = mixture(x, lambda up: pytest.fail("computed by torch"))
        alone = mixture(x[7:8], lambda up: pytest.fail("computed by torch"))
    assert mixture.load.sum() == 3 * 151
    error = (got.double() - want).square().mean().sqrt() / want.std()
    assert error < (0.01 if act is torch.bfloat16 else 1e-6 if weights == "16 bits" else 2e-3)
    assert torch.equal(alone, got[7:8])


@pytest.mark.skipif(_native.isa_supported() == ["scalar"], reason="an ISA without vectors")
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_row_that_is_not_finite_spoils_no_other_row(kind):
    mixture, _ = mixture_of("int8", torch.float32, kind)
    mixture.run_in_c(False, torch.float32)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    spoilt = x.clone()
    spoilt[1], spoilt[3, 7] = torch.nan, torch.inf
    finite = [0, 2, 4]
    with torch.inference_mode():
        want, got = (mixture(rows, lambda up: pytest.fail("computed by torch")) for rows in (x, spoilt))
    assert torch.equal(got[finite], want[finite]) and got[1].isnan().all()


@pytest.mark.skipif(_native.isa_supported() == ["scalar"], reason="an ISA without vectors")
@pytest.mark.parametrize(
    "choice",
    [
        (0, 1, 1, 1),
        (7, 1, 1, 1),
        (-1, 1, 1, 1),
        (3, 0, 1, 1),
        (3, 4, 1, 1),
        (3, 3, 1, 1),
        (3, 3, 4, 1),
        (3, 3, 3, 0),
        (3, 3, 3, 3),
    ],
    ids=str,
)
def test_a_router_that_cannot_choose_is_refused(choice):
    part = (_native.QuantisedLinear,)
    with pytest.raises(ValueError, match="no such mixture"):
        _native.ExpertOps(0, 96, 64, False, 0.0, 0.0, (0,) * 4, choice, (1.0, 0.0, 1.0, True, True), 0, (part,) * 6)


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
    for model in (dense, int8):  # the one computed by torch, the other by kernels/, if the machine has vectors
        load = model.weights.layers[1].mlp.load
        assert load.sum() > 0
        load.zero_()  # as SPart.forget_expert_load does, outside of inference mode
    assert (exact - rounded).square().mean().sqrt() < 0.03 * exact.std()
    torch.testing.assert_close(alone, rounded[7:8])


async def test_metrics_show_the_load_of_the_experts(tmp_path: Path) -> None:
    directory = make_checkpoint("qwen3-moe-dense")  # only layer 1 has experts: 6, of which a token uses 3
    async with (
        real_engine(directory, tmp_path) as engine,
        served(engine, Tokenizer.from_dir(directory)) as client,
    ):
        assert engine.stats.expert_load == {1: [0] * 6}
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        streams = [submit(engine, [5, 9, 44 + i], params) for i in range(3)]
        await asyncio.gather(*(drained(stream) for stream in streams))
        [(layer, rows)] = engine.stats.expert_load.items()
        assert (layer, len(rows), sum(rows)) == (1, 6, 3 * 3 * (3 + 4))  # the last token is not computed
        metrics = await client.metrics()
        assert metrics["fastdecode:expert_imbalance", "1"] == pytest.approx(max(rows) * 6 / sum(rows))
        assert metrics["fastdecode:experts_unused", "1"] == rows.count(0)
        engine.spart.forget_expert_load()
        metrics = await client.metrics()
        assert [metrics[f"fastdecode:{name}", "1"] for name in ("expert_imbalance", "experts_unused")] == [0, 6]


async def drained(stream) -> None:
    async for _ in stream:
        pass
