"""What few models do to their attention, in every ISA and format, against float64 on NumPy: soft-capped scores,
attention sinks, chunked attention, ALiBi, and heads of V of another size than those of K."""
# ruff: noqa: E741 (m, l and acc are the names of attention.h and of the paper)

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import kernel_calls
from attention.emulated import NEON, kernels, params
from attention.kernel_budget import budget, unit
from attention.kernel_reference import Cache, Shape, aligned_bytes, assert_close, normal, queries, reference
from attention.kv_accuracy import stored_kv

from fastdecode.kernels import _native as native
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS

by_isa = pytest.mark.parametrize("isa", params([*native.isa_supported(), NEON]))
by_kv_dtype = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


SHAPES = [
    Shape(128, 128, 8, 1, 300),
    Shape(64, 64, 1, 1, 128),
    Shape(24, 24, 3, 5, 200),
    Shape(80, 80, 2, 17, 390, 150),
    Shape(256, 256, 4, 3, 129),
    Shape(512, 512, 9, 1, 200),
]


def check(isa: str, kv_dtype: str, shape: Shape, scale: float = 1.0, **options: Any) -> None:
    """Attend `shape`, with queries `scale` times as large as usual, and compare with float64."""
    rng = np.random.default_rng(shape)
    q = queries(rng, shape.q_len, shape.group, shape.head_size) * np.float32(scale)
    k, v = normal(rng, shape.length, shape.head_size), normal(rng, shape.length, shape.v_size)
    q_pos = shape.length - shape.q_len
    for_kernel = {name: x[None] if isinstance(x, np.ndarray) else x for name, x in options.items()}
    got = Cache(isa, kv_dtype, k, v).attend(q, q_pos, shape.window, **for_kernel)
    want = reference(q, *stored_kv(k, v, kv_dtype), q_pos, shape.window, **options)
    allowed = budget(isa, kv_dtype, min(shape.head_size, shape.v_size), shape.group * shape.q_len)
    if scale > 1:  # rounding a query to few bits changes a score in proportion to its size
        allowed = allowed._replace(output=allowed.output * scale, l=allowed.l * scale, m=allowed.m * scale)
    assert_close(got, want, v, kv_dtype, allowed, (shape, options))


@pytest.mark.quick
@pytest.mark.parametrize("softcap", [0.5, 50.0])
@by_kv_dtype
@by_isa
def test_softcap(isa: str, kv_dtype: str, softcap: float) -> None:
    for shape in SHAPES:
        check(isa, kv_dtype, shape, softcap=softcap)
    check(isa, kv_dtype, SHAPES[2], scale=8.0, softcap=softcap)


@by_kv_dtype
@by_isa
def test_softcap_of_huge_and_of_tiny_scores(isa: str, kv_dtype: str) -> None:
    """Scores of +-1e6 become +-cap exactly; queries too small for a scale leave all weights equal."""
    k = np.ones((200, 64), np.float32)
    k[100:] = -1
    v = normal(np.random.default_rng(1), 200, 64)
    q = np.full((1, 2, 64), 1e6, np.float32)
    got = Cache(isa, kv_dtype, k, v).attend(q, 199, softcap=30.0)
    np.testing.assert_allclose(got.m, 30, rtol=1e-6)
    np.testing.assert_allclose(got.l, 100, rtol=1e-5)
    for size in (0.0, 1e-40, 1e-32, 1e-25):
        got = Cache(isa, kv_dtype, k, v).attend(q / np.float32(1e6) * np.float32(size), 199, softcap=30.0)
        assert np.all(np.abs(got.m) < 1e-20) and np.allclose(got.l, 200, rtol=1e-2), size


@by_kv_dtype
@by_isa
def test_slopes(isa: str, kv_dtype: str) -> None:
    for shape in SHAPES:
        check(isa, kv_dtype, shape, slopes=np.float32(2) ** -np.arange(1, shape.group + 1, dtype=np.float32))


@by_isa
def test_slopes_with_queries_of_zero(isa: str) -> None:
    """The weights of tiny queries are those of the distances alone."""
    v = normal(np.random.default_rng(2), 150, 64)
    slopes = np.array([0.5, 0.01], np.float32)
    for kv_dtype in KV_DTYPES:
        for size in (0.0, 1e-40, 1e-30, 1e-21):
            q = np.full((1, 2, 64), size, np.float32)
            got = Cache(isa, kv_dtype, v, v).attend(q, 149, slopes=slopes[None])
            want = reference(q, *stored_kv(v, v, kv_dtype), 149, slopes=slopes)
            assert_close(got, want, v, kv_dtype, budget(isa, kv_dtype, 64, 2), (kv_dtype, size))


@pytest.mark.quick
@by_kv_dtype
@by_isa
def test_segments(isa: str, kv_dtype: str) -> None:
    for shape in SHAPES:
        for segment in (1, 50, PAGE_TOKENS, 1000):
            check(isa, kv_dtype, shape, segment=segment)


@by_kv_dtype
@by_isa
def test_a_segment_hides_what_lies_before_it(isa: str, kv_dtype: str) -> None:
    """Memory of earlier segments may hold anything."""
    rng = np.random.default_rng(3)
    k, v, q = normal(rng, 300, 64), normal(rng, 300, 64), queries(rng, 1, 4, 64)
    clean, dirty = (Cache(isa, kv_dtype, k, v) for _ in range(2))
    for page in dirty.order[:2]:
        dirty.chunks[page] = 0xFF
    for got, want in zip(dirty.attend(q, 299, segment=256), clean.attend(q, 299, segment=256), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.quick
@by_kv_dtype
@by_isa
def test_v_of_another_size(isa: str, kv_dtype: str) -> None:
    for head_size, v_size in [(192, 128), (24, 16), (64, 128), (40, 512), (512, 64)]:
        for group, q_len, length in [(1, 1, 130), (16, 1, 300), (3, 7, 200)]:
            check(isa, kv_dtype, Shape(head_size, v_size, group, q_len, length))


@pytest.mark.quick
@by_kv_dtype
@by_isa
def test_sinks_and_log_sum_exp_beside_o_rows(isa: str, kv_dtype: str) -> None:
    """O rows have one more weight in their denominator; m + log(l) is the log-sum-exp without it."""
    rng = np.random.default_rng(4)
    for heads, head_size, v_size, group, q_len, length in [(2, 64, 64, 8, 1, 300), (1, 128, 64, 3, 30, 200)]:
        q = queries(rng, heads * q_len, group, head_size).reshape(heads, q_len, group, head_size)
        k, v = normal(rng, heads, length, head_size), normal(rng, heads, length, v_size)
        caches = [Cache(isa, kv_dtype, *kv) for kv in zip(k, v, strict=True)]
        pages = np.stack([cache.chunks[cache.order] for cache in caches], axis=1)
        buffer = aligned_bytes(pages.size)
        buffer[:] = pages.ravel()
        sinks = normal(rng, heads, group) * np.float32(3)
        sinks[0, 0], sinks[-1, -1] = 200, -200  # the sink is all there is, and nothing
        shapes = (q.shape[:3], q.shape[:3], (*q.shape[:3], v_size), (*q.shape[:3], v_size))
        m, l, acc, o = (np.full(shape, np.nan, np.float32) for shape in shapes)
        common = (isa, kv_dtype, buffer, None, 0, q, length - q_len, 0, acc, m, l, o)
        kernels(isa).kv_attend(*common, sinks=sinks)
        allowed = budget(isa, kv_dtype, min(head_size, v_size), group * q_len)
        for h in range(heads):
            want = reference(q[h], *stored_kv(k[h], v[h], kv_dtype), length - q_len)
            total = want.l + np.exp(sinks[h].astype(np.float64) - want.m)
            assert np.abs(o[h] - want.acc / total[..., None]).max() <= allowed.output * unit(v[h], kv_dtype, allowed)
            lse = m[h] + np.log(l[h])
            np.testing.assert_allclose(lse, want.m + np.log(want.l), rtol=0, atol=allowed.l + allowed.m * 5)


@by_isa
def test_a_long_int8_row_of_largest_values_does_not_overflow(isa: str) -> None:
    """Every product of a head of 512 is as large as it can be."""
    k, v = np.ones((3, 512), np.float32), normal(np.random.default_rng(5), 3, 512)
    q = np.full((1, 9, 512), 0.25, np.float32)
    got = Cache(isa, "int8", k, v).attend(q, 2)
    np.testing.assert_allclose(got.m, 128, rtol=1e-2)
    np.testing.assert_allclose(got.l, 3, rtol=1e-2)


def test_bad_options_are_refused() -> None:
    chunk = aligned_bytes(kernel_calls.chunk_bytes("fp32", 8))
    q, state = np.zeros((1, 1, 2, 8), np.float32), np.zeros((1, 1, 2), np.float32)
    for options in (
        {"slopes": np.zeros((1, 3), np.float32)},
        {"slopes": np.zeros((2, 2), np.float32)},
        {"sinks": np.zeros(2, np.float32)},
        {"sinks": np.zeros((1, 2), np.float64)},
        {"segment": -1},
    ):
        with pytest.raises(ValueError):
            kernel_calls.kv_attend(
                "scalar", "fp32", chunk, None, 0, q, 0, 0, q.copy(), state.copy(), state.copy(), **options
            )
