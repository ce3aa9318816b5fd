"""Error of attention over each KV-cache format against float64, for every instruction set of this machine.

The error of a row of O is |O - reference| / |reference|, with Euclidean norms over the head. "kernel" compares with
float64 attention over the values that the cache holds, so it is the error of the kernel's arithmetic alone. "whole"
compares with float64 attention over K and V before they were cached, so it is what a user loses. Q, K and V come from a
run of a model, all layers and heads, and from adversarial ranges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from attention import kernel_calls
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart import Model, SPart
from fastdecode.spart.exchange import SlotViews
from fastdecode.spart.step.batch import Chunk, StepBatch
from fastdecode.transports.base import Link

_ALIGNED = 64
#: KV formats that store integers.
INTEGERS = ("int8", "int4", "int8-int4")


@dataclass(frozen=True, slots=True)
class Case:
    """One KV head of one sequence, fp32.

    q is [rows, group, head_size], multiplied by the softmax scale; k and v are [tokens, head_size]. The rows of q are
    the last tokens. Each attends to itself and to the tokens before it, or to the last `window` of these if `window` is
    not 0.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    window: int = 0


@dataclass(slots=True)
class Error:
    """Relative errors of rows of O: pooled over all rows (root of summed squares), and of the worst row."""

    _error: float = 0.0
    _reference: float = 0.0
    worst: float = 0.0

    def add(self, got: np.ndarray, want: np.ndarray) -> None:
        """Count rows: `got` and `want` are [..., head_size]."""
        error, norm = np.linalg.norm(got - want, axis=-1), np.linalg.norm(want, axis=-1)
        self._error += float(np.square(error).sum())
        self._reference += float(np.square(norm).sum())
        with np.errstate(divide="ignore"):
            ratio = np.divide(error, norm, out=np.zeros_like(error), where=error > 0)  # 0 / 0 is no error
        self.worst = max(self.worst, float(ratio.max()))

    @property
    def pooled(self) -> float:
        if not self._error:
            return 0.0
        return math.sqrt(self._error / self._reference) if self._reference else math.inf


# ---- the reference ----


def stored_kv(k: np.ndarray, v: np.ndarray, kv_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The values of K and V, float64, that a cache holds after k and v [tokens, head_size] were appended."""
    k_format, _, v_format = kv_dtype.partition("-")
    v_format = v_format or k_format
    # The transform is its own inverse.
    stored_v = hadamard(stored(hadamard(v), v_format)) if v_format == "int4" else stored(v, v_format)
    if kv_dtype not in INTEGERS:
        return stored(k, k_format), stored_v
    return hadamard(stored(hadamard(k), k_format)), stored_v


def hadamard(x: np.ndarray) -> np.ndarray:
    """x [rows, head_size] transformed as kernels/cpu/hadamard.h defines it, in the arithmetic of its dtype."""
    result = x.copy()
    start = 0
    while start < x.shape[1]:
        size = min(128, 1 << (x.shape[1] - start).bit_length() - 1)
        block = result[:, start : start + size]
        half = 1
        while half < size:
            pairs = block.reshape(len(x), -1, 2, half)
            block = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
            half *= 2
        result[:, start : start + size] = block.reshape(len(x), size) * (x.dtype.type(1) / np.sqrt(x.dtype.type(size)))
        start += size
    return result


def stored(x: np.ndarray, kv_format: str) -> np.ndarray:
    """The values, float64, of x [tokens, head_size] stored in a format of K or V; computed from the format's
    definition."""
    if kv_format == "fp32":
        return x.astype(np.float64)
    if kv_format == "fp16":
        clipped: np.ndarray = np.clip(x, -65504, 65504)
        return clipped.astype(np.float16).astype(np.float64)
    if kv_format == "bf16":
        return _bf16(x).astype(np.float64)
    if kv_format == "int4":
        codes, step, centre = _int4(x)
        held: np.ndarray = codes * step + centre
        return held
    amax = np.abs(x).max(axis=1, keepdims=True)
    amax[amax < np.float32(1e-33)] = 0
    inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
    result: np.ndarray = np.rint(x * inverse).astype(np.float64) * (amax / np.float32(127)).astype(np.float64)
    return result


def _bf16(x: np.ndarray) -> np.ndarray:
    rounded: np.ndarray = torch.from_numpy(x).bfloat16().float().numpy()
    return rounded


def _int4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, step and centre, float64: kernels/attention/chunk.h, fd_int4_grid and fd_int4_fit."""
    low, high = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    centre = _bf16(high / 2 + low / 2 + (high - low) / np.float32(30))
    step = np.maximum((high - centre) / np.float32(7), (centre - low) / np.float32(8)) * np.float32(0.95)
    step[step < np.float32(1e-33)] = 0
    inverse = np.divide(np.float32(256), step, out=np.zeros_like(step), where=step > 0)
    fine = np.rint(np.clip((x - centre) * inverse, -4095, 4095)).astype(np.float64)
    codes = np.clip(np.rint(fine / 256), -8, 7)
    # Centre and scale by least squares.
    size, unit = x.shape[1], step.astype(np.float64) / 256
    n, nn, f, nf = (y.sum(axis=1, keepdims=True) for y in (codes, codes**2, fine, codes * fine))
    determinant = size * nn - n * n
    fits = (determinant > 0) & (step > 0)
    offset = np.divide(nn * f - n * nf, determinant, out=np.zeros_like(n), where=fits) * unit
    fitted = _bf16((centre + offset).astype(np.float32))
    moved = np.divide(fitted.astype(np.float64) - centre, unit, out=np.zeros_like(n), where=fits)
    scale = np.divide(nf - moved * n, nn, out=np.zeros_like(n), where=fits) * unit
    scale = _bf16(np.where(scale < 1e-33, 0, scale).astype(np.float32))
    return codes, scale.astype(np.float64), fitted.astype(np.float64)


def multiplied(v: np.ndarray, kv_dtype: str, zero_point: int = 0) -> np.ndarray:
    """What the softmax weights of a kernel multiply after v [tokens, head_size] was appended, float64: V, but for int4
    V less its centre and plus `zero_point` steps, which are added apart. The transform of V is undone."""
    if not kv_dtype.endswith("int4"):
        return v.astype(np.float64)
    codes, step, _ = _int4(hadamard(v))
    return hadamard((codes + zero_point) * step)


def reference(case: Case, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """O [rows, group, head_size] in float64, attending to k and v."""
    tokens, rows = len(k), len(case.q)
    limits = tokens - rows + np.arange(rows)[:, None]
    positions = np.arange(tokens)
    visible = positions <= limits
    if case.window:
        visible &= positions > limits - case.window
    scores = case.q.astype(np.float64) @ k.T.astype(np.float64)
    scores[~np.broadcast_to(visible[:, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    o: np.ndarray = weights @ v.astype(np.float64) / weights.sum(axis=2, keepdims=True)
    return o


# ---- the kernels ----


def attend(isa: str, kv_dtype: str, case: Case, q_len: int = 1) -> np.ndarray:
    """O [rows, group, head_size] as the kernels compute it, `q_len` rows a call."""
    tokens, head_size = case.k.shape
    chunk = kernel_calls.chunk_bytes(kv_dtype, head_size)
    n = -(-tokens // PAGE_TOKENS)
    memory = np.full(n * chunk + _ALIGNED, 0xFF, np.uint8)  # bytes that are not written read as NaN
    memory = memory[-memory.ctypes.data % _ALIGNED :][: n * chunk]
    kernel_calls.kv_append(isa, kv_dtype, memory, 0, case.k, case.v)
    acc, o = np.empty(case.q.shape, np.float32), np.empty(case.q.shape, np.float32)
    m, l = (np.empty(case.q.shape[:2], np.float32) for _ in range(2))  # noqa: E741
    for start in range(0, len(case.q), q_len):
        rows = slice(start, min(start + q_len, len(case.q)))
        out = acc[None, rows], m[None, rows], l[None, rows], o[None, rows]
        q_pos = tokens - len(case.q) + start
        kernel_calls.kv_attend(isa, kv_dtype, memory, None, 0, case.q[None, rows], q_pos, case.window, *out)
    return o


def errors(isas: list[str], kv_dtype: str, cases: list[Case], q_len: int = 1) -> dict[str, tuple[Error, Error]]:
    """The errors "kernel" and "whole" of each ISA."""
    result = {isa: (Error(), Error()) for isa in isas}
    for case in cases:
        exact = reference(case, case.k, case.v)
        cached = reference(case, *stored_kv(case.k, case.v, kv_dtype))
        for isa, (kernel, whole) in result.items():
            got = attend(isa, kv_dtype, case, q_len).astype(np.float64)
            kernel.add(got, cached)
            whole.add(got, exact)
    return result


# ---- the data ----


def captured(model: Model, link: Link, ids: np.ndarray) -> list[Case]:
    """Q, K and V of every layer, KV head and sequence, while each token of ids [sequences, length] is decoded over
    `link`.

    The link's lease must be unused and have room for all tokens. The link must have several slots: a step on
    links of one slot does not stop after each layer.
    """
    assert link.geometry.n_slots > 1
    spart, views = SPart(model, [link]), SlotViews(link, 0)
    g, (n, length) = link.geometry, ids.shape
    group = g.n_q_heads // g.n_kv_heads
    q = np.empty((g.n_layers, n, length, g.n_kv_heads, group, g.head_size), np.float32)
    kv = np.empty((g.n_layers, n, length, 2, g.n_kv_heads, g.head_size), np.float32)
    for pos in range(length):
        chunks = [Chunk(0, i, 1, pos, [int(ids[i, pos])], False, None) for i in range(n)]
        for layer, _ in enumerate(spart.step(StepBatch(0, chunks))):
            q[layer, :, pos] = views.q[:n].float().numpy().reshape(q.shape[1], *q.shape[3:])
            kv[layer, :, pos] = views.kv[:n].float().numpy().reshape(kv.shape[1], *kv.shape[3:])
    q *= np.float32(model.config.softmax_scale)
    every = np.ndindex(g.n_layers, n, g.n_kv_heads)
    copy = np.ascontiguousarray
    return [Case(copy(q[i, s, :, h]), copy(kv[i, s, :, 0, h]), copy(kv[i, s, :, 1, h])) for i, s, h in every]


def adversarial() -> dict[str, list[Case]]:
    """Ranges that are hard for a format or a kernel, by name: 64 rows of 4 heads of 128 over 300 tokens."""

    def normal(seed: int) -> Case:
        rng = np.random.default_rng(seed)
        q, k, v = (rng.standard_normal(s, np.float32) for s in ((64, 4, 128), (300, 128), (300, 128)))
        return Case(q * np.float32(128**-0.5), k, v)

    def changed(k: float = 1, v: float = 1, window: int = 0) -> list[Case]:
        case = normal(1)
        return [Case(case.q, case.k * np.float32(k), case.v * np.float32(v), window)]

    outliers, rows, constant = normal(2), normal(3), normal(4)
    outliers.k[:, [5, 77]] *= 20  # outlier channels, as K of real models has
    outliers.v[::17] *= 100  # outlier tokens
    rows.v[:] = rows.v[:, :1] * np.array([1, 100] * 64, np.float32)  # half of each row is small
    constant.k[:] = constant.k[:, :1]
    constant.v[:] = constant.v[:, :1]
    one = normal(5)
    return {
        "normal": [normal(0)],
        "outliers": [outliers],
        "uneven rows": [rows],
        "constant rows": [constant],
        "peaked": changed(k=8),
        "beyond fp16": changed(v=1e6),
        "huge": changed(v=1e30),
        "below fp16": changed(k=1e-6, v=1e-6),
        "subnormal": changed(k=1e-40, v=1e-40),
        "window of 1": changed(window=1),
        "window of 65": changed(window=65),
        "one token": [Case(one.q[:1], one.k[:1], one.v[:1])],
    }
