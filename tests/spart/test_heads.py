"""The products of each head's rows with a matrix of that head, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastdecode.kernels import _native
from fastdecode.spart.linears.dense16 import Linear16, keeps16, multiplies_bf16
from fastdecode.spart.linears.grouped import GroupedLinear
from fastdecode.spart.linears.heads import DenseHeads, NativeHeads, make_heads
from fastdecode.spart.linears.quantised import Quantised
from fastdecode.spart.linears.rounding import quantise

CPU = torch.device("cpu")
HEADS, K_SIZE, V_SIZE, RANK = 70, 24, 40, 48  # more heads than a call of the products takes


@pytest.mark.parametrize("isa", _native.isa_supported())
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=str)
def test_absorbed_matrices_multiply_queries_and_outputs(act, isa, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    generator = torch.Generator().manual_seed(1)
    weight = (0.1 * torch.randn(HEADS * (K_SIZE + V_SIZE), RANK, generator=generator)).bfloat16()
    of_k, of_v = weight.unflatten(0, (HEADS, -1)).split([K_SIZE, V_SIZE], dim=1)
    k, v = make_heads(of_k.mT, CPU, act), make_heads(of_v, CPU, act)
    native = keeps16(CPU) if act is torch.float32 else multiplies_bf16(CPU, RANK)
    assert isinstance(k, NativeHeads if native else DenseHeads)
    assert not native or k.nbytes + v.nbytes >= weight.nbytes
    for rows in (1, 3, 65):
        q, o = (torch.randn(HEADS, rows, size, generator=generator).to(act) for size in (K_SIZE, RANK))
        budget = 1e-5 if act is torch.float32 else 2e-2
        torch.testing.assert_close(k(q).double(), q.double() @ of_k.double(), rtol=budget, atol=budget)
        torch.testing.assert_close(v(o).double(), o.double() @ of_v.double().mT, rtol=budget, atol=budget)


def test_weights_that_are_not_of_16_bits_stay_as_they_are():
    weight = torch.randn(2, V_SIZE, RANK)
    heads = make_heads(weight, CPU, torch.float32)
    assert isinstance(heads, DenseHeads) and heads.nbytes == weight.nbytes and heads.native is None


def as_in_file(matrix: Quantised) -> Quantised:
    """With scales and minima of fp16."""
    mins = None if matrix.mins is None else matrix.mins.half().float()
    return replace(matrix, scales=matrix.scales.half().float(), mins=mins)


@pytest.mark.parametrize("isa", _native.isa_supported())
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_matrices_multiply_rows_as_they_are_stored(bits, isa, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    generator = torch.Generator().manual_seed(2)
    matrices = [as_in_file(quantise(torch.randn(V_SIZE, RANK, generator=generator), bits)) for _ in range(HEADS)]
    stored = torch.stack([matrix.dequantise() for matrix in matrices])
    heads, wide = (make_heads(matrices, CPU, torch.float32, as_stored) for as_stored in (True, False))
    assert isinstance(heads, NativeHeads) and heads.nbytes < stored.nbytes // 2
    assert isinstance(wide, DenseHeads) and wide.nbytes == stored.nbytes
    for rows in (1, 3, 65):
        x = torch.randn(HEADS, rows, RANK, generator=generator)
        for each in (heads, wide):
            torch.testing.assert_close(each(x).double(), x.double() @ stored.double().mT, rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(not keeps16(CPU), reason="an ISA without vectors")
def test_heads_that_are_not_alike_are_refused():
    one, other = (Linear16(torch.zeros(outs, 8).bfloat16()).native[0] for outs in (32, 64))
    [quantised] = GroupedLinear(quantise(torch.zeros(32, 8), 8), None).native
    for heads in ((one, other), (one, quantised), (), (object(),)):
        with pytest.raises(ValueError, match="heads"):
            _native.HeadProducts(0, heads)
