"""The decoder's operations between products: the C functions of each ISA, the CUDA kernels on the host, and torch's,
against float64."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from gpu.host_kernels import HostKernels
from models.checkpoints import FAMILIES, make_checkpoint, reference
from models.spart_steps import EXACT, GREEDY, linked, run, text
from sources.compiled import compiled
from transformers.activations import ACT2FN

from fastdecode.kernels import _native
from fastdecode.spart import SPart, load_model, read_config
from fastdecode.spart.block_kernels import BLOCK_THREADS
from fastdecode.spart.decoder import layer_pass
from fastdecode.spart.decoder.block_ops import BlockOps, NativeBlockOps, RowHeads
from fastdecode.spart.decoder.cuda_ops import CudaBlockOps, Launch, make_block_ops
from fastdecode.spart.decoder.rope import Angles
from fastdecode.spart.decoder.weights import Layer, Norm
from fastdecode.spart.step.batch import Chunk, StepBatch

CPU = torch.device("cpu")
#: Of a result's magnitude: rounding once to the dtype, and of sums in fp32.
BUDGET = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
#: The functions that an ISA takes.
EXPECTED = {
    "avx2": "avx2",
    "avxvnni": "avx2",
    "avx512": "avx512",
    "avx512vnni": "avx512",
    "avx512bf16": "avx512",
    "amx": "avx512",
    "neon": "neon",
}
VECTOR_ISAS = [isa for isa in _native.isa_supported() if isa != "scalar"]


@pytest.fixture(scope="module")
def config():
    """The configuration of a Llama whose sizes are multiples of no vector: hidden 44, 3 Q heads and 1 KV head of 24."""
    base = read_config(make_checkpoint("llama-gqa"))
    return replace(base, hidden_size=44, n_q_heads=3, n_kv_heads=1, head_size=24, residual_scale=0.5)


@pytest.fixture(scope="module")
def host_launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Launches the CUDA kernels, compiled for the host."""
    kernels = HostKernels(compiled("block_kernels.so", tmp_path_factory.mktemp("kernels")))
    return lambda name, grid, pointers, numbers: kernels.launch_at(name, grid, BLOCK_THREADS, pointers, numbers)


@pytest.fixture(params=["torch", "cuda", *VECTOR_ISAS])
def ops_class(request, monkeypatch):
    if request.param == "torch":
        return BlockOps
    if request.param == "cuda":
        return partial(CudaBlockOps, launch=request.getfixturevalue("host_launch"))
    monkeypatch.setenv("FASTDECODE_ISA", request.param)
    return NativeBlockOps


@pytest.fixture(params=BUDGET, ids=str)
def dtype(request):
    return request.param


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=BUDGET[got.dtype], atol=BUDGET[got.dtype])


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("rows", [1, 3, 2000])
def test_norms(ops_class, dtype, config, rows):
    """2000 rows are shared among threads."""
    ops = ops_class(config, dtype)
    x, y, weight = (torch.randn(*shape).to(dtype) for shape in ((rows, 44), (rows, 44), (44,)))
    norm = Norm(weight, None)
    assert_near(ops.norm(x, norm), rms_norm(x, weight, config.norm_eps))
    want = x.double() + 0.5 * y.double()
    h = ops.add_norm(x, y, norm)
    assert_near(x, want)
    assert_near(h, rms_norm(x, weight, config.norm_eps))


@pytest.mark.parametrize(("activation", "spread"), [("silu", 8), ("gelu_pytorch_tanh", 2)])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 37), (500, 128)])
def test_the_gate(ops_class, dtype, config, activation, spread, rows, width):
    """torch's GELU is less exact for gates far below zero, which a smaller spread does not have."""
    x = (torch.randn(rows, 2 * width) * spread).to(dtype)
    gate, up = x.double().chunk(2, dim=1)
    want = ACT2FN[activation](gate) * up
    assert_near(ops_class(replace(config, activation=activation), dtype).activate(x.clone()), want)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_the_gate_keeps_numbers_at_their_limits(ops_class, dtype, config, activation):
    gate = torch.tensor([0.0, -0.0, 60.0, -60.0, math.inf, math.nan] * 8).to(dtype)[None]
    ops = ops_class(replace(config, activation=activation), dtype)
    y = ops.activate(torch.cat([gate, torch.ones_like(gate)], 1))[0]
    assert (y[0::6] == 0).all() and (y[1::6] == 0).all()
    assert (y[2::6] == 60).all() and (y[3::6].float().abs() < 1e-20).all()
    assert y[4::6].isinf().all() and y[5::6].isnan().all()


@pytest.mark.parametrize("pairs", [12, 8, 3])
@pytest.mark.parametrize("normed", [0, 1, 3])
def test_heads_come_to_their_places(ops_class, dtype, config, pairs, normed):
    """With norms of each head, and of the three Q heads as one."""
    ops, n = ops_class(replace(config, whole_qk_norm=normed > 1), dtype), 7
    norms = [torch.randn(heads * 24).to(dtype) for heads in (normed, 1, 1)] if normed else [None] * 3
    sizes = config.heads_of(0)
    names = (field.name for field in fields(Layer))
    layer = Layer(**dict.fromkeys(names) | {"heads": sizes, "q_norm": norms[0], "k_norm": norms[1], "v_norm": norms[2]})
    qkv = torch.randn(n, 5 * 24).to(dtype)
    angles = Angles(*torch.randn(4, n, 1, pairs).clamp(-1, 1).to(ops.angle_dtype))
    slot_q, slot_kv = torch.full((n, 80), 7.0).to(dtype), torch.full((n, 56), 7.0).to(dtype)
    heads = qkv.double().view(n, 5, 24)
    ops.write_heads(qkv, layer, angles, RowHeads(slot_q, slot_kv, sizes))

    of_q, of_k = (slice(3), norms[0], angles[2:]), (slice(3, 4), norms[1], angles[:2])
    for i, norm, (cos, sin) in (of_q, of_k):
        if norm is not None:
            heads[:, i] = rms_norm(heads[:, i].reshape(n, -1, len(norm)), norm, config.norm_eps).view(n, -1, 24)
        a, b = heads[:, i, :pairs].clone(), heads[:, i, pairs : 2 * pairs].clone()
        heads[:, i, :pairs] = a * cos.double() - b * sin.double()
        heads[:, i, pairs : 2 * pairs] = b * cos.double() + a * sin.double()
    if normed:
        heads[:, 4] = rms_norm(heads[:, 4], norms[2], config.norm_eps)
    budget = 3 * BUDGET[dtype]  # torch rounds products, and normed heads, to the dtype
    for got, want in ((slot_q[:, :72], heads[:, :3]), (slot_kv[:, :48], heads[:, 3:])):
        torch.testing.assert_close(got.double(), want.reshape(n, -1), rtol=budget, atol=budget)
    assert (slot_q[:, 72:] == 7).all() and (slot_kv[:, 48:] == 7).all(), "the rest of a slot's row is not written"


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_parts_of_rows_are_normalised_and_turned(ops_class, dtype, config, interleaved):
    """As latent attention has them: rows and heads stand apart."""
    ops, n, pairs = ops_class(config, dtype), 7, 5
    rows, weight = torch.randn(n, 60).to(dtype), torch.randn(21).to(dtype)
    part, heads = rows[:, 3:24], rows[:, 24:].unflatten(1, (3, 12))[..., 2:]
    assert_near(ops.norm_parts(part, weight, 1e-6), rms_norm(part, weight, 1e-6))
    cos, sin = torch.randn(2, n, 1, pairs).clamp(-1, 1).to(ops.angle_dtype)
    out = torch.full((n, 3, 14), 7.0).to(dtype)
    ops.turn(heads, cos, sin, out[..., 4:], interleaved)
    a, b = (heads[..., 0::2], heads[..., 1::2]) if interleaved else heads.chunk(2, dim=2)
    a, b, cos, sin = a.double(), b.double(), cos.double(), sin.double()
    budget = 3 * BUDGET[dtype]  # torch rounds products to the dtype
    want = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=2)
    torch.testing.assert_close(out[..., 4:].double(), want, rtol=budget, atol=budget)
    assert (out[..., :4] == 7).all(), "the rest of a head is not written"


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3-moe", "qwen3.5", "llama-llama3"])
async def test_models_have_the_logits_of_transformers_by_the_cuda_kernels(name, host_launch, tmp_path, monkeypatch):
    """A prompt, and a token behind it; kernels on the host."""
    launched = set()

    def launch(kernel, *arguments):
        launched.add(kernel)
        host_launch(kernel, *arguments)

    monkeypatch.setattr(layer_pass, "make_block_ops", lambda config, _, dtype: CudaBlockOps(config, dtype, launch))
    directory, tokens = make_checkpoint(name), text(20)
    model = load_model(directory, dtype="fp32")
    with torch.inference_mode():
        want = reference(directory)(torch.tensor([tokens])).logits[0, -2:]
    async with linked(model, tmp_path) as links:
        spart = SPart(model, links, state_slots=1)
        for i, chunk in enumerate(
            (Chunk(0, 0, 1, 0, tokens[:-1], True, GREEDY), Chunk(0, 0, 1, 19, tokens[-1:], False, GREEDY))
        ):
            got = run(spart.step(StepBatch(0, [chunk]), keep_logits=True)).logits
            assert (got[0] - want[i]).abs().max() < EXACT * want[i].std()
    gelu = {"fd_add_norm", "fd_write_heads"}
    others = {"opt": {"fd_write_heads"}, "gemma2": gelu, "gemma3": gelu, "gemma4": gelu, "gemma4-e": gelu}
    others["deepseek-v3-dense"] = {"fd_add_norm", "fd_silu_gate"}
    assert launched == others.get(name, {"fd_add_norm", "fd_write_heads", "fd_silu_gate"})


@pytest.mark.parametrize("isa", _native.isa_supported())
def test_each_isa_has_the_functions_that_its_name_says(isa, monkeypatch, config):
    monkeypatch.setenv("FASTDECODE_ISA", isa)
    ops = make_block_ops(config, CPU, torch.float32)
    assert ops.vectors._native.isa == EXPECTED[isa] if isinstance(ops, NativeBlockOps) else isa == "scalar"


def test_other_norms_and_activations_are_torchs(config, dtype):
    other = replace(config, norm="layer", activation="gelu")
    native, torchs = make_block_ops(other, CPU, dtype), BlockOps(other, dtype)
    x, up = torch.randn(3, 44).to(dtype), torch.randn(3, 64).to(dtype)
    norm = Norm(torch.randn(44).to(dtype), torch.randn(44).to(dtype))
    assert torch.equal(native.norm(x, norm), torchs.norm(x, norm))
    assert torch.equal(native.activate(up.clone()), torchs.activate(up.clone()))
