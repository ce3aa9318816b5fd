"""The products of each head's rows with a matrix of that head, against float64."""

from __future__ import annotations

import pytest
import torch

from fastdecode.kernels import _native
from fastdecode.spart.linears.dense16 import Linear16, keeps16, multiplies_bf16
from fastdecode.spart.linears.heads import DenseHeads, Heads16, absorbed_heads

CPU = torch.device("cpu")
HEADS, K_SIZE, V_SIZE, RANK = 70, 24, 40, 48  # more heads than a call of the products takes


@pytest.mark.parametrize("isa", _native.isa_supported())
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=str)
def test_absorbed_matrices_multiply_queries_and_outputs(act, isa, monkeypatch):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    generator = torch.Generator().manual_seed(1)
    weight = (0.1 * torch.randn(HEADS * (K_SIZE + V_SIZE), RANK, generator=generator)).bfloat16()
    k, v = absorbed_heads(weight.to(act), HEADS, K_SIZE)
    native = keeps16(CPU) if act is torch.float32 else multiplies_bf16(CPU, RANK)
    assert isinstance(k, Heads16 if native else DenseHeads)
    assert not native or k.nbytes + v.nbytes >= weight.nbytes
    of_k, of_v = weight.double().unflatten(0, (HEADS, -1)).split([K_SIZE, V_SIZE], dim=1)
    for rows in (1, 3, 65):
        q, o = (torch.randn(HEADS, rows, size, generator=generator).to(act) for size in (K_SIZE, RANK))
        budget = 1e-5 if act is torch.float32 else 2e-2
        torch.testing.assert_close(k(q).double(), q.double() @ of_k, rtol=budget, atol=budget)
        torch.testing.assert_close(v(o).double(), o.double() @ of_v.mT, rtol=budget, atol=budget)


def test_weights_that_are_not_of_16_bits_stay_as_they_are():
    weight = torch.randn(2 * (K_SIZE + V_SIZE), RANK)
    k, v = absorbed_heads(weight, 2, K_SIZE)
    assert isinstance(k, DenseHeads) and isinstance(v, DenseHeads)
    assert k.nbytes + v.nbytes == weight.nbytes and k.native is v.native is None


@pytest.mark.skipif(not keeps16(CPU), reason="an ISA without vectors")
def test_heads_that_are_not_alike_are_refused():
    one, other = (Linear16(torch.zeros(outs, 8).bfloat16()).native[0] for outs in (32, 64))
    for heads in ((one, other), (), (object(),)):
        with pytest.raises(ValueError, match="heads"):
            _native.HeadProducts(0, heads)
