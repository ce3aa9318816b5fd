"""Attention of prompts in parts, against float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastdecode.kernels import _native
from fastdecode.spart.prefill import attention, prompt
from fastdecode.spart.prefill.prompt import PromptCache
from fastdecode.spart.prefill.prompt_attention import Blocks, PackedAttention, make_prompt_attention
from fastdecode.spart.shape import AttentionShape, Heads
from fastdecode.spart.step.batch import Chunk, SampleSpec
from fastdecode.transports.base import LayerOptions

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")

#: Largest error allowed, of values near one: rounding to the dtype.
BUDGET = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def one_layer(window: int, **options: Any) -> AttentionShape:
    """One layer of 2 KV heads, each for 4 query heads."""
    return AttentionShape(
        architecture="",
        dtype="fp32",
        vocab_size=1,
        n_layers=1,
        n_q_heads=8,
        n_kv_heads=2,
        head_size=16,
        max_positions=1,
        windows=(window,),
        softmax_scale=0.3,
        eos_token_ids=(),
        bos_token_id=None,
        options=LayerOptions(**options),
    )


#: The functions that an ISA takes for fp32 and for bf16; None: torch's.
EXPECTED = {
    "scalar": (None, None),
    "avx2": ("avx2", "avx2"),
    "avxvnni": ("avx2", "avx2"),
    "avx512": ("avx512", "avx512"),
    "avx512vnni": ("avx512", "avx512"),
    "avx512bf16": ("avx512", "avx512bf16"),
    "amx": ("avx512", "amx"),
    "neon": ("neon", "neon"),
}


@pytest.fixture(params=_native.isa_supported())
def isa(request, monkeypatch):
    """Each ISA of this machine; with `scalar` torch attends."""
    monkeypatch.setenv("FASTDECODE_ISA", request.param)
    return request.param


def attend_in_float64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the docstring of attention.attend says, in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    n, m = q.shape[2], k.shape[2]
    own, position = torch.arange(m - n, m)[:, None], torch.arange(m)
    hidden = (position > own) | (position <= own - (window or m))
    scores = (scale * q @ k.transpose(2, 3)).masked_fill(hidden, float("-inf"))
    return (scores.softmax(dim=3) @ v).transpose(1, 2), scores.logsumexp(dim=3)


@pytest.fixture(params=[*_native.isa_supported(), "fused"])
def way(request, monkeypatch):
    """Each ISA of this machine, and the way of a GPU, whose fused kernels float64 stands for."""
    monkeypatch.setenv("FASTDECODE_ISA", "scalar" if request.param == "fused" else request.param)
    if request.param == "fused":
        monkeypatch.setattr(prompt, "is_fused", lambda device: True)
        monkeypatch.setattr(prompt, "attend", attend_in_float64)
    return request.param


def rows(n: int, heads: int, size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, heads * size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(q: torch.Tensor, kv: torch.Tensor, pos: int, window: int) -> torch.Tensor:
    """float64 attention of q [n, 8 * 16], whose first row is at `pos`, to kv [pos + n, 2 * 2 * 16]."""
    n, m = len(q), len(kv)
    k, v = kv.double().view(m, 2, 2, 16).repeat_interleave(4, dim=2).permute(1, 2, 0, 3)
    scores = 0.3 * q.double().view(n, 8, 16).transpose(0, 1) @ k.transpose(1, 2)
    own, position = torch.arange(pos, m)[:, None], torch.arange(m)
    hidden = (position > own) | ((position <= own - window) if window else torch.zeros(n, m, dtype=torch.bool))
    return (scores.masked_fill(hidden, float("-inf")).softmax(dim=2) @ v).transpose(0, 1).reshape(n, -1)


def prefill(q: torch.Tensor, kv: torch.Tensor, sizes: list[int], window: int) -> torch.Tensor:
    """O of a prompt in chunks of these sizes."""
    cache = PromptCache(one_layer(window), q.device, q.dtype)
    out, pos = torch.empty_like(q), 0
    for n in sizes:
        sample = SampleSpec() if pos + n == len(q) else None
        chunk = Chunk(0, 0, 1, pos, [0] * n, True, sample)
        work = cache.begin("prompt", chunk, slice(0, n))
        part = slice(pos, pos + n)
        work.attend(0, q[part], kv[part], out=out[part])
        cache.end(work)
        pos += n
    assert pos == len(q) and not cache._prompts
    return out


@functools.cache
def whole_prompt(window: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, and K and V, of 700 rows, and O in float64."""
    q, kv = rows(700, 8, 16, 1, dtype), rows(700, 4, 16, 2, dtype)
    return q, kv, expected(q, kv, 0, window)


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("window", [0, 1, 40, 300, 5000])
@pytest.mark.parametrize("sizes", [[700], [1, 699], [699, 1], [300, 300, 100], [10] * 70], ids=lambda s: f"{len(s)}")
def test_chunks_of_a_prompt_attend_to_all_earlier_rows(sizes, window, dtype, way):
    q, kv, want = whole_prompt(window, dtype)
    got = prefill(q, kv, sizes, window)
    assert got.dtype is dtype
    assert (got.double() - want).abs().max() < BUDGET[dtype]


def test_two_parts_are_merged_without_overflow(isa):
    """Scores far apart: one part has all the weight, and its exponentials alone would overflow."""
    q, kv = rows(40, 8, 16, 1) * 100, rows(40, 4, 16, 2) * 100
    assert (prefill(q, kv, [20, 20], 0).double() - expected(q, kv, 0, 0)).abs().max() < 1e-3


def test_an_isa_takes_its_own_function(isa):
    functions = [make_prompt_attention(one_layer(0), CPU, dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert tuple(function and function.native.isa for function in functions) == EXPECTED[isa]


@pytest.fixture(params=[isa for isa in _native.isa_supported() if isa != "scalar"])
def native(request, monkeypatch):
    """Makes the native attention of a dtype."""
    monkeypatch.setenv("FASTDECODE_ISA", request.param)

    def make(dtype: torch.dtype) -> PackedAttention:
        found = make_prompt_attention(one_layer(0), CPU, dtype)
        return found or pytest.skip(f"{request.param} has no attention of {dtype}")

    return make


def empty_blocks(attention: PackedAttention, k: torch.Tensor, v: torch.Tensor) -> Blocks:
    """Blocks with room for these rows, in memory that is full of NaN."""
    heads = Heads(len(k), len(k), k.shape[2], v.shape[2])
    words = torch.full((len(k), attention.words(heads, k.shape[1])), float("nan"))
    return Blocks(words.view(torch.int32), heads.k_size, heads.v_size)


#: Query heads of each KV head, and the sizes of K and V heads.
SIZES = [(1, 64, 64), (3, 24, 40), (4, 128, 128), (7, 80, 96), (130, 8, 8), (2, 1100, 16)]


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("n, m", [(1, 1), (1, 200), (63, 64), (130, 321)])
def test_native_attention_of_heads_of_any_size(native, n, m, sizes, dtype):
    attention, (group, k_size, v_size) = native(dtype), sizes
    q, k, v = torch.randn(n, 2 * group, k_size), torch.randn(2, m, k_size), torch.randn(2, m, v_size)
    q, k, v, out = q.to(dtype), k.to(dtype), v.to(dtype), torch.empty(n, 2 * group, v_size, dtype=dtype)
    blocks = empty_blocks(attention, k, v)
    for start, stop in itertools.pairwise([0, *range(min(m, 37), m, 37), m]):
        attention.pack(blocks, k[:, start:stop], v[:, start:stop], start)
    attention.attend(blocks, q, out, m - n, k_size**-0.5)
    scores = torch.einsum("nhd,hmd->hnm", q.double(), k.double().repeat_interleave(group, dim=0)) * k_size**-0.5
    hidden = torch.arange(m) > torch.arange(m - n, m)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=2)
    want = torch.einsum("hnm,hmd->nhd", weights, v.double().repeat_interleave(group, dim=0))
    assert (out.double() - want).abs().max() < BUDGET[dtype] * 2


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("window, segment", [(0, 0), (100, 0), (0, 90)])
def test_a_row_depends_neither_on_other_rows_nor_on_chunks(native, window, segment, dtype):
    """Equal to the last bit: whole, in chunks, and with another number of threads."""
    attention = native(dtype)
    q, k, v = torch.randn(300, 6, 32).to(dtype), torch.randn(2, 300, 32).to(dtype), torch.randn(2, 300, 48).to(dtype)

    def in_chunks(size: int) -> torch.Tensor:
        out, blocks = torch.empty(300, 6, 48, dtype=dtype), empty_blocks(attention, k, v)
        for start in range(0, 300, size):
            part = slice(start, min(300, start + size))
            attention.pack(blocks, k[:, part], v[:, part], start)
            attention.attend(blocks, q[part], out[part], start, 0.2, window, segment)
        return out

    whole, threads = in_chunks(300), torch.get_num_threads()
    assert whole.isfinite().all()
    for size in (1, 7, 64, 129):
        assert torch.equal(in_chunks(size), whole)
    try:
        torch.set_num_threads(1)
        assert torch.equal(in_chunks(300), whole)
    finally:
        torch.set_num_threads(threads)


def test_native_attention_refuses_rows_that_do_not_fit(native):
    attention, q, kv = native(torch.float32), torch.zeros(65, 6, 8), torch.zeros(2, 65, 8)
    blocks = empty_blocks(attention, kv[:, :64], kv[:, :64])
    with pytest.raises(AssertionError):
        attention.pack(blocks, kv, kv, 0)
    attention.pack(blocks, kv[:, :64], kv[:, :64], 0)
    with pytest.raises(AssertionError):
        attention.attend(blocks, q, torch.zeros_like(q), 0, 1.0)
    with pytest.raises(AssertionError):
        attention.attend(blocks, q[:64].double(), torch.zeros_like(q[:64]), 0, 1.0)


def test_models_that_change_their_scores_are_attended_by_torch():
    assert make_prompt_attention(one_layer(0, softcaps=(3.0,)), CPU, torch.float32) is None
    assert make_prompt_attention(one_layer(0), torch.device("meta"), torch.float32) is None


class Allocations(TorchDispatchMode):
    """The largest memory, in elements, that a result of an operation has of its own."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self._known = {x.untyped_storage().data_ptr() for x in known}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self._known:
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("isa", [isa for isa in _native.isa_supported() if isa != "scalar"], indirect=True)
@pytest.mark.parametrize("window", [0, 64])
def test_no_mask_of_the_prompt_and_no_repeated_rows_are_made(window, isa):
    """A late chunk of a long prompt allocates less than its mask or its K for all query heads would take."""
    n, pos = 32, 6000
    q, kv = rows(n, 8, 16, 1), rows(pos + n, 4, 16, 2)
    cache = PromptCache(one_layer(window), q.device, q.dtype)
    first = Chunk(0, 0, 1, 0, [0] * pos, True, None)
    begun = cache.begin("prompt", first, slice(0, pos))
    prompt = begun.prompt
    cache.end(begun)
    chunk = Chunk(0, 0, 1, pos, [0] * n, True, SampleSpec())
    work = cache.begin("prompt", chunk, slice(0, n))
    begun.attend(0, rows(pos, 8, 16, 3), kv[:pos], out=torch.empty(pos, 8 * 16))
    out = torch.empty_like(q)
    with Allocations(q, kv, out, *prompt._layers.values()) as allocations:
        work.attend(0, q, kv[pos:], out=out)
    assert allocations.largest < n * pos < 8 * 16 * pos
    assert (out.double() - expected(q, kv, pos, window)).abs().max() < BUDGET[torch.float32]


@pytest.mark.parametrize("name", ["attend_flash", "attend_efficient"])
@pytest.mark.parametrize("window", [0, 30])
def test_cuda_kernels_take_these_arguments(name: str, window: int) -> None:
    """On torch's meta device, which checks a call and knows the shapes of its results. Values need a GPU."""
    q = torch.empty(2, 50, 3, 24, dtype=torch.float16, device="meta")
    kv = torch.empty(2, 70, 1, 24, dtype=torch.float16, device="meta").expand(-1, -1, 3, -1)
    got, log_sum = getattr(attention, name)(q, kv, kv, 0.2, window)
    assert got.shape == q.shape and got.dtype is torch.float16
    assert log_sum.shape == (2, 3, 50) and log_sum.dtype is torch.float32


SLOPES = 2.0 ** -np.arange(1, 9)
OPTIONS = {
    "softcap": {"softcaps": (0.5,)},
    "sinks": {"sinks": np.linspace(-2, 3, 8).astype("<f4").tobytes()},
    "slopes": {"slopes": SLOPES.astype("<f4").tobytes()},
    "segments": {"segments": (40,)},
    "all": {"softcaps": (2.0,), "sinks": np.linspace(-2, 3, 8).astype("<f4").tobytes(), "segments": (70,)},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("sizes", [[100], [1, 60, 39], [30, 70]])
def test_options_of_few_models_equal_float64(sizes: list[int], window: int, options: str, way: str) -> None:
    given = OPTIONS[options]
    q, kv = rows(sum(sizes), 8, 16, 3), rows(sum(sizes), 4, 16, 4)
    shape, n = one_layer(window, **given), len(q)
    k, v = kv.double().view(n, 2, 2, 16).repeat_interleave(4, dim=2).permute(1, 2, 0, 3)
    scores = 0.3 * q.double().view(n, 8, 16).transpose(0, 1) @ k.transpose(1, 2)
    own, position = torch.arange(n)[:, None], torch.arange(n)
    if "softcaps" in given:
        scores = given["softcaps"][0] * torch.tanh(scores / given["softcaps"][0])
    if "slopes" in given:
        scores += torch.from_numpy(SLOPES)[:, None, None] * (position - own)
    hidden = position > own
    if window:
        hidden |= position <= own - window
    if "segments" in given:
        hidden |= position // given["segments"][0] != own // given["segments"][0]
    scores = scores.masked_fill(hidden, float("-inf"))
    if "sinks" in given:
        sinks = torch.from_numpy(np.frombuffer(given["sinks"], "<f4").astype(np.float64))
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], dim=2)
    weights = scores.softmax(dim=2)[:, :, :n]
    want = (weights @ v).transpose(0, 1).reshape(n, -1)

    cache = PromptCache(shape, q.device, q.dtype)
    out, pos = torch.empty_like(q), 0
    for size in sizes:
        chunk = Chunk(0, 0, 1, pos, [0] * size, True, SampleSpec() if pos + size == n else None)
        work = cache.begin("prompt", chunk, slice(0, size))
        part = slice(pos, pos + size)
        work.attend(0, q[part], kv[part], out=out[part])
        cache.end(work)
        pos += size
    assert (out - want).abs().max() < 5e-6
