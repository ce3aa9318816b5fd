"""MXFP4 checkpoints of gpt-oss: numbers against the OCP MX specification, logits against transformers' own reading."""

from __future__ import annotations

import pytest
import torch
from models.checkpoints import make_checkpoint, reference
from models.gguf_made import write_gguf
from models.quantised_checks import EXACT, error_of_logits, stored_numbers
from models.quantised_made import e2m1, make_mxfp4
from safetensors.torch import load_file, save_file

from fastdecode.daemon.check_model import rows as check_rows
from fastdecode.daemon.config import NodeConfig
from fastdecode.kernels import _native
from fastdecode.spart import CheckpointError, load_model
from fastdecode.spart.backend import choose_backend
from fastdecode.spart.checkpoints.mxfp4 import mxfp4
from fastdecode.spart.linears.grouped import GroupedLinear

CPU = torch.device("cpu")
EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.quick
def test_numbers_are_those_of_the_specification():
    codes = torch.arange(32, dtype=torch.uint8)[None].remainder(16).expand(255, 32)
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    want = torch.tensor([[e2m1(code % 16) * 2.0 ** (exponent - 127) for code in range(32)] for exponent in range(255)])
    matrix = mxfp4(codes, exponents)
    assert torch.equal(matrix.dequantise(), want)
    stored = stored_numbers(GroupedLinear(matrix, None))
    large = exponents[:, 0] >= 28  # 2^-99: the least number that a row's unit is made for
    assert torch.equal(stored[large], want[large])
    assert (stored - want)[~large].abs().max() < 2.0**-99


@pytest.mark.quick
@pytest.mark.parametrize("isa", _native.isa_supported())
def test_products_of_the_largest_numbers_are_exact(isa, monkeypatch):
    """The kernels sum in few bits: all numbers and activations are as large as they can be."""
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    codes, exponents = torch.full((20, 96), 7, dtype=torch.uint8), torch.full((20, 3), 127, dtype=torch.uint8)
    codes[1::2] = 15
    for bits in (8, 15):
        matrix = mxfp4(codes, exponents)
        object.__setattr__(matrix, "activation_bits", bits)
        for n in (1, 2, 5, 9):
            got = GroupedLinear(matrix, None)(torch.full((n, 96), 3.0))
            want = 6.0 * 3.0 * 96 * torch.tensor([1.0, -1.0]).repeat(10).expand(n, 20)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


async def test_logits_are_those_of_transformers(tmp_path):
    directory = make_mxfp4(tmp_path / "m")
    assert choose_backend("auto", directory).name == "native"
    assert await error_of_logits(directory, reference(directory), tmp_path) < EXACT


def test_experts_stay_in_4_bits(tmp_path):
    directory = make_mxfp4(tmp_path / "m")
    packed, dense = (load_model(directory, dtype="fp32", weights=weights) for weights in ("auto", "dense"))
    whole = load_model(make_checkpoint("gpt-oss"), dtype="fp32")
    assert packed.weight_bytes < dense.weight_bytes <= whole.weight_bytes
    for ours, theirs, rounded in zip(packed.weights.layers, whole.weights.layers, dense.weights.layers, strict=True):
        for part in ("_up", "_down"):
            linears = getattr(ours.mlp, part)
            assert linears.nbytes < getattr(theirs.mlp, part).nbytes * 6 / 32  # 4.5 bits, and 64 a row
            x = torch.randn(3, linears._linears[2].ins)
            exact = getattr(rounded.mlp, part)._linears[2](x)
            torch.testing.assert_close(linears._linears[2](x), exact, rtol=1e-3, atol=1e-3 * exact.abs().max().item())


async def test_a_gguf_file_keeps_the_same_experts(tmp_path):
    """llama.cpp has gate and up apart, and the numbers of a block in another order."""
    directory, path = make_mxfp4(tmp_path / "m"), tmp_path / "m.gguf"
    theirs = reference(directory)
    write_gguf(path, theirs, {"_exps": "MXFP4", "": "F32"})
    ours, published = (load_model(file, dtype="fp32") for file in (path, directory))
    assert ours.weight_bytes == published.weight_bytes
    for one, other in zip(ours.weights.layers, published.weights.layers, strict=True):
        for part in ("_up", "_down"):
            pairs = zip(getattr(one.mlp, part)._linears, getattr(other.mlp, part)._linears, strict=True)
            assert all(torch.equal(stored_numbers(a), stored_numbers(b)) for a, b in pairs)
    assert await error_of_logits(path, theirs, tmp_path) < EXACT


def test_check_names_the_format(tmp_path):
    lines = dict(check_rows(NodeConfig(), choose_backend("auto", make_mxfp4(tmp_path / "m"))))
    assert "by the native backend" in lines["model"]
    assert "stored and kept as mxfp4" in lines["weights"]


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("_scales", None, f"lacks the tensor '{EXPERTS}.down_proj_scales'"),
        ("_blocks", None, f"lacks the tensor '{EXPERTS}.down_proj'"),
        ("_scales", lambda t: t.clone().fill_(255), f"'{EXPERTS}.down_proj_scales' is corrupt: a scale is NaN"),
        ("_scales", lambda t: t[..., :-1], f"'{EXPERTS}.down_proj_scales' .* are no MXFP4"),
        ("_blocks", lambda t: t[..., :8], f"'{EXPERTS}.down_proj_blocks' .* are no MXFP4"),
        ("_blocks", lambda t: t.float(), f"'{EXPERTS}.down_proj_blocks' is stored as F32, not as U8"),
    ],
    ids=["no scales", "no blocks", "NaN", "fewer scales", "shorter blocks", "floats"],
)
def test_a_corrupt_tensor_is_named(end, change, message, tmp_path):
    directory = make_mxfp4(tmp_path / "m")
    path, name = directory / "model.safetensors", f"{EXPERTS}.down_proj{end}"
    tensors = load_file(path)
    tensor = tensors.pop(name)
    save_file(tensors if change is None else tensors | {name: change(tensor).contiguous()}, path)
    with pytest.raises(CheckpointError, match=message):
        load_model(directory)
