"""Quantised linears: the kernels of each ISA against float64, and the model's logits against transformers.

`rounded` does in float64 what linear.h says: activations rounded in blocks of 32, to 8 bits unless told otherwise. An
exact product follows.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from models.checkpoints import FAMILIES, make_checkpoint, reference
from models.quantised_checks import MOST_OF_FOUR, most_of_four, stored_numbers
from models.spart_steps import GREEDY, linked, run, text
from quick import quick

from fastdecode.kernels import _native
from fastdecode.spart import SPart, load_model
from fastdecode.spart.hf.decoder import HFSPart
from fastdecode.spart.hf.model import load_hf_model
from fastdecode.spart.int4.gptq import quantise_head
from fastdecode.spart.linears.grouped import GroupedEmbedding, GroupedLinear
from fastdecode.spart.linears.quantised import LEVELS, Quantised, concatenate, hadamard_blocks
from fastdecode.spart.linears.rounding import quantise
from fastdecode.spart.linears.stack import ConcatenatedLinear, make_linear
from fastdecode.spart.step.batch import Chunk, StepBatch

CPU = torch.device("cpu")
#: Outputs and inputs: whole tiles and blocks, parts of them, fewer than one.
SIZES = [(64, 64), (50, 72), (7, 100), (1, 3), (100, 256), (16, 32)]
#: Of the sum of the products' magnitudes: sums over blocks are fp32.
ROUNDING = 1e-6
#: Of the numbers that 4-bit codes may stand for, the least and the largest among them.
TABLE = (0, 32, 1, 31, 5, 7, 11, 32, 0, 13, 17, 19, 23, 29, 30, 3)


@pytest.fixture(params=_native.isa_supported())
def isa(request, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", request.param)
    return request.param


STEPS = {8: 127.0, 15: 127.0 * 128}
HADAMARD_STEPS_AVX2 = 64.0  # of rows for transformed matrices of 8 bits, with AVX2; others are rounded to 8 bits


def rounded(x: torch.Tensor, steps: float = STEPS[8]) -> torch.Tensor:
    """x [n, in] fp32 with each block of 32 rounded to a multiple of its largest magnitude / steps, in float64."""
    n, ins = x.shape
    blocks = torch.nn.functional.pad(x, (0, -ins % 32)).view(n, -1, 32)
    largest = blocks.abs().amax(2, keepdim=True)
    # In fp32, as the kernels: a number halfway between two multiples must not go the other way here. torch divides a
    # number by a tensor in two roundings, so the dividend is a tensor.
    return ((blocks * (torch.full_like(largest, steps) / largest)).round().double() * (largest / steps).double()).view(
        n, -1
    )[:, :ins]


def hadamard_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, in] fp32 as the kernels transform it, in the order of their fp32 sums: within 8 numbers first."""
    for width in (1, 2, 4, 8, 16):
        pairs = x.view(len(x), -1, 2, width)
        x = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).view(len(x), -1)
    return x


def rounded_inputs(linear: GroupedLinear, matrix: Quantised, x: torch.Tensor) -> torch.Tensor:
    """The rows x [n, in] fp32 that the linear of a matrix multiplies once it has rounded them, in float64."""
    if not matrix.hadamard:
        return rounded(x, STEPS[8 if matrix.activation_bits == 8 else 15])
    steps = HADAMARD_STEPS_AVX2 if linear._native.isa == "avx2" and matrix.bits == 8 else STEPS[8]
    return hadamard_blocks(rounded(hadamard_rows(x), steps)) / 32


def random_matrix(
    bits: int,
    outs: int,
    ins: int,
    group: int = 32,
    zero: int = 0,
    mins: bool = True,
    activation_bits: int = 8,
    table: tuple[int, ...] = (),
    hadamard: bool = False,
) -> Quantised:
    """Any stored numbers, scales that are fp16."""
    g = torch.Generator().manual_seed(outs * ins + bits)
    q = torch.randint(0, 1 << bits, (outs, ins), dtype=torch.uint8, generator=g)
    if hadamard and bits == 8:  # numbers as large as the rule for transformed matrices lets them be
        numbers = q.float() - 128
        fitting = (MOST_OF_FOUR / most_of_four(numbers)).clamp_max(127 / 128).repeat_interleave(32, 1)
        q = (128 + (numbers * fitting).trunc()).to(torch.uint8)
    groups = -(-ins // group)
    scales = (torch.rand(outs, groups, generator=g) * 0.01).half().float()
    return Quantised(
        q,
        scales,
        -scales * torch.randint(0, 1 << bits, (outs, groups), generator=g) if mins else None,
        zero,
        bits,
        group,
        activation_bits,
        table=table,
        hadamard=hadamard,
    )


def assert_product(linear: GroupedLinear, matrix: Quantised, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """The linear multiplies `x` [n, in] fp32 with the numbers that it stores."""
    weight = stored_numbers(linear).double()
    want = rounded_inputs(linear, matrix, x) @ weight.T + (0 if bias is None else bias.double())
    got = linear(x)
    assert got.shape == want.shape and got.dtype == x.dtype
    # A minimum and its opposite in the scaled number cancel, so that terms are larger than the weights.
    terms = x.double().abs().sum(1, keepdim=True) * weight.abs().amax() * 2 + 1
    assert ((got.double() - want).abs() <= ROUNDING * terms).all(), ((got - want).abs() / terms).max()


HADAMARD = {4: {"hadamard": True}, 8: {"mins": False, "zero": 128, "hadamard": True}}


@pytest.mark.quick
@pytest.mark.parametrize("bits", [4, 8])
def test_kernels_compute_the_exact_product_of_rounded_rows(isa, bits):
    assert _native.isa_supported()
    for outs, ins in SIZES:
        for form in (
            {},
            {"mins": False, "zero": 8 if bits == 4 else 128},
            {"group": 64, "activation_bits": 15},
            {"group": 128, "zero": 3, "activation_bits": 15},
            *([HADAMARD[bits]] if ins % 32 == 0 else []),
            *({"table": table, "hadamard": True} for table in (TABLE, LEVELS) if bits == 4 and ins % 32 == 0),
            *({"table": TABLE, "zero": 5, "activation_bits": b} for b in (8, 15) if bits == 4),
        ):
            matrix = random_matrix(bits, outs, ins, **form)
            bias = torch.randn(outs)
            linear = GroupedLinear(matrix, bias)
            for n in (1, 2, 3, 7, 8, 15, 33):
                assert_product(linear, matrix, torch.randn(n, ins), bias)


def test_each_isa_has_the_kernels_that_its_name_says(isa):
    linear = GroupedLinear(random_matrix(4, 16, 32), None)
    expected = {"avx512": "avx2", "avx512bf16": "avx512vnni", "neon": "scalar"}
    assert linear._native.isa == expected.get(isa, isa)


def test_an_isa_that_is_not_here_is_an_error(monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", "mmx")
    with pytest.raises(ValueError, match="FASTDECODE_ISA 'mmx' cannot be used; this machine has scalar"):
        GroupedLinear(random_matrix(4, 16, 32), None)


def test_an_empty_fastdecode_isa_means_the_best_isa(monkeypatch):
    linears = []
    for value in ("", _native.isa_best()):
        monkeypatch.setenv("FASTDECODE_ISA", value)
        linears.append(GroupedLinear(random_matrix(4, 16, 32), None))
    assert linears[0]._native.isa == linears[1]._native.isa


@pytest.mark.quick
def test_a_row_does_not_depend_on_the_others(isa):
    """Draws are reproducible in any batch, which a scale for the whole batch would break."""
    table = {**HADAMARD[4], "table": LEVELS}
    for bits, form in (
        (8, {}),
        (8, HADAMARD[8]),
        (4, table),
        (4, {"activation_bits": 15}),
        (8, {"activation_bits": 15}),
    ):
        linear = GroupedLinear(random_matrix(bits, 40, 1120, **form), torch.randn(40))
        x = torch.randn(37, 1120) * torch.logspace(-3, 3, 37)[:, None]
        together = linear(x)
        for i in range(37):
            assert torch.equal(linear(x[i : i + 1])[0], together[i])


@pytest.mark.parametrize(("rows", "ins"), [(3001, 1120), (40, (1 << 14) + 32)])  # several turns; not unpacked
def test_many_rows_are_each_multiplied_like_that_row_alone(isa, rows, ins):
    x = torch.randn(rows, ins)
    x[7, 40] = torch.inf
    for bits in (4, 8):
        for form in (HADAMARD[bits], {"activation_bits": 15}):
            linear = GroupedLinear(random_matrix(bits, 20, ins, **form), None)
            together = linear(x)
            for i in (0, 31, 32, rows // 2, rows - 1):
                assert torch.equal(linear(x[i : i + 1])[0], together[i])
            assert together[7].isnan().all() and together.isnan().sum() == 20


def test_extreme_activations(isa):
    matrix = random_matrix(8, 20, 64)
    linear = GroupedLinear(matrix, None)
    assert torch.equal(linear(torch.zeros(2, 64)), torch.zeros(2, 20))
    assert_product(linear, matrix, torch.randn(2, 64) * 1e20)
    assert linear(torch.full((1, 64), 1e-38)).abs().max() < 1e-30
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.randn(3, 64)
        x[1, 40] = bad
        y = linear(x)
        assert y[1].isnan().all(), "a broken row must show in the logits"
        assert y[[0, 2]].isfinite().all()


def test_activations_of_15_bits_are_as_good_as_exact(isa):
    matrix = random_matrix(8, 64, 256, mins=False, zero=128, activation_bits=15)
    linear, x = GroupedLinear(matrix, None), torch.randn(8, 256)
    want = x.double() @ stored_numbers(linear).double().T
    assert (linear(x) - want).norm() < 1e-4 * want.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits(dtype):
    matrix = random_matrix(4, 30, 64)
    linear = GroupedLinear(matrix, None)
    x = torch.randn(5, 64).to(dtype)
    assert torch.equal(linear(x), linear(x.float()).to(dtype))
    assert torch.equal(linear(x[::2]), linear(x)[::2])


def test_sizes_that_do_not_fit_are_refused():
    linear = GroupedLinear(random_matrix(8, 16, 64), None)._native
    x, y = torch.zeros(2, 64).numpy(), torch.zeros(2, 16).numpy()
    linear.run(x, y, 1)
    for bad_x, bad_y in ((x[:1], y), (x, y[:1]), (x.ravel()[:100], y)):
        with pytest.raises(ValueError, match="x and y"):
            linear.run(bad_x, bad_y, 1)
    for width, first in ((16, 1), (8, 0), (15, 0), (16, 1 << 31), (32, 17)):
        with pytest.raises(ValueError, match="x and y"):
            linear.run(x, torch.zeros(2, width).numpy(), 1, width, first)
    byte = bytes(1)
    with pytest.raises(ValueError, match="weights has 1 bytes, not 1024"):
        _native.QuantisedLinear(16, 64, 8, 32, 0, 1, False, byte, byte, byte, None, None, None, None)
    sizes = [(16, 64, 5, 32, 0, 1), (0, 64, 8, 32, 0, 1), (16, 64, 8, 24, 0, 1), (16, 64, 8, 32, 256, 1)]
    for bad in [*sizes, (1 << 30, 64, 8, 32, 0, 1), (16, 64, 8, 32, 0, 3)]:
        with pytest.raises(ValueError, match="no such linear"):
            _native.QuantisedLinear(*bad, False, byte, byte, byte, None, None, None, None)
    for bits, zero, passes, mins in ((8, 128, 2, None), (8, 128, 1, byte), (8, 3, 1, None), (4, 0, 2, byte)):
        with pytest.raises(
            ValueError, match="a Hadamard transform has one pass, and with 8 bits the zero 128 and no mins"
        ):
            _native.QuantisedLinear(16, 64, bits, 32, zero, passes, True, byte, byte, byte, mins, None, None, None)
    numbers, units = bytes(16 * 64 // 2), bytes(16 * 4)
    for bits, table in ((4, bytes([33] * 16)), (8, bytes(16))):
        with pytest.raises(ValueError, match="a table is for 4 bits and has numbers up to 32"):
            _native.QuantisedLinear(
                16, 64, bits, 32, 0, 1, False, numbers * (bits // 4), units, units, None, None, table, None
            )


def test_sums_of_a_matrix_are_given_where_its_numbers_are_signed(isa):
    weights, scales, units, sums = bytes(16 * 64), bytes(16 * 2 * 2), bytes(16 * 4), bytes(16 * 2 * 2)
    signed = _native.QuantisedLinear.wants_signed()
    for hadamard in (False, True):
        form = (16, 64, 8, 32, 128, 1, hadamard, weights, scales, units, None, None, None)
        wanted = hadamard and signed
        _native.QuantisedLinear(*form, sums if wanted else None)
        with pytest.raises(ValueError, match="negated_sums are missing" if wanted else "negated_sums are not wanted"):
            _native.QuantisedLinear(*form, None if wanted else sums)


@pytest.mark.parametrize(("bits", "error", "stored_error"), [(8, 0.008, 2e-3), (4, 0.075, 0.015)])
def test_a_hadamard_matrix_is_the_matrix(bits, error, stored_error):
    """A Hadamard matrix keeps the length of a block, so rounding costs what it costs any block of such numbers. A
    minimum in fp16 is off by 2^-12 of about 1/2, which the transform gathers from 32 numbers in a block's first one."""
    weight = torch.randn(40, 96)
    matrix = quantise(weight, bits, activation_bits=8)
    assert matrix.hadamard and not quantise(weight[:, :70], bits, activation_bits=8).hadamard
    assert (matrix.dequantise() - weight).norm() < error * weight.norm()
    torch.testing.assert_close(hadamard_blocks(hadamard_blocks(weight)), weight * 32)
    stored = stored_numbers(GroupedLinear(matrix, None))
    torch.testing.assert_close(stored, matrix.dequantise(), rtol=0, atol=stored_error)


def test_one_large_activation_does_not_coarsen_its_block(isa):
    weight, x = torch.randn(64, 256), torch.randn(8, 256)
    x[:, 40] = 100.0
    linear = GroupedLinear(quantise(weight, 8, activation_bits=8), None)
    exact = x.double() @ stored_numbers(linear).double().T
    plain = rounded(x) @ stored_numbers(linear).double().T
    assert (linear(x).double() - exact).norm() < 0.6 * (plain - exact).norm()


def test_bits_of_a_weight_in_memory():
    """A group of 32 weights has a scale of 16 bits, with 4 bits also a minimum of 16; each row has 32 bits more."""
    weight = torch.randn(64, 256)
    for bits, each in ((8, 8.5), (4, 5.0)):
        assert GroupedLinear(quantise(weight, bits), None).nbytes == weight.numel() * each / 8 + 64 * 4


def test_memory_keeps_the_numbers(isa):
    """What is stored is what was given, whatever the layout; rows serve as an embedding."""
    ids = torch.tensor([36, 0, 5, 5])
    parts = [GroupedLinear(random_matrix(bits, 37, 96, **HADAMARD[bits]), None) for bits in (8, 4)]
    for linears in (parts[:1], parts[1:], parts):
        rows = torch.cat([stored_numbers(linear) for linear in linears])
        for index in (ids, (len(rows) - 1 - ids)):
            assert torch.equal(GroupedEmbedding(linears, torch.float32, shared=False)(index), rows[index])
    for bits in (4, 8):
        matrix = random_matrix(bits, 37, 100, group=64)
        linear = GroupedLinear(matrix, None)
        # Scales are fp16 already; a minimum is rounded to fp16, here by up to a tenth of a step.
        error = (stored_numbers(linear) - matrix.dequantise()).abs()
        assert (error <= 0.1 * matrix.scales.repeat_interleave(64, 1)[:, :100] + 1e-9).all()
        rows = GroupedEmbedding([linear], torch.float32, shared=False)(ids)
        assert torch.equal(rows, stored_numbers(linear)[ids])


def test_stacked_matrices_of_one_form_are_one_and_others_stand_side_by_side():
    a, b = random_matrix(4, 32, 64), random_matrix(4, 16, 64)
    c = random_matrix(8, 20, 64, mins=False, zero=128)
    bias, x = torch.randn(68), torch.randn(3, 64)
    weight = torch.cat([part.dequantise() for part in (a, b, c)])
    mixed = make_linear([a, b, c], bias, CPU, torch.float32)
    assert isinstance(mixed, ConcatenatedLinear)
    torch.testing.assert_close(mixed(x).double(), rounded(x) @ weight.double().T + bias, rtol=1e-3, atol=1e-3)
    assert isinstance(make_linear([a, b], None, CPU, torch.float32), GroupedLinear)
    assert torch.equal(concatenate([a, b]).dequantise(), weight[:48])
    half = make_linear([a, torch.ones(4, 64)], None, CPU, torch.float32)(x)
    torch.testing.assert_close(half[:, 32:], x.sum(1, keepdim=True).expand(3, 4))


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_compute_the_same(threads):
    matrix, x = random_matrix(8, 500, 320), torch.randn(150, 320)
    linear = GroupedLinear(matrix, None)
    alone = torch.empty(150, 500)
    linear._native.run(x.numpy(), alone.numpy(), 1)
    for _ in range(20):
        together = torch.empty(150, 500)
        linear._native.run(x.numpy(), together.numpy(), threads)
        assert torch.equal(together, alone)


def test_without_an_openmp_library_one_thread_computes():
    program = """
import numpy as np
from fastdecode.kernels._native import QuantisedLinear
w = np.full((1, 1, 8, 16, 4), 129, np.uint8)
one = np.ones((1, 1, 16), np.float16)
linear = QuantisedLinear(16, 32, 8, 32, 128, 1, False, w, one, np.ones(16, np.float32), *[None] * 4)
y = np.zeros((2, 16), np.float32)
linear.run(np.ones((2, 32), np.float32), y, 4)
print(y.min(), y.max())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert list(map(float, done.stdout.split())) == pytest.approx([32, 32])


# ---- whole models ----

#: Largest error, in standard deviations of the logits, against transformers with the same rounded weights. The first is
#: with activations rounded as well: a number halfway between two may still go the other way. The second is with exact
#: activations, on tiny random models, whose 64 channels average little out.
SAME_ROUNDING, LOGITS = 0.06, 0.2
#: AVX2 rounds the inputs of 8-bit weights to 7 bits.
COARSE = 2


def quantised_reference(directory, bits: int):
    """transformers' model with the weights that `--weights` makes, in fp32, and each linear's GroupedLinears with their
    matrices."""
    theirs = reference(directory)
    head, linears = theirs.get_output_embeddings(), {}
    with torch.no_grad():
        for name, module in theirs.named_modules():
            if "embed_tokens" in name and module.weight is not head.weight:
                module.weight.copy_(stored_numbers(GroupedLinear(quantise(module.weight, bits, 8), None)))
            if type(module) is torch.nn.Linear and not name.endswith("kv_b_proj"):  # whose matrices are absorbed
                own = 8 if name.endswith((".v_proj", ".per_layer_model_projection")) or is_v(theirs, name) else bits
                parts = quantise_head(module.weight, bits) if module is head else [quantise(module.weight, own, 8)]
                linears[module] = [(GroupedLinear(part, None), part) for part in parts]
                module.weight.copy_(torch.cat([stored_numbers(linear) for linear, _ in linears[module]]))
    return theirs, linears


def is_v(model, name: str) -> bool:
    """Whether the linear is the projection of K, and of V too."""
    attention, _, projection = name.rpartition(".")
    return projection == "k_proj" and model.get_submodule(attention).v_proj is None


def round_inputs(linears) -> None:
    """Round what each linear multiplies, as the kernels do, for each of the GroupedLinears that make it up."""

    def product(module, args, _):
        x = args[0].flatten(0, -2)
        parts = [
            rounded_inputs(linear, matrix, x) @ stored_numbers(linear).double().T for linear, matrix in linears[module]
        ]
        y = torch.cat(parts, 1) + (0 if module.bias is None else module.bias.double())
        return y.float().view(*args[0].shape[:-1], -1)

    for module in linears:
        module.register_forward_hook(product)


async def last_logits(model, tmp_path, tokens, make=SPart) -> torch.Tensor:
    """A prompt and then its last token alone, decoded: [2, vocab]."""
    async with linked(model, tmp_path) as links:
        spart = make(model, links)
        prompt = Chunk(0, 0, 1, 0, tokens[:-1], True, GREEDY)
        last = Chunk(0, 0, 1, len(tokens) - 1, tokens[-1:], False, GREEDY)
        return torch.cat([run(spart.step(StepBatch(0, [c]), keep_logits=True)).logits for c in (prompt, last)])


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", quick(FAMILIES, "llama-gqa"))
async def test_logits_are_those_of_the_dequantised_weights(name, weights, tmp_path):
    directory, tokens = make_checkpoint(name), text(40)
    model = load_model(directory, dtype="fp32", weights=weights)
    got = await last_logits(model, tmp_path, tokens)
    (theirs, linears), ids = quantised_reference(directory, {"int8": 8, "int4": 4}[weights]), torch.tensor([tokens])
    with torch.no_grad():
        exact = theirs(ids).logits[0, -2:]
        round_inputs(linears)
        alike = theirs(ids).logits[0, -2:]
    coarse = COARSE if weights == "int8" and _native.QuantisedLinear.wants_signed() else 1
    assert (got - exact).abs().max() < coarse * LOGITS * exact.std()
    assert (got - alike).abs().max() < coarse * SAME_ROUNDING * alike.std()
    assert model.weight_bytes < load_model(directory, dtype="fp32").weight_bytes / 2


async def test_the_transformers_backend_quantises_too(tmp_path):
    directory, tokens = make_checkpoint("llama-mha"), text(30)
    native = load_model(directory, dtype="fp32", weights="int4")
    theirs = load_hf_model(directory, dtype="fp32", weights="int4")
    assert theirs.weight_bytes < load_hf_model(directory, dtype="fp32").weight_bytes / 2
    (tmp_path / "a").mkdir()
    got = await last_logits(theirs, tmp_path / "a", tokens, HFSPart)
    want = await last_logits(native, tmp_path, tokens)
    assert (got - want).abs().max() < 0.02 * want.std()
