"""Heads whose V is the first elements of their K, as in latent attention: the kernels of every ISA and format against
float64 on NumPy."""
# ruff: noqa: E741 (m, l and acc are the names of attention.h and of the paper)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import kernel_calls
from attention.emulated import NEON, SCALAR, is_emulated, kernels, neighbours, params
from attention.kernel_budget import budget
from attention.kernel_reference import Cache, Partial, Shape, aligned_bytes, assert_close, normal, queries, reference
from attention.kv_accuracy import INTEGERS, hadamard, stored
from quick import quick

from fastdecode.kernels import _native as native
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS
from fastdecode.transports.base import HadamardHeads

ISAS = native.isa_supported()
#: int8-int4 stores V in other bits than K.
DTYPES = [name for name in KV_DTYPES if name != "int8-int4"]
by_isa = pytest.mark.parametrize("isa", params([*ISAS, NEON]))
by_kv_dtype = pytest.mark.parametrize("kv_dtype", DTYPES)


SHAPES = [
    Shape(576, 512, 1, 1, 300),  # DeepSeek-V3
    Shape(576, 512, 16, 1, 129),
    Shape(576, 512, 128, 1, 200),  # more rows than a panel
    Shape(320, 256, 5, 2, 127),
    Shape(128, 128, 8, 1, 128),
    Shape(128, 64, 3, 17, 390, 150),
    Shape(72, 40, 7, 1, 65),  # columns of V of 32 and of 8
    Shape(88, 56, 9, 3, 1 * PAGE_TOKENS + 1),
    Shape(24, 16, 2, 64, 200),
    Shape(16, 8, 4, 1, 1),
]
LARGEST_EMULATED = 1 << 22  # multiply-adds


def stored_k(k: np.ndarray, v_size: int, kv_dtype: str) -> np.ndarray:
    """K, float64, as a cache holds it: of integer formats, V and the rest are transformed apart and rounded
    together."""
    if kv_dtype not in INTEGERS:
        return stored(k, kv_dtype)

    def transformed(x: np.ndarray) -> np.ndarray:
        return np.concatenate([hadamard(x[:, :v_size]), hadamard(x[:, v_size:])], axis=1)

    return transformed(stored(transformed(k), kv_dtype))


def check(isa: str, kv_dtype: str, shape: Shape, **options: Any) -> None:
    if is_emulated(isa) and shape.group * shape.q_len * shape.length * shape.head_size > LARGEST_EMULATED:
        return
    rng = np.random.default_rng(shape)
    q, k = queries(rng, shape.q_len, shape.group, shape.head_size), normal(rng, shape.length, shape.head_size)
    q_pos = shape.length - shape.q_len
    got = Cache(isa, kv_dtype, k, shape.v_size).attend(q, q_pos, shape.window, **options)
    held = stored_k(k, shape.v_size, kv_dtype)
    want = reference(q, held, held[:, : shape.v_size], q_pos, shape.window, **options)
    allowed = budget(isa, kv_dtype, min(shape.head_size, shape.v_size), shape.group * shape.q_len)
    assert_close(got, want, k[:, : shape.v_size], kv_dtype, allowed, (shape, options))


@pytest.mark.parametrize("shape", quick(SHAPES, SHAPES[6]), ids=str)
@by_kv_dtype
@by_isa
def test_attention_equals_float64(isa: str, kv_dtype: str, shape: Shape) -> None:
    check(isa, kv_dtype, shape)


@by_kv_dtype
@by_isa
def test_segments_and_softcaps(isa: str, kv_dtype: str) -> None:
    check(isa, kv_dtype, Shape(72, 40, 6, 9, 290), segment=100)
    check(isa, kv_dtype, Shape(128, 96, 3, 1, 200), softcap=2.0)


@pytest.mark.quick
@by_kv_dtype
@by_isa
def test_every_number_of_tokens_in_a_page(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(1)
    q, k = queries(rng, 1, 3, 40), normal(rng, 2 * PAGE_TOKENS, 40)
    for n in range(1, 2 * PAGE_TOKENS + 1):
        held = stored_k(k[:n], 24, kv_dtype)
        got = Cache(isa, kv_dtype, k[:n], 24).attend(q, n - 1)
        assert_close(got, reference(q, held, held[:, :24], n - 1), k[:n, :24], kv_dtype, budget(isa, kv_dtype), n)


@by_kv_dtype
@by_isa
def test_garbage_beyond_the_limits_never_reaches_a_result(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(3)
    for shape in (Shape(16, 8, 1, 1, 1), Shape(576, 512, 2, 1, 65), Shape(72, 40, 5, 17, 200), Shape(88, 56, 9, 1, 31)):
        q, k = queries(rng, shape.q_len, shape.group, shape.head_size), normal(rng, shape.length, shape.head_size)
        q_pos = shape.length - shape.q_len
        results = [Cache(isa, kv_dtype, k, shape.v_size, fill=fill).attend(q, q_pos) for fill in (0, 0xFF, 0x7C)]
        for other in results[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True)), shape


@pytest.mark.quick
@by_kv_dtype
@pytest.mark.parametrize(("writer", "reader"), neighbours([*ISAS, NEON, SCALAR]))
def test_a_chunk_written_by_one_isa_is_read_by_another(writer: str, reader: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(4)
    q, k = queries(rng, 1, 4, 104), normal(rng, 100, 104)
    cache = Cache(writer, kv_dtype, k, 72)
    assert np.array_equal(cache.buffer, Cache(reader, kv_dtype, k, 72).buffer)
    held = stored_k(k, 72, kv_dtype)
    got = cache.attend(q, 99, isa=reader)
    assert_close(got, reference(q, held, held[:, :72], 99), k[:, :72], kv_dtype, budget(reader, kv_dtype), "")


@by_kv_dtype
@by_isa
def test_heads_attended_at_once_equal_each_alone(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(11)
    for heads, shape in [(2, Shape(72, 40, 9, 2, 130)), (3, Shape(24, 16, 1, 1, 300)), (4, Shape(64, 64, 16, 1, 65))]:
        q = queries(rng, heads * shape.q_len, shape.group, shape.head_size)
        q = q.reshape(heads, shape.q_len, shape.group, shape.head_size)
        caches = [Cache(isa, kv_dtype, normal(rng, shape.length, shape.head_size), shape.v_size) for _ in range(heads)]
        pages = np.stack([cache.chunks[cache.order] for cache in caches], axis=1)
        buffer = aligned_bytes(pages.size)
        buffer[:] = pages.ravel()
        q_pos = shape.length - shape.q_len
        alone = [cache.attend(one, q_pos) for cache, one in zip(caches, q, strict=True)]
        sizes = q.shape[:3], q.shape[:3], (*q.shape[:3], shape.v_size)
        m, l, acc = (np.full(size, np.nan, np.float32) for size in sizes)
        kernels(isa).kv_attend(isa, kv_dtype, buffer, None, 0, q, q_pos, 0, acc, m, l, v_in_k=1)
        for got, want in zip((m, l, acc), zip(*alone, strict=True), strict=True):
            assert np.array_equal(got, np.stack(want)), (heads, shape)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_a_caller_may_transform_in_place_of_a_kernel(isa: str, kv_dtype: str) -> None:
    """Q, K with its V, and O, all or none of them."""
    rng = np.random.default_rng(5)
    q, k = queries(rng, 2, 4, 192), normal(rng, 200, 192)
    plain = Cache(isa, kv_dtype, k, 128).attend(q, 198)
    turned_q, turned_k = (hadamard(x.reshape(-1, 192)).reshape(x.shape) for x in (q, k))
    every = int(HadamardHeads.QK | HadamardHeads.VO)
    got = Cache(isa, kv_dtype, turned_k, 128, hadamard=every).attend(turned_q, 198, hadamard=every)
    got = Partial(got.m, got.l, hadamard(got.acc.reshape(-1, 128)).reshape(got.acc.shape))
    for ours, theirs in zip(got, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-3 * np.abs(theirs).max())


def test_a_chunk_has_k_alone() -> None:
    for kv_dtype, bits, affine in [("fp32", 32, 0), ("fp16", 16, 0), ("bf16", 16, 0), ("int8", 8, 4), ("int4", 4, 4)]:
        for head_size, v_size in ((576, 512), (40, 32), (8, 8)):
            size = PAGE_TOKENS * (head_size * bits // 8 + affine)
            assert kernel_calls.chunk_bytes(kv_dtype, head_size, v_size, v_in_k=True) == size
