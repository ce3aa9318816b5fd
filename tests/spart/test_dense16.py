"""16-bit weights: the C functions of each ISA against float64, and where the loader uses them."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
import torch
from models.checkpoints import make_checkpoint

from fastdecode.kernels import _native
from fastdecode.spart import load_model
from fastdecode.spart.linears import dense16
from fastdecode.spart.linears.dense import DenseLinear, PackedLinear, make_dense, make_embedding
from fastdecode.spart.linears.dense16 import Linear16, exact16

pytestmark = pytest.mark.quick

VECTOR_ISAS = [isa for isa in _native.isa_supported() if isa != "scalar"]
#: The ISAs that multiply bf16 rows.
BF16_ISAS = [isa for isa in VECTOR_ISAS if isa in ("avx512bf16", "amx")]
#: The functions that an ISA takes.
EXPECTED = {"avx2": "avx2", "avxvnni": "avx2", "neon": "neon"}


@pytest.fixture(params=VECTOR_ISAS)
def isa(request, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", request.param)
    return request.param


def matrix(outs: int, ins: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(outs, ins, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("outs, ins", [(1, 1), (64, 256), (100, 300), (130, 513), (16, 1000)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_float64(isa, outs, ins, dtype, bias):
    weight = matrix(outs, ins, dtype)
    vector = torch.randn(outs) if bias else None
    linear = Linear16(weight, vector)
    assert linear.native[0].isa == EXPECTED.get(isa, "avx512")
    for n in (0, 1, 2, 3, 5, 6, 7, 13, 32, 33, 100):
        x = torch.randn(n, ins, generator=torch.Generator().manual_seed(n))
        want = x.double() @ weight.double().T + (0.0 if vector is None else vector.double())
        torch.testing.assert_close(linear(x).double(), want, rtol=1e-5, atol=4e-6 * ins**0.5)


@pytest.mark.parametrize("outs, ins", [(1, 2), (64, 256), (100, 300), (130, 1514), (16, 1000), (70, 4160)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_bf16_rows_equal_float64(isa, outs, ins, bias):
    weight = matrix(outs, ins, torch.bfloat16)
    vector = torch.randn(outs).bfloat16() if bias else None
    if isa not in BF16_ISAS:
        with pytest.raises(ValueError, match="has no products with 16-bit weights of these dtypes"):
            Linear16(weight, vector, torch.bfloat16)
        return
    linear = Linear16(weight, vector, torch.bfloat16)
    assert linear.native[0].isa == isa
    for n in (0, 1, 2, 3, 5, 6, 7, 13, 16, 17, 32, 33, 97, 200, 261):
        x = torch.randn(n, ins, generator=torch.Generator().manual_seed(n)).bfloat16()
        want = x.double() @ weight.double().T + (0.0 if vector is None else vector.double())
        torch.testing.assert_close(linear(x).double(), want, rtol=2**-8, atol=4e-6 * ins**0.5)


@pytest.mark.skipif(not BF16_ISAS, reason="no products of bf16 pairs")
@pytest.mark.parametrize("isa", BF16_ISAS)
@pytest.mark.parametrize("ins, n", [(34, 2090), (2114, 560)])  # more rows than AMX multiplies together
def test_many_bf16_rows_and_panels_equal_float64(isa, ins, n, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    monkeypatch.setattr(dense16, "pool_threads", lambda: 2)  # few, so that AMX groups panels
    weight, bias = matrix(600, ins, torch.bfloat16), torch.randn(600)
    x = torch.randn(n, ins).bfloat16()
    got = Linear16(weight, bias, torch.bfloat16)(x)
    want = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=4e-6 * ins**0.5)


@pytest.mark.skipif(not BF16_ISAS, reason="no products of bf16 pairs")
@pytest.mark.parametrize("isa", BF16_ISAS)
@pytest.mark.parametrize("outs, first", [(1056, 0), (1056, 2), (1050, 0)])  # lines, parts of lines, a narrow panel
def test_few_bf16_rows_of_a_matrix_beyond_the_caches_equal_float64(isa, outs, first, monkeypatch):
    """With more than 2 MiB of weights a thread, AMX stores outputs past the caches where they are whole lines."""
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    weight, bias = matrix(outs, 4160, torch.bfloat16), torch.randn(outs)
    linear = Linear16(weight, bias, torch.bfloat16)
    for n in (1, 7, 16, 17, 32):
        x = torch.randn(n, 4160, generator=torch.Generator().manual_seed(n)).bfloat16()
        y = torch.zeros(n * outs + 64, dtype=torch.bfloat16)
        product = y[first : first + n * outs].view(n, outs)
        linear.native[0].run(x.view(torch.int16).numpy(), product.view(torch.int16).numpy(), 2)
        want = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(product.double(), want, rtol=2**-8, atol=4e-6 * 4160**0.5)
        assert not y[:first].any() and not y[first + n * outs :].any()


@pytest.mark.skipif(not BF16_ISAS, reason="no products of bf16 pairs")
@pytest.mark.parametrize("isa", BF16_ISAS)
@pytest.mark.parametrize("n", [1, 15, 17, 33, 49])
def test_rows_are_read_no_further_than_their_memory(isa, n, monkeypatch):
    """Tiles and steps have numbers that the rows lack. A product that read them would crash here."""
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + 3 * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    x = np.frombuffer(memory, np.int16, n * 90, 3 * mmap.PAGESIZE - n * 180)
    y = np.full((n, 40), 1, np.int16)
    Linear16(matrix(40, 90, torch.bfloat16), None, torch.bfloat16).native[0].run(x, y, 1)
    assert not y.any()


@pytest.mark.skipif(not BF16_ISAS, reason="no products of bf16 pairs")
@pytest.mark.parametrize("isa", BF16_ISAS)
@pytest.mark.parametrize("ins", [1300, 2080])
@pytest.mark.parametrize("n", [17, 33, 300])
def test_nan_stays_in_its_row_and_its_output(isa, ins, n, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    monkeypatch.setattr(dense16, "empty", lambda size: np.full(size, 0xFF, np.uint8))  # NaN, which packing overwrites
    weight, x = matrix(40, ins, torch.bfloat16), torch.randn(n, ins).bfloat16()
    whole = Linear16(weight, None, torch.bfloat16)(x)
    assert whole.isfinite().all()
    for row in (1, n - 1):
        x[row] = float("nan")
    weight[39] = float("inf")
    weight[3, 7] = float("nan")
    broken = Linear16(weight, None, torch.bfloat16)(x)
    rows, outs = torch.ones(n, dtype=torch.bool), torch.ones(40, dtype=torch.bool)
    rows[[1, n - 1]], outs[[3, 39]] = False, False
    assert torch.equal(broken[rows][:, outs], whole[rows][:, outs])
    assert broken[~rows].isnan().all() and not broken[:, ~outs].isfinite().any()


@pytest.mark.skipif(not BF16_ISAS, reason="no products of bf16 pairs")
@pytest.mark.parametrize("isa", BF16_ISAS)
@pytest.mark.parametrize("ins", [1300, 2080, 4160])  # steps of AMX: filled up with zeros, in one block, in two
def test_bf16_rows_do_not_depend_on_each_other_and_take_pairs(isa, ins, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    linear = make_dense(matrix(200, ins, torch.bfloat16))
    assert isinstance(linear, Linear16)
    x = torch.randn(600, ins).bfloat16()
    whole = linear(x)
    for n in (1, 5, 16, 17, 32, 33, 97, 257, 513):
        assert torch.equal(linear(x[:n]), whole[:n])
    assert not isinstance(make_dense(matrix(8, 7, torch.bfloat16)), Linear16)
    with pytest.raises(ValueError, match="7 inputs are not a multiple of 2"):
        Linear16(matrix(8, 7, torch.bfloat16), None, torch.bfloat16)


def test_a_row_does_not_depend_on_the_other_rows(isa):
    linear, x = Linear16(matrix(200, 700, torch.bfloat16)), torch.randn(40, 700)
    whole = linear(x)
    for n in (1, 5, 8, 33):
        assert torch.equal(linear(x[:n]), whole[:n])


def test_subnormal_and_special_numbers_are_kept(isa):
    special = torch.tensor([[6e-8, -6e-8, 65504.0, 1.0, -0.0]])
    one = torch.eye(5)
    assert torch.equal(Linear16(special.half())(one).flatten(), special.half().float().flatten())
    wide = torch.tensor([[1e-40, 3e38, -1e-39, 2.0, float("inf")]]).bfloat16()
    assert torch.equal(Linear16(wide)(one[:4]).flatten()[:3].isnan(), torch.tensor([True] * 3))  # 0 * inf
    assert torch.equal(Linear16(wide[:, :4].contiguous())(one[:4, :4]).flatten(), wide.float().flatten()[:4])


def test_only_exact_numbers_become_16_bits(isa):
    exact, rounded = matrix(8, 8, torch.float16).float(), matrix(8, 8, torch.float32)
    narrow = exact16(exact)
    assert narrow is not None and narrow.dtype is torch.float16 and exact16(rounded) is None
    assert isinstance(make_dense(exact), Linear16) and make_embedding(exact, torch.float32).nbytes == 2 * exact.numel()
    assert (
        isinstance(make_dense(rounded), DenseLinear) and make_embedding(rounded, torch.float32).nbytes == rounded.nbytes
    )
    assert torch.equal(make_embedding(exact, torch.float32)(torch.tensor([3, 1])), exact[[3, 1]])


def test_large_weights_in_32_bits_are_packed():
    assert isinstance(make_dense(matrix(256, 256, torch.float32)), PackedLinear)
    assert isinstance(make_dense(matrix(256, 128, torch.float32)), DenseLinear)


def test_without_vectors_weights_are_fp32(monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", "scalar")
    assert isinstance(make_dense(matrix(8, 8, torch.float16).float()), DenseLinear)
    with pytest.raises(ValueError, match="scalar has no products with 16-bit weights"):
        Linear16(matrix(8, 8, torch.float16))


@pytest.mark.parametrize("variant", ["llama-bf16", "llama-fp16"])
def test_a_16_bit_checkpoint_takes_16_bits_with_fp32_activations(isa, variant, monkeypatch):
    path = make_checkpoint(variant)
    narrow = load_model(path, dtype="fp32")
    monkeypatch.setenv("FASTDECODE_ISA", "scalar")
    wide = load_model(path, dtype="fp32")
    assert narrow.weight_bytes < 0.6 * wide.weight_bytes
