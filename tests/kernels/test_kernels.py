"""The attention kernels of every ISA this machine has or emulates, against float64 on NumPy.

The error of an output is its largest difference, divided by the largest element that a weight multiplies.
"""
# ruff: noqa: E741 (m, l and acc are the names of attention.h and of the paper)

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from attention import kernel_calls
from attention.emulated import NEON, SCALAR, is_emulated, kernels, neighbours, params
from attention.kernel_budget import budget, unit
from attention.kernel_reference import Cache, Partial, aligned_bytes, assert_close, normal, queries, reference
from attention.kv_accuracy import INTEGERS, hadamard, stored, stored_kv
from quick import quick

from fastdecode.kernels import _native as native
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS
from fastdecode.transports.base import HadamardHeads

ISAS = native.isa_supported()

# The largest error of each cache format, against float64 over the values before they were stored (standard normal K
# and V, scores of about unit variance).
FORMAT_BUDGET = {"fp32": 2e-6, "fp16": 5e-4, "bf16": 4e-3, "int8": 2e-2, "int4": 0.5, "int8-int4": 0.15}

HEAD_SIZES = [8, 24, 64, 80, 128, 256, 512]
GROUPS = [1, 2, 3, 4, 5, 6, 7, 8, 16, 33]
LENGTHS = [1, 63, 65, 127, 128, 129, 300, 5000]
WINDOWS = [0, 1, 63, 127, 128, 129, 1000]
Q_LENS = [1, 2, 17, 64]
TIMES = 2  # that each value of an axis is drawn for a head size
LARGEST_CASE = 1 << 24  # multiply-adds of its scores
LARGEST_EMULATED_CASE = 1 << 20

by_isa = pytest.mark.parametrize("isa", params([*ISAS, NEON]))
by_kv_dtype = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


class Case(NamedTuple):
    head_size: int
    group: int
    length: int  # tokens cached, the query block's own included
    window: int
    q_len: int


def pick_cases(head_size: int) -> list[Case]:
    """Random cases of the full product, the same in every run, with every value of every axis in TIMES of them."""
    axes = {"group": GROUPS, "length": LENGTHS, "window": WINDOWS, "q_len": Q_LENS}
    product = [Case(head_size, *values) for values in itertools.product(*axes.values())]
    product = [c for c in product if head_size * c.group * c.length * c.q_len <= LARGEST_CASE]
    times: Counter[tuple[str, int]] = Counter()
    chosen = []
    for case in random.Random(head_size).sample(product, len(product)):
        values = [(axis, getattr(case, axis)) for axis in axes]
        if any(times[value] < TIMES for value in values):
            times.update(values)
            chosen.append(case)
    assert all(times[axis, value] >= TIMES for axis, values in axes.items() for value in values)
    return [case._replace(length=max(case.length, case.q_len)) for case in chosen]


@functools.lru_cache(maxsize=2 * len(HEAD_SIZES))
def many_rows(head_size: int, kv_dtype: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rows of K and V for all cases of a head size; with a format, their values in a cache, which stores each row by
    itself."""
    if kv_dtype:
        return stored_kv(*many_rows(head_size), kv_dtype)
    rng = np.random.default_rng(head_size)
    return normal(rng, 2 * max(LENGTHS), head_size), normal(rng, 2 * max(LENGTHS), head_size)


def make_inputs(case: Case, kv_dtype: str | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q, and K and V or, with a format, their values in a cache."""
    rng = np.random.default_rng(case)
    first = rng.integers(max(LENGTHS))
    k, v = (x[first : first + case.length] for x in many_rows(case.head_size, kv_dtype))
    return queries(rng, case.q_len, case.group, case.head_size), k, v


@functools.cache
def expected(case: Case, kv_dtype: str | None) -> Partial:
    """The reference over the cached values, or with None over the values before they were cached."""
    return reference(*make_inputs(case, kv_dtype), case.length - case.q_len, case.window)


@by_kv_dtype
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_are_those_of_the_isa_asked_for(isa: str, kv_dtype: str) -> None:
    assert kernel_calls.isa_of_kernels(isa, kv_dtype) == isa


@pytest.mark.quick
def test_isas_agree_with_the_operating_system() -> None:
    with open("/proc/cpuinfo") as f:
        flags = next((set(line.split(":")[1].split()) for line in f if line.startswith(("flags", "Features"))), set())
    avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    vnni = {*avx512, "avx512_vnni"}
    avx2 = {"avx2", "fma", "f16c"}
    needed = {"avx2": avx2, "avxvnni": {*avx2, "avx_vnni"}, "avx512": avx512, "avx512vnni": vnni}
    needed["avx512bf16"] = {*vnni, "avx512_bf16"}
    needed["amx"] = {*vnni, "avx512vbmi", "amx_tile", "amx_int8", "amx_bf16"}
    needed["neon"] = {"asimd"}
    assert ["scalar", *(isa for isa, wanted in needed.items() if wanted <= flags)] == ISAS
    assert native.isa_best() == ISAS[-1]


@pytest.mark.parametrize("kv_dtype", INTEGERS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_caller_may_transform_in_place_of_a_kernel(isa: str, kv_dtype: str) -> None:
    for head_size, of_caller in itertools.product(
        (80, 128), (HadamardHeads.QK, HadamardHeads.VO, HadamardHeads.QK | HadamardHeads.VO)
    ):
        q, k, v = make_inputs(Case(head_size, group=4, length=200, window=0, q_len=2))
        plain, plain_o = outputs(Cache(isa, kv_dtype, k, v), q)
        transforms_v = HadamardHeads.VO in of_caller and kv_dtype.endswith("int4")
        if HadamardHeads.QK in of_caller:
            q, k = (hadamard(x.reshape(-1, head_size)).reshape(x.shape) for x in (q, k))
        cache = Cache(isa, kv_dtype, k, hadamard(v) if transforms_v else v, hadamard=of_caller)
        got, o = outputs(cache, q, hadamard=int(of_caller))
        if transforms_v:
            assert np.abs(o - plain_o).max() > 0.1
            o, acc = (hadamard(x.reshape(-1, head_size)).reshape(x.shape) for x in (o, got.acc))
            got = got._replace(acc=acc)
        for ours, theirs in zip((*got, o), (*plain, plain_o), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-3 * np.abs(theirs).max())


def outputs(cache: Cache, q: np.ndarray, **options: int) -> tuple[Partial, np.ndarray]:
    """The partial result of queries behind 198 tokens, and their O rows."""
    o = np.empty((1, *q.shape), np.float32)
    cache.attend(q, 198, o=o, **options)
    return cache.attend(q, 198, **options), o[0]


@pytest.mark.parametrize("head_size", quick(HEAD_SIZES, 64))
@by_kv_dtype
@by_isa
def test_attention_equals_float64(isa: str, kv_dtype: str, head_size: int) -> None:
    for case in pick_cases(head_size):
        if is_emulated(isa) and head_size * case.group * case.length * case.q_len > LARGEST_EMULATED_CASE:
            continue
        q, k, v = make_inputs(case)
        got = Cache(isa, kv_dtype, k, v).attend(q, case.length - case.q_len, case.window)
        allowed = budget(isa, kv_dtype, head_size, case.group * case.q_len)
        assert_close(got, expected(case, kv_dtype), v, kv_dtype, allowed, case)
        error = np.abs(got.output - expected(case, None).output).max() / np.abs(v).max()
        assert error <= FORMAT_BUDGET[kv_dtype], f"{case}: {kv_dtype} costs {error:.2e}"


@pytest.mark.quick
@by_kv_dtype
@by_isa
def test_every_number_of_tokens_in_a_page(isa: str, kv_dtype: str) -> None:
    q, k, v, want = tokens_in_pages(kv_dtype)
    for n in range(1, 2 * PAGE_TOKENS + 1):
        got = Cache(isa, kv_dtype, k[:n], v[:n]).attend(q, n - 1)
        assert_close(got, want[n - 1], v, kv_dtype, budget(isa, kv_dtype), n)


@functools.cache
def tokens_in_pages(kv_dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Partial]]:
    """A query, K and V of two pages, and the references over their first 1, 2, ... tokens."""
    rng = np.random.default_rng(1)
    q, k, v = queries(rng, 1, 3, 24), normal(rng, 2 * PAGE_TOKENS, 24), normal(rng, 2 * PAGE_TOKENS, 24)
    seen_k, seen_v = stored_kv(k, v, kv_dtype)
    return q, k, v, [reference(q, seen_k[:n], seen_v[:n], n - 1) for n in range(1, 2 * PAGE_TOKENS + 1)]


@by_kv_dtype
@by_isa
def test_rows_that_see_none_of_the_chunks(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(2)
    k, v, q = normal(rng, 4 * PAGE_TOKENS, 64), normal(rng, 4 * PAGE_TOKENS, 64), queries(rng, 3, 5, 64)
    cache = Cache(isa, kv_dtype, k, v)
    for what, q_pos, window, pages in [
        ("the causal limit lies before the chunks", 2 * PAGE_TOKENS - 3, 0, slice(2, 4)),
        ("the window begins after the chunks", 4 * PAGE_TOKENS - 3, 100, slice(0, 2)),
        ("no chunks", 4 * PAGE_TOKENS - 3, 0, slice(2, 2)),
    ]:
        got = cache.attend(q, q_pos, window, pages)
        assert np.isneginf(got.m).all() and not got.l.any() and not got.acc.any(), what
    # Only the block's last row reaches into the pages.
    got = cache.attend(q, 2 * PAGE_TOKENS - 2, 0, slice(2, 4))
    seen = [x[2 * PAGE_TOKENS :] for x in stored_kv(k, v, kv_dtype)]
    want = reference(q, *seen, 2 * PAGE_TOKENS - 2, first=2 * PAGE_TOKENS)
    assert (want.l > 0).sum() == 5
    assert_close(got, want, v, kv_dtype, budget(isa, kv_dtype), "one row of three")


# What uninitialised memory may hold: NaN of fp32 and fp16; infinity of fp32; of fp16; a signalling NaN of fp32.
GARBAGE = {"ones": b"\xff" * 4, "inf32": b"\0\0\x80\x7f", "inf16": b"\0\x7c\0\x7c", "signalling": b"\1\0\xa0\xff"}


@pytest.mark.parametrize("garbage", GARBAGE)
@by_kv_dtype
@by_isa
def test_garbage_beyond_the_limits_never_reaches_a_result(isa: str, kv_dtype: str, garbage: str) -> None:
    rng = np.random.default_rng(3)
    pattern = np.frombuffer(GARBAGE[garbage], np.uint8)
    for head_size, group, q_len, length, window in [
        (8, 1, 1, 1, 0),
        (80, 1, 1, 100, 0),
        (128, 8, 1, 65, 0),
        (24, 3, 17, 200, 0),
        (64, 4, 1, 500, 70),
        (64, 2, 9, 500, 130),
    ]:
        q = queries(rng, q_len, group, head_size)
        k, v = normal(rng, length, head_size), normal(rng, length, head_size)
        clean, dirty = (Cache(isa, kv_dtype, k, v, fill=0) for _ in range(2))
        run = np.resize(pattern, len(dirty.buffer))
        dirty.buffer[:] = run
        run = aligned_bytes(len(run))
        run[:] = dirty.buffer
        kernels(isa).kv_append(isa, kv_dtype, run, 0, k, v)
        run = run.reshape(dirty.chunks.shape)
        q_pos = length - q_len
        no_longer_seen = max(0, q_pos + 1 - window) // PAGE_TOKENS if window else 0
        run[:no_longer_seen] = np.resize(pattern, run.shape[1])
        dirty.chunks[dirty.order] = run
        for got, want in zip(dirty.attend(q, q_pos, window), clean.attend(q, q_pos, window), strict=True):
            assert np.array_equal(got, want), (head_size, group, q_len, length, window)


@pytest.mark.quick
@by_kv_dtype
@pytest.mark.parametrize(("writer", "reader"), neighbours([*ISAS, NEON, SCALAR]))
def test_a_chunk_written_by_one_isa_is_read_by_another(writer: str, reader: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(4)
    for head_size in HEAD_SIZES:
        q = queries(rng, 1, 4, head_size)
        k, v = normal(rng, 100, head_size), normal(rng, 100, head_size)
        cache = Cache(writer, kv_dtype, k, v)
        assert np.array_equal(cache.buffer, Cache(reader, kv_dtype, k, v).buffer), head_size
        want = reference(q, *stored_kv(k, v, kv_dtype), 99)
        got = cache.attend(q, 99, isa=reader)
        assert_close(got, want, v, kv_dtype, budget(reader, kv_dtype), head_size)


@pytest.mark.parametrize("isa", params([*ISAS, NEON, SCALAR]))
def test_int8_rounds_a_product_before_it_rounds_to_an_integer(isa: str) -> None:
    """A fused multiply-add would round only once."""
    largest = np.float32(3.7)
    inverse = np.float32(127) / largest
    x = np.random.default_rng(12).uniform(-3.7, 3.7, 1 << 22).astype(np.float32)
    x = x[(x * inverse) % 1 == 0.5]
    rows = np.full((len(x) // 7, 8), largest)
    rows[:, 1:] = x[: len(rows) * 7].reshape(-1, 7)
    # Each query sees one token, whose V is the result.
    got = Cache(isa, "int8", rows, rows).attend(np.zeros((len(rows), 1, 8), np.float32), 0, window=1)
    assert np.allclose(got.acc[:, 0], stored(rows, "int8"), rtol=0, atol=largest / 127 / 100)


@by_kv_dtype
@by_isa
def test_appending_token_by_token_equals_appending_at_once(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(5)
    k, v = normal(rng, 150, 80), normal(rng, 150, 80)
    at_once, one_by_one = (aligned_bytes(3 * kernel_calls.chunk_bytes(kv_dtype, 80)) for _ in range(2))
    kernels(isa).kv_append(isa, kv_dtype, at_once, 0, k, v)
    for t in range(150):
        kernels(isa).kv_append(isa, kv_dtype, one_by_one, t, k[t : t + 1], v[t : t + 1])
    assert np.array_equal(at_once, one_by_one)


@pytest.mark.quick
@by_kv_dtype
@by_isa
def test_parts_merged_by_log_sum_exp_equal_the_whole(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(6)
    for head_size, group, q_len, window in [(64, 3, 1, 0), (24, 1, 5, 0), (128, 8, 2, 100), (8, 4, 64, 0)]:
        n, rows = 5 * PAGE_TOKENS + 7, q_len * group
        q = queries(rng, q_len, group, head_size)
        k, v = normal(rng, n, head_size), normal(rng, n, head_size)
        cache, q_pos = Cache(isa, kv_dtype, k, v), n - q_len
        m, l = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
        acc = np.full((rows, head_size), np.nan, np.float32)  # acc of empty rows must not be read
        for pages in (slice(0, 2), slice(2, 3), slice(3, 7)):
            part = cache.attend(q, q_pos, window, pages)
            kernels(isa).attend_merge(isa, m, l, acc, part.m.ravel(), part.l.ravel(), part.acc.reshape(rows, head_size))
        whole = Partial(m.reshape(q_len, group), l.reshape(q_len, group), acc.reshape(q.shape).copy())
        want = reference(q, *stored_kv(k, v, kv_dtype), q_pos, window)
        allowed = budget(isa, kv_dtype)
        assert_close(whole, want, v, kv_dtype, allowed, (head_size, group, q_len, window))
        o = np.empty_like(acc)
        kernels(isa).attend_finish(isa, o, acc, l, "fp32")
        assert np.allclose(o.reshape(q.shape), want.output, rtol=0, atol=unit(v, kv_dtype, allowed) * allowed.output)


def heads_side_by_side(
    rng: np.random.Generator, isa: str, kv_dtype: str, heads: int, length: int, head_size: int
) -> tuple[list[Cache], np.ndarray]:
    """KV heads with a cache each, and the same heads together in one run of pages."""
    caches = [
        Cache(isa, kv_dtype, normal(rng, length, head_size), normal(rng, length, head_size)) for _ in range(heads)
    ]
    pages = np.stack([cache.chunks[cache.order] for cache in caches], axis=1)
    buffer = aligned_bytes(pages.size)
    buffer[:] = pages.ravel()
    return caches, buffer


@pytest.mark.quick
@by_kv_dtype
@by_isa
def test_heads_attended_at_once_equal_each_alone(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(11)
    for heads, head_size, group, q_len, length, window in [
        (2, 64, 1, 1, 130, 0),
        (8, 128, 8, 1, 300, 0),
        (3, 80, 5, 4, 200, 70),
        (4, 24, 2, 3, 65, 0),
    ]:
        q = queries(rng, heads * q_len, group, head_size).reshape(heads, q_len, group, head_size)
        caches, buffer = heads_side_by_side(rng, isa, kv_dtype, heads, length, head_size)
        alone = [cache.attend(one, length - q_len, window) for cache, one in zip(caches, q, strict=True)]
        m, l, acc = (np.full(shape, np.nan, np.float32) for shape in (q.shape[:3], q.shape[:3], q.shape))
        kernels(isa).kv_attend(isa, kv_dtype, buffer, None, 0, q, length - q_len, window, acc, m, l)
        for got, want in zip((m, l, acc), zip(*alone, strict=True), strict=True):
            assert np.array_equal(got, np.stack(want)), (heads, head_size, group, q_len, length, window)


@by_kv_dtype
@by_isa
def test_output_written_directly_equals_finished_output(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(12)
    for heads, head_size, group, q_len, length, window in [
        (8, 128, 8, 1, 300, 0),
        (2, 80, 3, 4, 200, 70),
        (1, 24, 9, 30, 200, 0),  # more rows than a panel
    ]:
        q = queries(rng, heads * q_len, group, head_size).reshape(heads, q_len, group, head_size)
        _, buffer = heads_side_by_side(rng, isa, kv_dtype, heads, length, head_size)
        m, l, acc, o, want = (np.full(s, np.nan, np.float32) for s in (q.shape[:3], q.shape[:3], *[q.shape] * 3))
        common = (isa, kv_dtype, buffer, None, 0, q, length - q_len, window)
        kernels(isa).kv_attend(*common, acc, m, l)
        kernels(isa).attend_finish(isa, want, acc.reshape(-1, head_size), l.ravel(), "fp32")
        kernels(isa).kv_attend(*common, acc, m, l, o)
        assert np.array_equal(o, want), (heads, head_size, group, q_len, length, window)


@by_isa
def test_output_of_rows_that_see_nothing_is_zero(isa: str) -> None:
    q = np.ones((2, 1, 3, 24), np.float32)
    chunks = aligned_bytes(2 * kernel_calls.chunk_bytes("fp16", 24))
    m, l, acc, o = (np.full(s, np.nan, np.float32) for s in (q.shape[:3], q.shape[:3], q.shape, q.shape))
    kernels(isa).kv_attend(isa, "fp16", chunks, None, 5 * PAGE_TOKENS, q, 4 * PAGE_TOKENS, 0, acc, m, l, o)
    assert not o.any()
    kernels(isa).kv_attend(isa, "fp16", chunks, None, 5 * PAGE_TOKENS, q, 4 * PAGE_TOKENS, 0, acc, m, l)
    assert (m == -np.inf).all() and not l.any() and not acc.any()


@by_isa
def test_merge_of_parts_far_apart_and_of_empty_ones(isa: str) -> None:
    m, l = np.array([1e4, -1e4, -np.inf, 3], np.float32), np.array([2, 2, 0, 4], np.float32)
    m2, l2 = np.array([-1e4, 1e4, -np.inf, -np.inf], np.float32), np.array([5, 5, 0, 0], np.float32)
    acc, acc2 = np.full((4, 24), 6, np.float32), np.full((4, 24), 10, np.float32)
    acc[2] = acc2[3] = np.nan
    kernels(isa).attend_merge(isa, m, l, acc, m2, l2, acc2)
    assert m.tolist() == [1e4, 1e4, -np.inf, 3] and l.tolist() == [2, 5, 0, 4]
    assert [set(row) for row in acc[[0, 1, 3]].tolist()] == [{6}, {10}, {6}]


@by_kv_dtype
@by_isa
def test_scores_of_ten_thousand(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(7)
    # Integers, so that scores are exact in fp32; max |k| is 127, so that int8's scale is 1.
    q = rng.integers(-8, 9, (1, 4, 128)).astype(np.float32)
    k = rng.integers(-40, 41, (300, 128)).astype(np.float32)
    k[:, 0] = 127
    v = normal(rng, 300, 128)
    want, got = reference(q, *stored_kv(k, v, kv_dtype), 299), Cache(isa, kv_dtype, k, v).attend(q, 299)
    if kv_dtype in INTEGERS:  # scales make scores inexact, and a weight is off by the exponential of a score's error
        np.testing.assert_allclose(got.m, want.m, rtol=budget(isa, kv_dtype).m)
        assert np.isfinite(got.acc).all() and (got.l >= 1).all()
    else:
        assert_close(got, want, v, kv_dtype, budget(isa, kv_dtype), "both signs")
    k[:], q[:] = 0, 0  # all tokens are equal now, and constant once they are transformed
    k[..., 0] = 448
    q[..., 0] = [80, -80, 80, -80]
    got = Cache(isa, kv_dtype, k, v).attend(q, 299)
    want = reference(q, *stored_kv(k, v, kv_dtype), 299)
    assert np.abs(want.m).min() > 1e4 and got.l.tolist() == [[300] * 4]
    np.testing.assert_allclose(got.m, want.m, rtol=budget(isa, kv_dtype).m if kv_dtype in INTEGERS else 1e-6)
    allowed = budget(isa, kv_dtype)
    np.testing.assert_allclose(got.output, want.output, atol=allowed.output * unit(v, kv_dtype, allowed))


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-37, 1e-35, 1e-33, 1e-20])
@by_kv_dtype
@by_isa
def test_tiny_queries_weigh_all_tokens_equally(isa: str, kv_dtype: str, size: float) -> None:
    case = Case(head_size=32, group=4, length=3 * PAGE_TOKENS + 5, window=0, q_len=1)
    q, k, v = make_inputs(case)
    q = (q / np.abs(q).max() * size).astype(np.float32)
    got = Cache(isa, kv_dtype, k, v).attend(q, case.length - 1)
    want = reference(q, *stored_kv(k, v, kv_dtype), case.length - 1)
    assert_close(got, want, v, kv_dtype, budget(isa, kv_dtype, case.head_size, 4), size)


@by_kv_dtype
@by_isa
def test_zero_and_subnormal_rows(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(8)
    q, k, v = queries(rng, 1, 3, 80), normal(rng, 70, 80), normal(rng, 70, 80)
    k[::3], v[::4] = 0, 0
    k[1], v[1] = 1e-44, -1e-44  # subnormal in fp32: int8's 127 / max |x| would overflow
    k[2], v[2] = 3e-7, 3e-7  # subnormal in fp16
    got = Cache(isa, kv_dtype, k, v).attend(q, 69)
    k[1] = v[1] = 0
    want = reference(q, *stored_kv(k, v, kv_dtype), 69)
    assert_close(got, want, v, kv_dtype, budget(isa, kv_dtype), "")
    zeros = np.zeros((1, 80), np.float32)
    alone = Cache(isa, kv_dtype, zeros, zeros).attend(q, 0)
    assert not alone.m.any() and (alone.l == 1).all() and not alone.acc.any()


@by_isa
def test_fp16_saturates_what_it_cannot_hold(isa: str) -> None:
    huge = np.array([[1e6, -1e6, np.inf, -np.inf, 65504, 65519, 65520, -70000]], np.float32)
    held = [65504, -65504, 65504, -65504, 65504, 65504, 65504, -65504]
    zeros = np.zeros((1, 8), np.float32)
    assert Cache(isa, "fp16", zeros, huge).attend(np.ones((1, 1, 8), np.float32), 0).acc.tolist() == [[held]]
    assert Cache(isa, "fp16", huge, zeros).attend(np.eye(8, dtype=np.float32)[None], 0).m.tolist() == [held]


@by_isa
def test_weights_far_below_the_maximum_vanish(isa: str) -> None:
    k, v = np.zeros((PAGE_TOKENS + 1, 8), np.float32), np.ones((PAGE_TOKENS + 1, 8), np.float32)
    k[:, 0] = np.arange(PAGE_TOKENS + 1) * -110
    q = np.zeros((1, 1, 8), np.float32)
    q[..., 0] = 1
    got = Cache(isa, "fp32", k, v).attend(q, PAGE_TOKENS)
    assert got.l.item() == 1 and set(got.acc.ravel()) == {1}


@by_kv_dtype
@by_isa
def test_kernels_write_no_further_than_asked(isa: str, kv_dtype: str) -> None:
    rng = np.random.default_rng(10)
    for head_size, group in itertools.product([8, 24, 40, 256], [1, 3, 7, 9]):
        k, v, q = normal(rng, 3, head_size), normal(rng, 3, head_size), normal(rng, 1, group, head_size)
        chunk_bytes = kernel_calls.chunk_bytes(kv_dtype, head_size)
        memory = aligned_bytes(chunk_bytes + 64, 0xA5)
        kernels(isa).kv_append(isa, kv_dtype, memory[:chunk_bytes], PAGE_TOKENS - 3, k, v)
        assert (memory[chunk_bytes:] == 0xA5).all(), head_size
        acc, m, l = (np.full(n + 16, 7, np.float32) for n in (q.size, group, group))
        views = acc[: q.size].reshape(1, *q.shape), m[:group].reshape(1, 1, group), l[:group].reshape(1, 1, group)
        kernels(isa).kv_attend(isa, kv_dtype, memory[:chunk_bytes], None, 0, q[None], PAGE_TOKENS - 1, 3, *views)
        assert all((x[-16:] == 7).all() for x in (acc, m, l)), (head_size, group)


def test_chunk_bytes_are_the_formats_and_keep_alignment() -> None:
    for head_size in range(8, 513, 8):
        elements = 2 * PAGE_TOKENS * head_size
        sizes = [kernel_calls.chunk_bytes(kv_dtype, head_size) for kv_dtype in KV_DTYPES]
        affine = 2 * PAGE_TOKENS * 4
        wide, narrow, mixed = (n + affine for n in (elements, elements // 2, elements * 3 // 4))
        assert sizes == [4 * elements, 2 * elements, 2 * elements, wide, narrow, mixed]
        assert all(size % 64 == 0 for size in sizes)


@by_isa
def test_int8_int4_holds_k_as_int8_does_and_v_as_int4_does(isa: str) -> None:
    rng = np.random.default_rng(13)
    for head_size in HEAD_SIZES:
        k, v = normal(rng, PAGE_TOKENS, head_size), normal(rng, PAGE_TOKENS, head_size)
        chunks, k_bytes = {}, {"int8": PAGE_TOKENS * (head_size + 4), "int4": PAGE_TOKENS * (head_size // 2 + 4)}
        for kv_dtype in ("int8", "int4", "int8-int4"):
            chunks[kv_dtype] = aligned_bytes(kernel_calls.chunk_bytes(kv_dtype, head_size))
            kernels(isa).kv_append(isa, kv_dtype, chunks[kv_dtype], 0, k, v)
        want = np.concatenate([chunks["int8"][: k_bytes["int8"]], chunks["int4"][k_bytes["int4"] :]])
        assert np.array_equal(chunks["int8-int4"], want), head_size


def test_bad_arguments_are_refused() -> None:
    chunk = aligned_bytes(kernel_calls.chunk_bytes("fp32", 8))
    row, wide = np.zeros((1, 8), np.float32), np.zeros((2, 16), np.float32)
    q, state = np.zeros((1, 1, 1, 8), np.float32), np.zeros((1, 1, 1), np.float32)
    two_heads = aligned_bytes(2 * len(chunk))
    wide_block, wide_state = np.zeros((2, 33, 1, 8), np.float32), np.zeros((2, 33, 1), np.float32)  # over 64 rows
    read_only = chunk.view()
    read_only.flags.writeable = False

    def append(isa="scalar", kv_dtype="fp32", chunks=chunk, slot=0, k=row, v=row) -> None:
        kernel_calls.kv_append(isa, kv_dtype, chunks, slot, k, v)

    def attend(chunks=chunk, order=None, first=0, q=q, q_pos=0, acc=q, m=state, l=state, o=None) -> None:
        kernel_calls.kv_attend("scalar", "fp32", chunks, order, first, q, q_pos, 0, acc.copy(), m.copy(), l.copy(), o)

    append(slot=PAGE_TOKENS - 1)
    attend()
    for call, arguments in [
        (append, {"isa": "mmx"}),
        (append, {"kv_dtype": "no such format"}),
        (append, {"chunks": chunk[:-64]}),
        (append, {"chunks": aligned_bytes(len(chunk) + 64)[4 : len(chunk) + 4]}),
        (append, {"chunks": read_only}),
        (append, {"slot": PAGE_TOKENS}),
        (append, {"slot": -1}),
        (append, {"slot": 1 << 32}),
        (append, {"k": wide}),
        (append, {"k": row.astype(np.float64)}),
        (append, {"k": row[0], "v": row[0]}),
        (append, {"k": wide[:, :8], "v": wide[:, 8:]}),
        (append, {"k": wide[:, :12].copy(), "v": wide[:, :12].copy()}),
        (attend, {"chunks": chunk[:-64]}),
        (attend, {"order": [1]}),
        (attend, {"order": [-1]}),
        (attend, {"first": 1}),
        (attend, {"q": q[0]}),
        (attend, {"q": np.zeros((1, 1, 2, 8), np.float32)}),
        (attend, {"q": q[:, :0], "acc": q[:, :0], "m": state[:, :0], "l": state[:, :0]}),
        (attend, {"q": q[:0], "acc": q[:0], "m": state[:0], "l": state[:0]}),
        (attend, {"m": np.zeros((1, 1, 2), np.float32)}),
        (attend, {"l": np.zeros((1, 2, 1), np.float32)}),
        (attend, {"acc": np.zeros((1, 1, 1, 16), np.float32)}),
        (attend, {"chunks": two_heads, "q": wide_block, "acc": wide_block, "m": wide_state, "l": wide_state}),
        (attend, {"q_pos": -1}),
        (attend, {"o": np.zeros((1, 1, 2, 8), np.float32)}),
        (attend, {"o": q.astype(np.float64)}),
    ]:
        with pytest.raises(ValueError):
            call(**arguments)
    for head_size in (0, 4, 12, 584, 1 << 31):
        with pytest.raises(ValueError, match="head size"):
            kernel_calls.chunk_bytes("fp16", head_size)
