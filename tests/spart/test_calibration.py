"""Rounding to 4 bits for the inputs that a text brings."""

import asyncio

import pytest
import torch
from checkpoints import MIXTURES, make_checkpoint
from spart_steps import GREEDY, linked, run

from fastdecode.demo import heldout_text, model_dir
from fastdecode.spart import SPart, load_model
from fastdecode.spart.batch import Chunk, StepBatch
from fastdecode.spart.linears.compensated import quantise_compensated
from fastdecode.spart.linears.quantised import quantise
from fastdecode.text.calibration import calibration_tokens
from fastdecode.text.tokenizer import Tokenizer


def correlated(n: int, ins: int) -> torch.Tensor:
    """Rows whose elements go along with each other, and of which a few are large: [n, ins]."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, ins // 4, generator=g) @ torch.randn(ins // 4, ins, generator=g)
    x += 0.3 * torch.randn(n, ins, generator=g)
    x[:, 7] *= 20
    return x


@pytest.mark.quick
def test_products_of_typical_inputs_are_nearer():
    x, weight = correlated(2000, 128), torch.randn(96, 128, generator=torch.Generator().manual_seed(2))
    moments = x[:1000].mT @ x[:1000]
    want = x[1000:].double() @ weight.double().mT
    nearest, compensated = (
        ((x[1000:].double() @ matrix.dequantise().double().mT) - want).norm()
        for matrix in (quantise(weight, 4, 8), quantise_compensated(weight, moments))
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


@pytest.mark.parametrize("name", ["llama-gqa", "phi3", "opt", "mixtral", "gpt-oss"])
async def test_any_block_can_be_calibrated(name, tmp_path):
    directory = make_checkpoint(name)
    tokens = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(3))
    dense = load_model(directory, dtype="fp32")
    model = load_model(directory, dtype="fp32", weights="int4", calibration=tokens.flatten().tolist())
    assert model.weight_bytes <= load_model(directory, dtype="fp32", weights="int4").weight_bytes
    logits = []
    for part, each in (("dense", dense), ("int4", model)):
        (tmp_path / part).mkdir()
        logits.append(await logits_of(each, tokens[0].tolist(), tmp_path / part))
    most = 1.0 if name in MIXTURES else 0.5  # rounding may give a token other experts
    assert (logits[1] - logits[0]).norm() < most * logits[0].norm()
