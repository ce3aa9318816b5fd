"""Weights that stay packed on a GPU: their numbers, and the tokens of whole models on a device without kernels.

The device of the whole models computes as late as it may (tests/helpers/gpu/lying_device.py). What the kernels compute
is seen on a GPU only; tests/gpu/test_packed_kernels.py compiles them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models.checkpoints import make_checkpoint, make_model, reference
from models.gguf_made import random_blocks, write_gguf
from models.quantised_made import make, make_mxfp4
from nodes.forked import run_script

from fastdecode.gguf.file import TYPES, GGUFTensor, ModelSource
from fastdecode.spart import read_config
from fastdecode.spart.checkpoints.gguf import unpack_blocks
from fastdecode.spart.int4.gptq import quantise_head
from fastdecode.spart.linears import gpu
from fastdecode.spart.linears.gpu import GPULinear
from fastdecode.spart.linears.gpu_kernels import kernels_fault
from fastdecode.spart.linears.packed import PackedEmbedding, PackedMatrix, alike, over_one_another, pack
from fastdecode.spart.linears.quantised import LEVELS, Quantised
from fastdecode.spart.linears.rounding import quantise
from fastdecode.spart.loader import open_checkpoint

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[1] / "helpers/gpu/packed_steps.py"


def random_matrix(bits: int, outs: int, ins: int, group: int = 32, mins: bool = True) -> Quantised:
    groups = -(-ins // group)
    q = torch.randint(0, 1 << bits, (outs, ins), dtype=torch.uint8)
    scales = torch.rand(outs, groups) * 0.02 + 1e-3
    return Quantised(q, scales, -scales * 5.3 if mins else None, 0 if mins else 1 << (bits - 1), bits, group)


# ---- the form ----


@pytest.mark.quick
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mins", [True, False])
@pytest.mark.parametrize("shape", [(24, 96, 32), (5, 90, 32), (16, 128, 128)], ids=str)
def test_numbers_stay(bits, mins, shape):
    matrix = random_matrix(bits, *shape, mins)
    packed, want = pack(matrix, CPU, torch.float32), matrix.dequantise()
    torch.testing.assert_close(packed.rows(slice(None))[: len(want)], want, rtol=1e-5, atol=1e-6)
    assert packed.nbytes <= len(packed.codes) * packed.columns * bits / 8 + 2 * packed.scales.nbytes
    index = torch.tensor([3, 0, 3])
    torch.testing.assert_close(packed.rows(index), want[index], rtol=1e-5, atol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "steps"), [(torch.float16, 1 / 64), (torch.bfloat16, 1 / 8)], ids=str)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K"])
def test_gguf_blocks_in_16_bits_are_those_of_the_gguf_package(kind, dtype, steps):
    """Against the numbers of the package gguf, in steps of a group: a zero point of 4 bits is off by half a unit of its
    last place, and the product by the precision of `dtype`."""
    import gguf as theirs

    blocks = random_blocks(kind, 8, 2)
    form = next(form for form in TYPES.values() if form.name == kind)
    matrix = unpack_blocks(GGUFTensor("x", (8, 2 * form.block), form, blocks.reshape(-1)), blocks)
    want = torch.from_numpy(theirs.quants.dequantize(blocks.reshape(8, -1), theirs.GGMLQuantizationType[kind])).float()
    error = (pack(matrix, CPU, dtype).rows(slice(None)).float() - want).abs().unflatten(1, (-1, 32)).amax(2)
    largest = want.abs().unflatten(1, (-1, 32)).amax(2)
    step = matrix.scales * (1 / 2 if kind == "Q6_K" else steps)
    assert (error <= step + 4 * torch.finfo(dtype).eps * largest).all()


@pytest.mark.quick
def test_flat_groups_keep_their_minimum():
    """A scale of 0, or one that is small beside the minimum, has no zero point in fp16."""
    matrix = random_matrix(4, 8, 96)
    assert matrix.mins is not None
    matrix.scales[0], matrix.scales[1], matrix.mins[0], matrix.mins[1] = 0, 1e-7, 0.5, -0.25
    matrix.scales[2], matrix.mins[2] = 0, 0
    rows = pack(matrix, CPU, torch.float16).rows(slice(None))
    torch.testing.assert_close(rows[:3].float(), matrix.dequantise()[:3], rtol=1e-3, atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("bits", [4, 8])
def test_what_no_kernel_multiplies_is_rounded_again(bits):
    """A matrix that was transformed for activations of 8 bits: the error of numbers at equal steps is uniform."""
    weight = torch.randn(16, 128)
    matrix = quantise(weight, bits, activation_bits=8)
    assert matrix.hadamard and (matrix.table == LEVELS) == (bits == 4)
    before, packed = matrix.dequantise(), pack(matrix, CPU, torch.float32)
    groups = before.unflatten(1, (-1, 32))
    step = (groups.amax(2) - groups.amin(2)) / 15 if bits == 4 else groups.abs().amax(2) / 127
    error = (packed.rows(slice(None)) - before).unflatten(1, (-1, 32)) / step[:, :, None]
    assert 0 < error.square().mean().sqrt() < 1.05 / 12**0.5


@pytest.mark.quick
def test_matrices_of_experts_get_one_form():
    parts = [pack(random_matrix(4, 16, 64, mins=mins), CPU, torch.float32) for mins in (True, False)]
    assert all(matrix.zeros is not None for matrix in alike(parts))
    whole = over_one_another(parts)
    assert isinstance(whole, PackedMatrix)
    assert torch.equal(whole.rows(slice(None)), torch.cat([matrix.rows(slice(None)) for matrix in parts]))
    assert not alike([*parts, pack(random_matrix(8, 16, 64), CPU, torch.float32)])
    assert over_one_another([pack(random_matrix(4, 5, 64), CPU, torch.float32)] * 2) is None  # rows were added


@pytest.mark.quick
def test_products_and_rows_of_blocks(monkeypatch):
    """Against float64, converted 8 rows at a time; and an embedding of two matrices."""
    monkeypatch.setattr(gpu, "_BLOCK", 8 * 96)
    matrices = [random_matrix(bits, outs, 96) for bits, outs in ((4, 37), (8, 20))]
    packed = [pack(matrix, CPU, torch.float32) for matrix in matrices]
    x, bias = torch.randn(7, 96), torch.randn(37)
    want = x.double() @ matrices[0].dequantise().double().T + bias
    torch.testing.assert_close(GPULinear(packed[0], bias)(x).double(), want, rtol=1e-4, atol=1e-5)
    rows = torch.cat([matrix.dequantise() for matrix in matrices])
    ids = torch.tensor([0, 36, 37, 56, 40, 1])
    torch.testing.assert_close(PackedEmbedding(packed)(ids), rows[ids], rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_a_device_without_kernels_is_named_in_the_log_once(caplog, monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    kernels_fault.cache_clear()
    assert "need compute capability 7.5, the GPU has 7.0" in kernels_fault(cuda, torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "no float32 activations" in kernels_fault(cuda, torch.float32)
    assert [GPULinear(pack(random_matrix(4, 8, 32), CPU, torch.float32), None)._kernel for _ in range(2)] == [None] * 2
    kernels_fault.cache_clear()
    assert caplog.text.count("converted at each call: there are no kernels for cpu") == 1


# ---- whole models ----


def check_tokens(models: list[Path], references: list, weights: str = "auto") -> None:
    """Steps on the device draw the four greedy tokens behind each prompt that transformers computes."""
    found = run_script(SCRIPT, weights, *map(str, models))
    for path, model, (prompts, drawn) in zip(models, references, found, strict=True):
        with torch.no_grad():
            assert drawn == [continued(model, tokens) for tokens in prompts], path


def continued(model, tokens: list[int]) -> list[int]:
    for _ in range(4):
        tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens[-4:]


@pytest.mark.parametrize(
    "names",
    [("gptq-4", "gptq-4-act-order"), ("gptq-8", "gptq-channel"), ("awq", "W4A16-asymmetric"), ("W8A16", "W8A8")],
    ids=", ".join,
)
def test_tokens_of_each_format_are_those_of_transformers(names, tmp_path):
    models = [tmp_path / name for name in names]
    check_tokens(models, [make(path, path.name) for path in models])


def with_numbers_of(directory: Path):
    """transformers' model of a quantised checkpoint, with the numbers that are loaded."""
    theirs = make(directory, directory.name)
    checkpoint = open_checkpoint(ModelSource.open(directory), read_config(directory))
    with torch.no_grad():
        for name, module in theirs.named_modules():
            if type(module) is torch.nn.Linear and name != "lm_head":
                module.weight.copy_(checkpoint.matrix(f"{name}.weight").dequantise())
    return theirs


def test_tokens_of_formats_that_are_rounded_again(tmp_path):
    """FP8, and groups that no kernel has. What the rounding costs is in test_quantised_files.py."""
    models = [tmp_path / name for name in ("FP8", "fp8-blocks", "gptq-group-16")]
    check_tokens(models, [with_numbers_of(path) for path in models])


def test_tokens_of_experts_in_mxfp4_and_of_gguf_files(tmp_path):
    experts, path = make_mxfp4(tmp_path / "mxfp4"), tmp_path / "m.gguf"
    gguf_model = make_model("llama-gqa")
    write_gguf(path, gguf_model, "Q4_1")
    check_tokens([experts, path], [reference(experts), gguf_model])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2"])
def test_tokens_of_weights_that_are_rounded_at_load(bits, name):
    """Without calibration: the numbers of `quantise` for activations of 16 bits, V and a part of the head in 8 bits."""
    directory = make_checkpoint(name)
    theirs = reference(directory)
    head, embedding = theirs.get_output_embeddings(), theirs.get_input_embeddings()
    parts = quantise_head(head.weight.data, bits, activation_bits=15)
    with torch.no_grad():
        if head.weight is not embedding.weight:
            embedding.weight.copy_(quantise(embedding.weight, bits).dequantise())
        for module_name, module in theirs.named_modules():
            if type(module) is torch.nn.Linear and module is not head:
                own = 8 if module_name.endswith(".v_proj") else bits
                module.weight.copy_(quantise(module.weight, own).dequantise())
        head.weight.copy_(torch.cat([part.dequantise() for part in parts]))
    check_tokens([directory], [theirs], f"int{bits}")
