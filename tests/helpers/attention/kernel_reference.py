"""Attention in float64 on NumPy, and a KV-cache of one head as the kernels of any ISA write it."""
# ruff: noqa: E741 (m, l and acc are the names of attention.h and of the paper)

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np

from attention import kernel_calls
from attention.emulated import kernels
from attention.kernel_budget import Budget, unit
from fastdecode.region.contract import PAGE_TOKENS


def aligned_bytes(n: int, fill: int = 0xFF) -> np.ndarray:
    """n bytes at a 64-byte boundary, by default all ones: NaN in every float format."""
    buffer = np.full(n + 64, fill, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + n]


class Shape(NamedTuple):
    """One head's attention; `length` counts the query block's own tokens."""

    head_size: int
    v_size: int
    group: int
    q_len: int
    length: int
    window: int = 0


class Partial(NamedTuple):
    """Un-normalised results as attention.h defines them: m, l [q_len, group], acc [q_len, group, head_size]."""

    m: np.ndarray
    l: np.ndarray
    acc: np.ndarray

    @property
    def output(self) -> np.ndarray:
        return np.divide(self.acc, self.l[..., None], out=np.zeros_like(self.acc), where=self.l[..., None] > 0)


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q_pos: int,
    window: int = 0,
    first: int = 0,
    segment: int = 0,
    softcap: float = 0.0,
    slopes: np.ndarray | None = None,
) -> Partial:
    """Attention in float64 over tokens whose positions begin at `first`. `slopes` is [group]."""
    positions = first + np.arange(len(k))
    limits = q_pos + np.arange(len(q))[:, None]
    visible = positions <= limits
    if window:
        visible &= positions > limits - window
    if segment:
        visible &= positions // segment == limits // segment
    scores = (q.reshape(-1, q.shape[2]).astype(np.float64) @ k.T.astype(np.float64)).reshape(*q.shape[:2], len(k))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if slopes is not None:
        scores += slopes.astype(np.float64)[:, None] * (positions - limits)[:, None]
    scores[~np.broadcast_to(visible[:, None], scores.shape)] = -np.inf
    m = scores.max(axis=2, initial=-np.inf)
    p = np.exp(scores - np.where(np.isfinite(m), m, 0)[..., None])
    return Partial(m, p.sum(axis=2), p @ v.astype(np.float64))


class Cache:
    """One KV head of one sequence: chunks scattered over memory that held `fill` before, unused ones at the end."""

    def __init__(
        self, isa: str, kv_dtype: str, k: np.ndarray, v: np.ndarray | int, fill: int = 0xFF, hadamard: int = 0
    ) -> None:
        """`v` is v_size if V is a part of K."""
        self.v_in_k = isinstance(v, int)
        self.isa, self.kv_dtype, self.v_size = isa, kv_dtype, v if isinstance(v, int) else v.shape[1]
        n = len(k) // PAGE_TOKENS + 2
        chunk_bytes = kernel_calls.chunk_bytes(kv_dtype, k.shape[1], self.v_size, self.v_in_k)
        run = aligned_bytes(n * chunk_bytes, fill)
        kernels(isa).kv_append(isa, kv_dtype, run, 0, k, v, *([hadamard] if hadamard else []))
        self.order = random.Random(n).sample(range(n), n)
        self.buffer = aligned_bytes(n * chunk_bytes)
        self.chunks = self.buffer.reshape(n, chunk_bytes)
        self.chunks[self.order] = run.reshape(n, chunk_bytes)

    def attend(
        self,
        q: np.ndarray,
        q_pos: int,
        window: int = 0,
        pages: slice = slice(None),
        isa: str | None = None,
        **options: Any,
    ) -> Partial:
        """Attend q [q_len, group, head_size]; `options` are the keyword arguments of kv_attend, for this head alone."""
        first = pages.indices(len(self.order))[0] * PAGE_TOKENS
        shapes = (q.shape[:2], q.shape[:2], (*q.shape[:2], self.v_size))
        out = Partial(*(np.full(shape, np.nan, np.float32) for shape in shapes))
        order = self.order[pages]
        isa = isa or self.isa
        m, l, acc = (x[None] for x in out)  # one head
        common = (isa, self.kv_dtype, self.buffer, order, first, q[None], q_pos, window, acc, m, l)
        kernels(isa).kv_attend(*common, v_in_k=int(self.v_in_k), **options)
        return out


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def queries(rng: np.random.Generator, q_len: int, group: int, head_size: int) -> np.ndarray:
    """Normal queries, scaled by 1 / sqrt(head_size) as a kernel gets them."""
    return normal(rng, q_len, group, head_size) * np.float32(head_size**-0.5)


def assert_close(got: Partial, want: Partial, v: np.ndarray, kv_dtype: str, allowed: Budget, what: object) -> None:
    """m, l and acc / l are each within the budget for V [tokens, head_size] as it was appended. Rows that see no token
    are exactly as attention.h defines them."""
    seen = want.l > 0
    assert np.isneginf(got.m[~seen]).all() and not got.l[~seen].any() and not got.acc[~seen].any(), what
    m_error = (np.abs(got.m[seen] - want.m[seen]) / (1 + np.abs(want.m[seen]))).max(initial=0)
    assert m_error <= allowed.m, f"{what}: error of m {m_error:.2e}, over the budget {allowed.m:.0e}"
    l_wanted = want.l[seen] * np.exp(want.m[seen] - got.m[seen])  # l is relative to the kernel's own m
    assert np.all(np.abs(got.l[seen] - l_wanted) <= allowed.l * l_wanted), what
    error = np.abs(got.output - want.output).max() / unit(v, kv_dtype, allowed)
    assert error <= allowed.output, f"{what}: error {error:.2e}, over the budget {allowed.output:.0e}"
