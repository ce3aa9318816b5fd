"""Rounding to 4 bits for the inputs that a text brings."""

import asyncio

import pytest
import torch
from models.checkpoints import MIXTURES, make_checkpoint
from models.spart_steps import GREEDY, linked, run

from fastdecode.demo import heldout_text, model_dir
from fastdecode.spart import SPart, load_model
from fastdecode.spart.int4.gptq import quantise_compensated, quantise_head, second_moments
from fastdecode.spart.linears.rounding import quantise
from fastdecode.spart.step.batch import Chunk, StepBatch
from fastdecode.text.calibration import calibration_tokens
from fastdecode.text.tokenizer import Tokenizer


def correlated(n: int, ins: int) -> torch.Tensor:
    """Rows whose elements go along with each other, and of which a few are large: [n, ins]."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, ins // 4, generator=g) @ torch.randn(ins // 4, ins, generator=g)
    x += 0.3 * torch.randn(n, ins, generator=g)
    x[:, 7] *= 20
    return x


@pytest.mark.parametrize("ins", [1, 6, 64, 130])
def test_second_moments(ins):
    x = torch.randn(50, ins)
    torch.testing.assert_close(second_moments(x), x.mT @ x)


@pytest.mark.quick
@pytest.mark.parametrize("activation_bits", [8, 15])  # a CPU's, a GPU's
def test_products_of_typical_inputs_are_nearer(activation_bits):
    x, weight = correlated(2000, 128), torch.randn(96, 128, generator=torch.Generator().manual_seed(2))
    moments = x[:1000].mT @ x[:1000]
    want = x[1000:].double() @ weight.double().mT
    nearest, compensated = (
        ((x[1000:].double() @ matrix.dequantise().double().mT) - want).norm()
        for matrix in (
            quantise(weight, 4, activation_bits),
            quantise_compensated(weight, moments, activation_bits),
        )
    )
    assert compensated < 0.5 * nearest


def test_without_usable_moments_each_weight_is_rounded_to_the_nearest_number():
    weight = torch.randn(20, 96)
    for width, moments in ((96, torch.full((96, 96), torch.nan)), (70, torch.eye(70))):
        got, want = quantise_compensated(weight[:, :width], moments), quantise(weight[:, :width], 4, 8)
        assert torch.equal(got.dequantise(), want.dequantise())


def test_inputs_that_never_come_and_moments_of_few_rows_are_no_trouble():
    x, weight = torch.zeros(3, 64), torch.randn(16, 64)
    x[:, 5] = 1
    for moments in (x.mT @ x, torch.zeros(64, 64)):
        error = (quantise_compensated(weight, moments).dequantise() - weight).norm()
        assert error < 0.2 * weight.norm()


async def logits_of(model, tokens, tmp_path) -> torch.Tensor:
    """The logits after several prefixes of `tokens`, [prefixes, vocabulary]."""
    async with linked(model, tmp_path) as links:
        spart, found = SPart(model, links), []
        for n in range(20, len(tokens) + 1, 20):
            batch = StepBatch(0, [Chunk(0, n // 20, 1, 0, tokens[:n], True, GREEDY)])
            found.append(run(spart.step(batch, keep_logits=True)).logits)
            await asyncio.sleep(0)
    return torch.cat(found)


def test_inputs_in_another_order_are_rounded_alike():
    """Groups are rounded in the order of their inputs' sizes, wherever they stand."""
    x, weight = correlated(500, 128), torch.randn(40, 128, generator=torch.Generator().manual_seed(4))
    order = torch.tensor([2, 0, 3, 1])
    moved = (order[:, None] * 32 + torch.arange(32)).flatten()
    plain = quantise_compensated(weight, x.mT @ x).dequantise()
    other = quantise_compensated(weight[:, moved], x[:, moved].mT @ x[:, moved]).dequantise()
    # fp32 sums in another order may turn a few numbers that are halfway between two.
    assert ((other - plain[:, moved]).abs() > 1e-3).float().mean() < 0.02


def test_a_heads_rows_are_rounded_in_two_parts_for_its_inputs():
    x, weight = correlated(2000, 64), torch.randn(80, 64, generator=torch.Generator().manual_seed(5))
    fine, coarse = quantise_head(weight, 4, x.mT @ x)
    assert (fine.bits, len(fine.q), coarse.bits, len(coarse.q)) == (8, 10, 4, 70)
    products = x @ weight[10:].mT
    nearest = quantise_head(weight, 4)[1]
    errors = [(x @ part.dequantise().mT - products).norm() for part in (coarse, nearest)]
    assert errors[0] < 0.7 * errors[1]


async def test_a_calibrated_models_logits_are_nearer_on_other_text(tmp_path):
    tokenizer = Tokenizer.from_dir(model_dir())
    tokens = tokenizer.encode(heldout_text()[:1500])[:200]
    logits = []
    for name, weights, calibration in (
        ("dense", "dense", None),
        ("nearest", "int4", None),
        ("calibrated", "int4", calibration_tokens(tokenizer)),
    ):
        model = load_model(model_dir(), dtype="fp32", weights=weights, calibration=calibration)
        (tmp_path / name).mkdir()
        logits.append((await logits_of(model, tokens, tmp_path / name)).log_softmax(1))
    dense, nearest, calibrated = logits
    divergence = [(dense.exp() * (dense - other)).sum(1).mean() for other in (nearest, calibrated)]
    assert divergence[1] < divergence[0]


@pytest.mark.parametrize("name", ["llama-gqa", "phi3", "gemma3", "gemma4", "gemma4-e", "opt", "olmo2", *MIXTURES])
async def test_any_block_can_be_calibrated(name, tmp_path):
    directory = make_checkpoint(name)
    tokens = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(3))
    int4 = {"dtype": "fp32", "weights": "int4"}
    models = {
        "dense": load_model(directory, dtype="fp32"),
        "nearest": load_model(directory, **int4),
        "calibrated": load_model(directory, **int4, calibration=tokens.flatten().tolist()),
    }
    assert models["calibrated"].weight_bytes <= models["nearest"].weight_bytes
    logits = {}
    for part, model in models.items():
        (tmp_path / part).mkdir()
        logits[part] = await logits_of(model, tokens[0].tolist(), tmp_path / part)
    nearest, calibrated = ((logits[part] - logits["dense"]).norm() for part in ("nearest", "calibrated"))
    # Inputs of random tokens and weights are hardly correlated: there is nothing to win. Rounding may give a token
    # other experts.
    most = 2.0 if name in MIXTURES else 1.2
    assert calibrated < most * nearest
