"""Calls of the attention kernels (kernels/attention/attention.h) by ctypes, for measurements and tests.

A node attends through the R-engine alone. KV dtypes and ISAs are given by name. Arrays are C-contiguous and of float32,
chunks excepted. Each function raises ValueError, before anything is written, for an unknown name, an ISA that this
machine lacks, and arrays that do not fit. Other Python threads run meanwhile.
"""
# ruff: noqa: E741 (m, l and acc are the names of attention.h and of the paper)

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_float, c_size_t, c_uint32, c_void_p
from typing import Any

import numpy as np

from fastdecode.kernels import _native
from fastdecode.region.contract import HEAD_SIZE_UNIT, KV_DTYPES, MAX_HEAD_SIZE, PAGE_TOKENS


class Attend(Structure):
    """fd_attend_t."""

    _fields_ = [
        (name, kind)
        for kind, names in (
            (c_void_p, "chunks"),
            (c_uint32, "n_chunks heads"),
            (c_size_t, "head_stride"),
            (c_uint32, "first_token head_size v_size v_in_k group q_len q_pos window segment"),
            (c_float, "softmax_scale softcap"),
            (c_void_p, "slopes sinks"),
            (c_uint32, "hadamard act_dtype"),
            (c_void_p, "q"),
            (c_size_t, "q_head_stride q_token_stride"),
            (c_void_p, "o"),
            (c_size_t, "o_head_stride o_token_stride"),
            (c_void_p, "acc m l prefetch_next before_last_chunk context index_scores index_weights"),
        )
        for name in names.split()
    ]


class _KVOps(Structure):
    """fd_kv_ops_t."""

    _fields_ = [
        ("isa", c_char_p),
        ("append", CFUNCTYPE(None, c_void_p, c_uint32, c_uint32, c_uint32, c_void_p, c_void_p, c_uint32)),
        ("attend", CFUNCTYPE(None, POINTER(Attend))),
    ]


library = ctypes.CDLL(_native.__file__)
library.fd_kv_chunk_bytes.restype = c_size_t
library.fd_kv_chunk_bytes.argtypes = [ctypes.c_int, c_uint32, c_uint32, ctypes.c_bool]
library.fd_kv_ops.restype = POINTER(_KVOps)


def check(fits: bool, message: str) -> None:
    """Raise ValueError unless the arguments fit."""
    if not fits:
        raise ValueError(message)


@functools.cache  # cpuid traps in a virtual machine
def isa_number(name: str) -> int:
    """The fd_isa_t of an ISA that this machine has."""
    number = ctypes.c_int()
    check(name in _native.isa_supported(), f"ISA {name!r} is unknown or not supported by this CPU")
    library.fd_isa_from_name(name.encode(), ctypes.byref(number))
    return number.value


@functools.cache
def kv_ops(isa: str, kv_dtype: str) -> Any:
    """The fd_kv_ops_t."""
    return library.fd_kv_ops(KV_DTYPES.index(kv_dtype), isa_number(isa)).contents


def address(x: np.ndarray, shape: tuple[int, ...], *, written: bool = False) -> int:
    """The address of a float32 array of this shape."""
    check(x.dtype == np.float32 and x.shape == shape, f"shapes do not agree: {x.dtype} {x.shape}, not float32 {shape}")
    check(x.flags.c_contiguous and (x.flags.writeable or not written), "an array is not C-contiguous and writable")
    return x.ctypes.data


def chunk_bytes(kv_dtype: str, head_size: int, v_size: int | None = None, v_in_k: bool = False) -> int:
    """Bytes of a chunk: K and V of one page and KV head in one layer. `v_size` is that of V, by default `head_size`;
    `v_in_k`: V is a part of K (fd_kv_chunk_bytes)."""
    sizes = head_size, head_size if v_size is None else v_size
    fits = all(size in range(HEAD_SIZE_UNIT, MAX_HEAD_SIZE + 1, HEAD_SIZE_UNIT) for size in sizes)
    check(fits, f"head sizes {sizes} are not multiples of {HEAD_SIZE_UNIT} up to {MAX_HEAD_SIZE}")
    return int(library.fd_kv_chunk_bytes(KV_DTYPES.index(kv_dtype), *sizes, v_in_k))


def chunk_addresses(memory: np.ndarray, size: int) -> np.ndarray:
    """The addresses, uint64 [n], of the pages of `size` bytes in `memory`."""
    check(memory.flags.c_contiguous and memory.ctypes.data % 64 == 0, "chunks are not 64-byte aligned")
    check(memory.nbytes % size == 0, "the buffer of chunks does not end at the end of a chunk")
    return memory.ctypes.data + np.arange(0, memory.nbytes, size, dtype=np.uint64)


def kv_append(
    isa: str, kv_dtype: str, chunks: np.ndarray, first_slot: int, k: np.ndarray, v: np.ndarray | int, hadamard: int = 0
) -> None:
    """Append `k` [n, head_size] and `v` [n, v_size] to the consecutive `chunks` (bytes, 64-byte aligned). `v` is v_size
    if V is a part of K.

    Row i becomes token `first_slot` + i, counted from the start of the first chunk. `hadamard`: see fd_attend_t.
    """
    ops, (n, head_size) = kv_ops(isa, kv_dtype), k.shape
    v_in_k = isinstance(v, int)
    v_size = v if isinstance(v, int) else v.shape[-1]
    pages = chunk_addresses(chunks, chunk_bytes(kv_dtype, head_size, v_size, v_in_k)).tolist()
    k_at, v_at = address(k, (n, head_size)), None if isinstance(v, int) else address(v, (n, v_size))
    check(0 <= first_slot <= len(pages) * PAGE_TOKENS - n, "tokens before the first chunk or beyond the last")
    check(chunks.flags.writeable, "chunks are not writable")
    for i in range(n):
        page, slot = divmod(first_slot + i, PAGE_TOKENS)
        v_row = None if v_at is None else v_at + i * v_size * 4
        ops.append(pages[page], head_size, v_size, slot, k_at + i * k.strides[0], v_row, hadamard)


def kv_attend(
    isa: str,
    kv_dtype: str,
    chunks: np.ndarray,
    order: Sequence[int] | np.ndarray | None,
    first_token: int,
    q: np.ndarray,
    q_pos: int,
    window: int,
    acc: np.ndarray,
    m: np.ndarray,
    l: np.ndarray,
    o: np.ndarray | None = None,
    **options: float | np.ndarray | None,
) -> None:
    """Attend q [heads, q_len, group, head_size] to pages of `heads` chunks each (fd_attend_t).

    `order` holds the indexes in `chunks` of the pages to read, None: all of them in order. `first_token`, a multiple of
    PAGE_TOKENS, is the position of the first page's first token. Query token j is at position `q_pos` + j; `window` 0:
    it sees all positions before. The softmax scale is 1. `options`: the fields segment, softcap, hadamard, v_in_k, and
    slopes and sinks, both [heads, group].

    Writes the partial result: acc [heads, q_len, group, v_size], and m and l [heads, q_len, group]. With `o`, shaped as
    acc, it writes acc / l to `o`, and the contents of acc are undefined.
    """
    ops, (heads, q_len, group, head_size), v_size = kv_ops(isa, kv_dtype), q.shape, acc.shape[-1]
    rows, out = q_len * group, (heads, q_len, group, v_size)
    chunk = chunk_bytes(kv_dtype, head_size, v_size, bool(options.get("v_in_k")))
    check(heads == 1 <= rows or 1 <= heads * rows <= 64, "no query rows, or several heads with more than a panel's 64")
    check(first_token % PAGE_TOKENS == 0 and min(q_pos, window) >= 0, "no such page or position")
    pages = chunk_addresses(chunks, heads * chunk)
    if order is not None:
        indexes = np.asarray(order, np.int64)
        check(not len(indexes) or (indexes.min() >= 0 and indexes.max() < len(pages)), "order names no such page")
        pages = pages[indexes]
    call = Attend(pages.ctypes.data, len(pages), heads, chunk, first_token, head_size, v_size)
    call.group, call.q_len, call.q_pos, call.window, call.softmax_scale = group, q_len, q_pos, window, 1.0
    call.q, call.acc = address(q, q.shape), address(acc, out, written=True)
    call.m, call.l = (address(x, out[:3], written=True) for x in (m, l))
    call.q_head_stride, call.q_token_stride = q.strides[:2]
    call.o_head_stride, call.o_token_stride = acc.strides[:2]
    if o is not None:
        call.o = address(o, out, written=True)
    for name, value in options.items():
        number = address(value, (heads, group)) if isinstance(value, np.ndarray) else value
        check(number is None or number >= 0, f"{name} is negative")
        setattr(call, name, number)
    ops.attend(call)
