"""Attention of prompts in parts, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastdecode.spart import attention
from fastdecode.spart.attention import attend, attend_matmul
from fastdecode.spart.batch import Chunk, SampleSpec
from fastdecode.spart.prompt import PromptCache, PromptChunk
from fastdecode.spart.shape import AttentionShape
from fastdecode.transports.base import LayerOptions

pytestmark = pytest.mark.quick

#: Largest error allowed, of values near one: rounding to the dtype.
BUDGET = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Shape(AttentionShape):
    """One layer of 2 KV heads, each for 4 query heads."""

    n_layers, n_q_heads, n_kv_heads, head_size = 1, 8, 2, 16
    softmax_scale = 0.3

    def __init__(self, window: int, **options: Any):
        self.windows, self.options = (window,), LayerOptions(**options)


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
    cache = PromptCache(Shape(window), q.device, q.dtype)
    out, pos = torch.empty_like(q), 0
    for n in sizes:
        sample = SampleSpec() if pos + n == len(q) else None
        chunk = Chunk(0, 0, 1, pos, [0] * n, True, sample)
        work = PromptChunk(Shape(window), "prompt", chunk, slice(0, n), cache.begin("prompt", chunk))
        part = slice(pos, pos + n)
        work.attend(0, q[part], kv[part], out=out[part])
        cache.end(work)
        pos += n
    assert pos == len(q) and len(cache) == 0
    return out


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("window", [0, 1, 40, 300, 5000])
@pytest.mark.parametrize("sizes", [[700], [1, 699], [699, 1], [300, 300, 100], [10] * 70], ids=lambda s: f"{len(s)}")
def test_chunks_of_a_prompt_attend_to_all_earlier_rows(sizes, window, dtype):
    q, kv = rows(700, 8, 16, 1, dtype), rows(700, 4, 16, 2, dtype)
    got = prefill(q, kv, sizes, window)
    assert got.dtype is dtype
    assert (got.double() - expected(q, kv, 0, window)).abs().max() < BUDGET[dtype]


def test_two_parts_are_merged_without_overflow():
    """Scores far apart: one part has all the weight, and its exponentials alone would overflow."""
    q, kv = rows(40, 8, 16, 1) * 100, rows(40, 4, 16, 2) * 100
    assert (prefill(q, kv, [20, 20], 0).double() - expected(q, kv, 0, 0)).abs().max() < 1e-3


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


@pytest.mark.parametrize("window", [0, 64])
def test_no_mask_of_the_prompt_and_no_repeated_rows_are_made(window):
    """A late chunk of a long prompt allocates less than its mask or its K for all query heads would take."""
    n, pos = 32, 6000
    q, kv = rows(n, 8, 16, 1), rows(pos + n, 4, 16, 2)
    cache = PromptCache(Shape(window), q.device, q.dtype)
    first = Chunk(0, 0, 1, 0, [0] * pos, True, None)
    prompt = cache.begin("prompt", first)
    cache.end(PromptChunk(Shape(window), "prompt", first, slice(0, pos), prompt))
    chunk = Chunk(0, 0, 1, pos, [0] * n, True, SampleSpec())
    work = PromptChunk(Shape(window), "prompt", chunk, slice(0, n), cache.begin("prompt", chunk))
    prompt.kv[0, :pos] = kv[:pos]
    out = torch.empty_like(q)
    with Allocations(q, kv, out, prompt.kv) as allocations:
        work.attend(0, q, kv[pos:], out=out)
    assert allocations.largest < n * pos < 8 * 16 * pos
    assert (out.double() - expected(q, kv, pos, window)).abs().max() < BUDGET[torch.float32]


@pytest.mark.parametrize("kernel", [attend, attend_matmul])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_log_sum(kernel, causal):
    """K and V of one head, expanded to three."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, 50, 24, generator=generator) for heads in (3, 1, 1))
    got, log_sum = kernel(q, k.expand(-1, 3, -1, -1), v.expand(-1, 3, -1, -1), causal, 0.2)
    scores = 0.2 * q.double() @ k.double().transpose(-1, -2)
    if causal:
        scores += torch.full((50, 50), float("-inf")).triu(1)
    torch.testing.assert_close(got.double(), scores.softmax(dim=-1) @ v.double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(log_sum.double(), scores.logsumexp(dim=-1), rtol=0, atol=1e-5)
    assert log_sum.dtype is torch.float32


@pytest.mark.parametrize("name", ["attend_flash", "attend_efficient"])
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_kernels_take_these_arguments(name, causal):
    """On torch's meta device, which checks a call and knows the shapes of its results. Values need a GPU."""
    q = torch.empty(2, 3, 50, 24, dtype=torch.float16, device="meta")
    kv = torch.empty(2, 1, 50 if causal else 70, 24, dtype=torch.float16, device="meta").expand(-1, 3, -1, -1)
    got, log_sum = getattr(attention, name)(q, kv, kv, causal, 0.2)
    assert got.shape == q.shape and got.dtype is torch.float16
    assert log_sum.shape == q.shape[:3] and log_sum.dtype is torch.float32


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
def test_options_of_few_models_equal_float64(sizes: list[int], window: int, options: str) -> None:
    given = OPTIONS[options]
    q, kv = rows(sum(sizes), 8, 16, 3), rows(sum(sizes), 4, 16, 4)
    shape, n = Shape(window, **given), len(q)
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
        work = PromptChunk(shape, "prompt", chunk, slice(0, size), cache.begin("prompt", chunk))
        part = slice(pos, pos + size)
        work.attend(0, q[part], kv[part], out=out[part])
        cache.end(work)
        pos += size
    assert (out - want).abs().max() < 5e-6
