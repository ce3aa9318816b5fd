"""Rounding a matrix to few bits, by each ISA, against float64."""

import pytest
import torch
from models.quantised_checks import MOST_OF_FOUR, most_of_four

from fastdecode.kernels import _native
from fastdecode.spart import threads
from fastdecode.spart.int4.gptq import quantise_compensated
from fastdecode.spart.linears.quantised import LEVELS, Quantised, hadamard_blocks
from fastdecode.spart.linears.rounding import MOST_COLUMNS, quantise

#: Outputs and inputs: whole vectors and groups, parts of them, fewer than one.
SIZES = [(64, 64), (37, 96), (5, 70), (1, 3)]


@pytest.fixture(params=_native.isa_supported())
def isa(request, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", request.param)
    return request.param


def grouped(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> float64 [out, groups, 32], padded with zeros."""
    return torch.nn.functional.pad(weight.double(), (0, -weight.shape[1] % 32)).view(len(weight), -1, 32)


def nearest(matrix: Quantised, weight: torch.Tensor) -> torch.Tensor:
    """The numbers of a matrix that are nearest to a weight [out, in], transformed if the matrix is, by float64."""
    values = grouped(weight)
    if matrix.hadamard:
        values = hadamard_blocks(values) / 32
    scales = matrix.scales.double()[:, :, None]
    mins = 0 if matrix.mins is None else matrix.mins.double()[:, :, None]
    numbers = torch.tensor(matrix.table or range(1 << matrix.bits), dtype=torch.float64) - matrix.zero
    exact = (values - mins) / scales.clamp_min(1e-30)
    return (exact[..., None] - numbers).abs().argmin(3).flatten(1)[:, : weight.shape[1]].to(torch.uint8)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("activation_bits", [8, 15])
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_the_nearest(isa, bits, activation_bits, dtype):
    for outs, ins in SIZES:
        weight = torch.randn(outs, ins).to(dtype)
        matrix = quantise(weight, bits, activation_bits)
        assert matrix.hadamard == (activation_bits == 8 and ins % 32 == 0)
        assert matrix.table == (LEVELS if matrix.hadamard and bits == 4 else ())
        # Only what is halfway between two numbers may become the other one in fp32.
        assert (matrix.q != nearest(matrix, weight.float())).float().mean() < 0.002


def test_8_bits_are_within_half_a_step(isa):
    weight = torch.randn(40, 70)
    steps = (grouped(weight).abs().amax(2) / 127).repeat_interleave(32, 1)[:, :70]
    assert ((quantise(weight, 8).dequantise() - weight).abs() <= steps * 0.501).all()


def test_4_bits_are_nearly_as_good_as_the_best_scales_and_minimums(isa):
    """The best of ranges from all values of a group down to half of them, each with the least squares fit of its
    numbers, by float64."""
    weight = torch.randn(200, 32, generator=torch.Generator().manual_seed(1))
    values = weight.double()
    least, largest = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    best = torch.full((len(weight),), torch.inf, dtype=torch.float64)
    for below in torch.linspace(0, 0.25, 11):
        for above in torch.linspace(0, 0.25, 11):
            low = least + below * (largest - least)
            scale = (largest - above * (largest - least) - low) / 15
            numbers = ((values - low) / scale).round().clamp(0, 15)
            off = numbers - numbers.mean(1, keepdim=True)
            fitted = off * ((off * values).sum(1) / off.square().sum(1))[:, None] + values.mean(1, keepdim=True)
            best = torch.minimum(best, (fitted - values).square().sum(1))
    error = (quantise(weight, 4).dequantise() - values).square().sum(1)
    assert error.sum() < 1.05 * best.sum()


def test_levels_lose_less_of_normal_weights_than_equal_steps():
    weight = torch.randn(4000, 32)
    levels, equal = ((quantise(weight, 4, bits).dequantise() - weight).square().mean() for bits in (8, 15))
    assert levels < 0.96 * equal


def test_one_large_weight_does_not_coarsen_its_group():
    weight = torch.randn(64, 256)
    weight[:, 40] = 10.0
    error, plain = (quantise(weight, 4, activation_bits=b).dequantise() - weight for b in (8, 15))
    group = slice(32, 64)
    assert error[:, group].norm() < 0.8 * plain[:, group].norm()


def test_numbers_of_a_hadamard_matrix_fit_into_16_bit_sums(isa):
    weight = torch.randn(256, 256)
    weight[:, 64:] = weight[:, 64:].sign() * 0.01  # blocks whose sums, and not their largest number, set the scale
    matrix = quantise(weight, 8, activation_bits=8)
    most = most_of_four(matrix.q.float() - 128)
    assert MOST_OF_FOUR * 0.95 < most.max() <= MOST_OF_FOUR


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activation_bits", [8, 15])
def test_a_row_is_rounded_like_that_row_alone(isa, bits, activation_bits, monkeypatch):
    monkeypatch.setattr(threads, "_pool", 2)
    weight = torch.randn(70, 1024)
    whole = quantise(weight, bits, activation_bits)
    for row in (0, 15, 16, 69):
        alone = quantise(weight[row : row + 1], bits, activation_bits)
        assert torch.equal(alone.dequantise(), whole.dequantise()[row : row + 1])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_shows_in_its_group_alone(isa, bits, number):
    weight = torch.randn(20, 96)
    want = quantise(weight, bits, 8).dequantise()
    weight[3, 40] = number
    got = quantise(weight, bits, 8).dequantise()
    assert not got[3, 32:64].isfinite().any()
    got[3, 32:64] = want[3, 32:64]
    assert torch.equal(got, want)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37, 1e-35, 3e4])
def test_equal_weights_stay_what_they_are(isa, bits, value):
    weight = torch.full((9, 64), value)
    torch.testing.assert_close(quantise(weight, bits).dequantise(), weight, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("activation_bits", [8, 15])  # a CPU's, a GPU's
def test_each_column_takes_up_the_errors_of_those_before_it(isa, activation_bits):
    """GPTQ's algorithm in float64, a column at a time, with the scales and minimums that were found. The inputs are
    more than are rounded at a time."""
    ins, transformed = MOST_COLUMNS * 2 + 64, activation_bits == 8
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2000, ins // 2, generator=g) @ torch.randn(ins // 2, ins, generator=g)
    weight = torch.randn(24, ins, generator=g)
    moments = (x.mT @ x).double()
    matrix = quantise_compensated(weight, moments.float(), activation_bits)
    values = weight.double()
    if transformed:
        values, moments = hadamard_blocks(values) / 32, hadamard_blocks(hadamard_blocks(moments).mT.contiguous())
    groups = moments.diagonal().view(-1, 32).sum(1).argsort(descending=True)
    order = (groups[:, None] * 32 + torch.arange(32)).flatten()
    moments = moments[order][:, order]
    moments += 0.05 * moments.diagonal().mean() * torch.eye(ins)
    factor = torch.linalg.cholesky(moments.inverse(), upper=True)
    numbers = torch.tensor(LEVELS if transformed else range(16), dtype=torch.float64)
    left, wrong = values[:, order], 0
    for i, column in enumerate(order.tolist()):
        scale, least = matrix.scales[:, column // 32].double(), matrix.mins[:, column // 32].double()
        code = ((left[:, i] - least) / scale).sub(numbers[:, None]).abs().argmin(0)
        wrong += int((code != matrix.q[:, column]).sum())
        error = (left[:, i] - (numbers[matrix.q[:, column].int()] * scale + least)) / factor[i, i]
        left[:, i + 1 :] -= error[:, None] * factor[i, i + 1 :]
    assert wrong < 0.01 * weight.numel()
