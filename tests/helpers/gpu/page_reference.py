"""PageKernels in float64 on the host: the same calls, over memory of this process.

Appends are those of the C code. Attention is computed from what the chunks stand for, by the layout that
kernels/attention/chunk.h describes. Every call runs at once, in whatever stream it is given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
import torch
from attention.kernel_reference import aligned_bytes, reference

from fastdecode.bench.attention_kernels import kv_append
from fastdecode.kernels.gpu.page_kernels import LayerPages, PagedLayer, PagedRows
from fastdecode.region.contract import PAGE_TOKENS

_LANES = 32
#: The bytes of a word of int8 that hold its four elements; the order is its own inverse.
_INT8_ORDER = [0, 2, 1, 3]
_ACT = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def hadamard_matrix(size: int) -> np.ndarray:
    """The transform of a head of `size` elements (kernels/cpu/hadamard.h); symmetric, its own inverse."""
    whole, at = np.zeros((size, size)), 0
    for block in (128, 64, 32, 16, 8):
        while size - at >= block:
            part = np.ones((1, 1))
            while len(part) < block:
                part = np.kron([[1, 1], [1, -1]], part)
            whole[at : at + block, at : at + block] = part / np.sqrt(block)
            at += block
    return whole


def stored(chunk: np.ndarray, kv_dtype: str, head_size: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V, float64 [PAGE_TOKENS, head_size], of a chunk; K of int8 is transformed."""
    int8 = kv_dtype == "int8"
    in_word = {"fp32": 1, "fp16": 1, "bf16": 2, "int8": 4}[kv_dtype]
    order = _INT8_ORDER if int8 else slice(None)
    numbers = chunk if int8 else torch.from_numpy(chunk.copy()).view(_ACT[kv_dtype]).double().numpy()
    depth = head_size // in_word + int8  # rows of a column of K
    k_words = numbers[: PAGE_TOKENS * depth * in_word].reshape(-1, depth, _LANES, in_word)
    k = k_words[:, : head_size // in_word, :, order].transpose(0, 2, 1, 3).reshape(PAGE_TOKENS, head_size)
    rest = numbers[PAGE_TOKENS * depth * in_word :]
    scales = [np.ones((PAGE_TOKENS, 1))] * 2
    if int8:
        raw = k_words[:, -1], rest[: PAGE_TOKENS * 4]
        scales = [x.copy().view(np.float32).astype(np.float64).reshape(PAGE_TOKENS, 1) for x in raw]
        rest = rest[PAGE_TOKENS * 4 :]
    v = np.empty((PAGE_TOKENS, head_size))
    for first in range(0, head_size, _LANES):
        wide = min(_LANES, head_size - first)
        column = rest[first * PAGE_TOKENS : (first + wide) * PAGE_TOKENS].reshape(-1, wide, in_word)[:, :, order]
        v[:, first : first + wide] = column.transpose(0, 2, 1).reshape(PAGE_TOKENS, wide)
    zero = 128.0 if int8 else 0.0
    return (k - zero) * scales[0], (v - zero) * scales[1]


class ReferencePageKernels:
    """PageKernels. `host` translates the addresses of a device to this process's."""

    def __init__(self, layer: PagedLayer, host: Callable[[int], int] = int):
        self.layer, self._host = layer, host
        self._act = _ACT[layer.act_dtype]
        #: The answers of the last `attend` if each V were its absolute value, float64 [rows][n_q_heads * head_size].
        self.sizes = np.empty((0, 0))
        transforms = layer.kv_dtype == "int8" and not layer.hadamard
        self._transform = hadamard_matrix(layer.head_size) if transforms else np.eye(layer.head_size)

    def splits(self, rows: PagedRows, tokens: int) -> int:
        return 1

    def n_counters(self, rows: PagedRows) -> int:
        return 0

    def scratch_bytes(self, rows: PagedRows, splits: int) -> int:
        return 0

    def append(self, stream: int, kv: int, kv_stride: int, rows: PagedRows, pages: LayerPages) -> None:
        c = self.layer
        heads = 2, c.n_kv_heads, c.head_size
        kinds = groupby(self._rows(rows, 1), lambda row: (row[1][0], row[1][1] // PAGE_TOKENS, row[0] - row[1][1]))
        for (sequence, block, _), group in kinds:  # neighbours in a block
            first, (_, position, _, _) = (members := [*group])[0]
            n = len(members)
            x = [self._act_row(kv, kv_stride, row, 2 * c.n_kv_heads * c.head_size) for row in range(first, first + n)]
            k, v = torch.stack(x).float().view(n, *heads).permute(1, 2, 0, 3).contiguous().numpy()
            for head in range(c.n_kv_heads):
                chunk = self._chunk(pages, sequence, block, head)
                copy = aligned_bytes(c.chunk_bytes)  # the C code wants 64-byte boundaries
                copy[:] = chunk
                kv_append("scalar", c.kv_dtype, copy, position % PAGE_TOKENS, k[head], v[head], int(c.hadamard))
                chunk[:] = copy

    def attend(
        self,
        stream: int,
        q: int,
        q_stride: int,
        o: int,
        o_stride: int,
        rows: PagedRows,
        pages: LayerPages,
        scratch: int,
        splits: int,
        lse: int = 0,
        sinks: int = 0,
        slopes: int = 0,
    ) -> None:
        c = self.layer
        sizes = np.zeros((rows.max_attending, c.n_q_heads, c.head_size))
        distances = self._array(slopes, np.float32, 0, c.n_q_heads).reshape(c.n_kv_heads, -1) if slopes else None
        for row, (sequence, position, _, first) in self._rows(rows, 0):
            queries = self._act_row(q, q_stride, row, c.n_q_heads * c.head_size).double().numpy()
            queries = queries.reshape(c.n_kv_heads, 1, c.group, c.head_size) @ self._transform * c.softmax_scale
            out, sums = np.zeros((c.n_q_heads, c.head_size)), np.full(c.n_q_heads, -np.inf)
            begin = max(first, position - c.window + 1 if c.window else 0)
            blocks = range(begin // PAGE_TOKENS, position // PAGE_TOKENS + 1)
            for head in range(c.n_kv_heads if begin <= position else 0):
                parts = [stored(self._chunk(pages, sequence, b, head), c.kv_dtype, c.head_size) for b in blocks]
                cut = slice(begin - blocks[0] * PAGE_TOKENS, position + 1 - blocks[0] * PAGE_TOKENS)
                k, v = (np.concatenate(x)[cut] for x in zip(*parts, strict=True))
                slope = None if distances is None else distances[head]
                values = np.concatenate([v, abs(v)], axis=1)
                part = reference(queries[head], k, values, position, 0, begin, c.segment, c.softcap, slope)
                its = slice(head * c.group, (head + 1) * c.group)
                sums[its] = part.m[0] + np.log(part.l[0])
                out[its], sizes[row, its] = np.split(part.output[0], 2, axis=1)
            if lse:
                self._array(lse, np.float32, row * c.n_q_heads, c.n_q_heads)[:] = sums
            elif sinks:
                out /= 1 + np.exp(self._array(sinks, np.float32, 0, c.n_q_heads) - sums)[:, None]
            self._act_row(o, o_stride, row, out.size)[:] = torch.from_numpy(out.ravel()).to(self._act)
        self.sizes = sizes.reshape(len(sizes), -1)  # at the end: two streams may attend at once

    def merge(self, stream: int, o: int, o_stride: int, lse: int, others: int, rows: PagedRows, sinks: int = 0) -> None:
        c = self.layer
        n = c.n_q_heads * c.head_size
        for row, _ in self._rows(rows, 0):
            mine = self._act_row(o, o_stride, row, n)
            answers = [mine.double().numpy()]
            sums = [self._array(lse, np.float32, row * c.n_q_heads, c.n_q_heads)]
            if other := int(self._array(others, np.uint64, row, 1)[0]):
                answers.append(self._act_row(other, 0, 0, n).double().numpy())
                sums.append(self._array(other + o_stride * self._act.itemsize, np.float32, 0, c.n_q_heads))
            if sinks and any(np.isfinite(x).any() for x in sums):
                answers.append(np.zeros(n))
                sums.append(self._array(sinks, np.float32, 0, c.n_q_heads))
            logs = np.stack(sums).astype(np.float64)
            most = logs.max(axis=0)
            weights = np.exp(logs - np.where(np.isfinite(most), most, 0))
            weights /= np.maximum(weights.sum(axis=0), 1e-300)
            heads = np.stack(answers).reshape(len(answers), c.n_q_heads, -1)
            merged = np.einsum("ph,phd->hd", weights, heads)
            mine[:] = torch.from_numpy(merged.ravel()).to(self._act)

    # -- memory ----------------------------------------------------------------------------------------------------

    def _array(self, address: int, dtype: Any, start: int, n: int) -> np.ndarray:
        itemsize = np.dtype(dtype).itemsize
        memory = (ctypes.c_uint8 * (n * itemsize)).from_address(self._host(address) + start * itemsize)
        return np.frombuffer(memory, dtype)

    def _act_row(self, address: int, stride: int, row: int, n: int) -> torch.Tensor:
        """The first `n` elements of a row, in place."""
        size = self._act.itemsize
        return torch.from_numpy(self._array(address, np.uint8, row * stride * size, n * size)).view(self._act)

    def _rows(self, rows: PagedRows, kind: int) -> Iterator[tuple[int, list[int]]]:
        """Attending rows (kind 0), or all (1)."""
        n = int(self._array(rows.counts, np.uint32, kind, 1)[0])
        assert n <= (rows.max_rows if kind else rows.max_attending)
        return enumerate(self._array(rows.rows, np.int32, 0, 4 * n).reshape(n, 4).tolist())

    def _chunk(self, pages: LayerPages, sequence: int, block: int, head: int) -> np.ndarray:
        assert 0 <= block < pages.table_blocks
        page = int(self._array(pages.table, np.int32, sequence * pages.table_blocks + block, 1)[0])
        assert page >= 0
        size = self.layer.chunk_bytes
        return self._array(pages.chunks + page * pages.page_bytes + head * size, np.uint8, 0, size)
