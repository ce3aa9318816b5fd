"""Trained sparse attention: index scores of every ISA and format against float64, the selection of tokens against
NumPy, and the K that is gathered against the K that was appended."""
# ruff: noqa: E741 (m, l and acc are the names of attention.h and of the paper)

from __future__ import annotations

import numpy as np
import pytest
from attention import kernel_calls as kernels
from attention.kernel_reference import Cache, aligned_bytes, normal, queries, reference
from quick import quick

from fastdecode.kernels import _native as native
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS

ISAS = native.isa_supported()
#: int8-int4 stores V in other bits than K.
DTYPES = [name for name in KV_DTYPES if name != "int8-int4"]
by_isa = pytest.mark.parametrize("isa", ISAS)
by_kv_dtype = pytest.mark.parametrize("kv_dtype", DTYPES)

#: The largest error of a score, in parts of the root of the sum of its heads' squared weights, where the elements of
#: queries and keys are normal and queries are divided by the root of their size.
ERRORS = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 5e-2, "int4": 5e-1}
SHAPES = [(1, 8), (2, 16), (5, 40), (32, 128), (64, 128), (70, 72)]


def index_scores(q: np.ndarray, weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """float64: q [heads, size], weights [heads], keys [tokens, size] -> [tokens]."""
    products = np.maximum(q.astype(np.float64) @ keys.astype(np.float64).T, 0)
    return weights.astype(np.float64) @ products


def append(isa: str, kv_dtype: str, k: np.ndarray) -> np.ndarray:
    """Chunks of K alone, which held NaN before, with a page more than the tokens need."""
    size = kernels.chunk_bytes(kv_dtype, k.shape[1], None, True)
    chunks = aligned_bytes((len(k) // PAGE_TOKENS + 2) * size)
    kernels.kv_append(isa, kv_dtype, chunks, 0, k, k.shape[1])
    return chunks


@pytest.mark.parametrize("shape", quick(SHAPES, (32, 128)))
@by_kv_dtype
@by_isa
def test_index_scores_equal_float64(isa: str, kv_dtype: str, shape: tuple[int, int]) -> None:
    rng, (heads, size) = np.random.default_rng(1), shape
    keys, q, weights = normal(rng, 300, size), queries(rng, 1, heads, size)[0], normal(rng, heads)
    chunks = append(isa, kv_dtype, keys)
    n_chunks = len(chunks) // kernels.chunk_bytes(kv_dtype, size, None, True)
    scores = np.full(n_chunks * PAGE_TOKENS, np.nan, np.float32)
    kernels.index_scores(isa, kv_dtype, chunks, q, weights, scores)
    error = np.abs(scores[: len(keys)] - index_scores(q, weights, keys)).max() / np.linalg.norm(weights)
    assert error <= ERRORS.get(kv_dtype, ERRORS["int4"])  # for a format that docs/adding-a-kv-format.md adds


@pytest.mark.parametrize("n", [1, 7, 128, 5000])
def test_the_largest_scores_are_selected(n: int) -> None:
    scores = normal(np.random.default_rng(n), n)
    for k in {0, 1, n // 3, n - 1, n}:
        assert kernels.select_top(scores, k).tolist() == sorted(np.argsort(-scores)[:k].tolist())


@pytest.mark.parametrize("values", [[0.0], [-1.0, 0.0, 2.0], [1.0, np.nextafter(np.float32(1), np.float32(2))]])
def test_of_equal_scores_the_first_are_selected(values: list[float]) -> None:
    scores = np.random.default_rng(2).choice(np.array(values, np.float32), 3000)
    for k in (1, 500, 1700, 2999):
        assert kernels.select_top(scores, k).tolist() == sorted(np.argsort(-scores, kind="stable")[:k].tolist())


def test_scores_that_are_no_numbers_select_tokens_too() -> None:
    scores = normal(np.random.default_rng(3), 1000)
    scores[::3], scores[1::7] = np.nan, np.inf
    for k in (1, 300, 600, 1000):
        which = kernels.select_top(scores, k)
        assert len(set(which.tolist())) == k and which.max() < 1000


@by_kv_dtype
@by_isa
def test_attention_to_gathered_tokens_equals_float64(isa: str, kv_dtype: str) -> None:
    """What was gathered is bit for bit what the same tokens leave that are appended side by side."""
    rng = np.random.default_rng(4)
    k, q = normal(rng, 1000, 72), queries(rng, 1, 9, 72)
    tokens = np.sort(rng.permutation(1000)[:200]).astype(np.uint32)
    chunks, size = append(isa, kv_dtype, k), kernels.chunk_bytes(kv_dtype, 72, None, True)
    gathered = aligned_bytes(2 * size)
    kernels.gather_k(kv_dtype, 72, chunks, tokens, gathered)
    acc, m, l = np.empty((1, 1, 9, 72), np.float32), np.empty((1, 1, 9), np.float32), np.empty((1, 1, 9), np.float32)
    kernels.kv_attend(isa, kv_dtype, gathered, None, 0, q[None], 199, 0, acc, m, l, v_in_k=1)
    same = Cache(isa, kv_dtype, k[tokens], 72).attend(q, 199)
    np.testing.assert_array_equal(acc[0], same.acc)
    want = reference(q, k[tokens], k[tokens], 199).output
    np.testing.assert_allclose(acc[0] / l[0][..., None], want, rtol=0, atol={"int4": 0.5}.get(kv_dtype, 0.05))
