"""The attention kernels of this machine: those of bench/attention_kernels.py, and the operations of fd_vec_ops_t."""
# ruff: noqa: E741 (m, l and acc are the names of attention.h and of the paper)

from __future__ import annotations

from ctypes import CFUNCTYPE, POINTER, Structure, c_float, c_int, c_size_t, c_uint32, c_void_p

import numpy as np

from fastdecode.bench.attention_kernels import (
    Attend,
    address,
    check,
    chunk_addresses,
    chunk_bytes,
    isa_number,
    kv_append,
    kv_attend,
    kv_ops,
    library,
)
from fastdecode.region.contract import ACT_DTYPES, KV_DTYPES, PAGE_TOKENS

__all__ = [
    "attend_finish",
    "attend_merge",
    "chunk_bytes",
    "gather_k",
    "index_scores",
    "isa_of_kernels",
    "kv_append",
    "kv_attend",
    "load_act",
    "select_top",
]

_ACT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


class _VecOps(Structure):
    """fd_vec_ops_t."""

    _fields_ = [
        ("load_act", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t, c_uint32, c_float)),
        ("merge", CFUNCTYPE(None, *[c_void_p] * 6, c_uint32, c_uint32)),
        ("finish", CFUNCTYPE(None, *[c_void_p] * 3, c_uint32, c_uint32, c_uint32)),
    ]


library.fd_vec_ops.restype = POINTER(_VecOps)
library.fd_select_top.argtypes = [c_void_p, c_uint32, c_uint32, c_void_p]
library.fd_gather_k.argtypes = [c_int, c_uint32, c_void_p, c_void_p, c_uint32, c_void_p]


def _vec_ops(isa: str) -> _VecOps:
    return library.fd_vec_ops(isa_number(isa)).contents


def _act_address(x: np.ndarray, n: int, act_dtype: str) -> int:
    """The address of `n` elements of an activation dtype, as untyped bytes."""
    check(x.flags.c_contiguous and x.nbytes == n * _ACT_BYTES[act_dtype], f"its length is not {n} of {act_dtype}")
    return x.ctypes.data


def isa_of_kernels(isa: str, kv_dtype: str) -> str:
    """The ISA that the kernels chosen for `isa` and `kv_dtype` name."""
    return kv_ops(isa, kv_dtype).isa.decode()


def attend_merge(
    isa: str, m: np.ndarray, l: np.ndarray, acc: np.ndarray, m2: np.ndarray, l2: np.ndarray, acc2: np.ndarray
) -> None:
    """Merge the partial results (m2, l2, acc2) into (m, l, acc) by log-sum-exp: m, l [rows], acc [rows, head_size]."""
    rows, head_size = acc.shape
    into = [address(x, (rows,), written=True) for x in (m, l)] + [address(acc, acc.shape, written=True)]
    read = [address(x, (rows,)) for x in (m2, l2)] + [address(acc2, acc.shape)]
    _vec_ops(isa).merge(*into, *read, rows, head_size)


def attend_finish(isa: str, o: np.ndarray, acc: np.ndarray, l: np.ndarray, act_dtype: str) -> None:
    """Write acc [rows, head_size] / l [rows] to `o`, as elements of `act_dtype`; 0 where l is 0."""
    to, read = _act_address(o, acc.size, act_dtype), (address(acc, acc.shape), address(l, (len(acc),)))
    _vec_ops(isa).finish(to, *read, *acc.shape, ACT_DTYPES.index(act_dtype))


def load_act(isa: str, dst: np.ndarray, src: np.ndarray, act_dtype: str, scale: float) -> None:
    """Write `scale` times the elements of `src`, which are of `act_dtype`, to dst [n]."""
    to, read = address(dst, (dst.size,), written=True), _act_address(src, dst.size, act_dtype)
    _vec_ops(isa).load_act(to, read, dst.size, ACT_DTYPES.index(act_dtype), scale)


def index_scores(
    isa: str, kv_dtype: str, chunks: np.ndarray, q: np.ndarray, weights: np.ndarray, scores: np.ndarray
) -> None:
    """Write the index score of each token of the consecutive `chunks`, which have the index keys as a K whose V is all
    of K, to `scores` [tokens]: the sum over heads of weights [heads] * max(0, q [heads, size] . key)."""
    (heads, size), n = q.shape, chunks.nbytes // chunk_bytes(kv_dtype, q.shape[1], None, True)
    pages = chunk_addresses(chunks, chunk_bytes(kv_dtype, size, None, True))
    call = Attend(pages.ctypes.data, n, 1, 0, 0, size, size, 1, heads, 1)
    call.softmax_scale, call.q = 1.0, address(q, q.shape)
    call.index_weights = address(weights, (heads,))
    call.index_scores = address(scores, (n * PAGE_TOKENS,), written=True)
    kv_ops(isa, kv_dtype).attend(call)


def select_top(scores: np.ndarray, k: int) -> np.ndarray:
    """The indexes of the k largest of the fp32 `scores` [n], uint32 [k] in ascending order (fd_select_top)."""
    check(0 <= k <= len(scores), "more scores are to be selected than there are")
    which = np.empty(k, np.uint32)
    library.fd_select_top(address(scores, scores.shape), len(scores), k, which.ctypes.data)
    return which


def gather_k(kv_dtype: str, head_size: int, chunks: np.ndarray, tokens: np.ndarray, to: np.ndarray) -> None:
    """Copy K of the `tokens`, counted from the start of the first of the consecutive `chunks`, to the first tokens of
    the consecutive chunks `to` (fd_gather_k). V is the first elements of K."""
    size = chunk_bytes(kv_dtype, head_size, None, True)
    pages, tokens = chunk_addresses(chunks, size), np.ascontiguousarray(tokens, np.uint32)
    check(
        len(chunk_addresses(to, size)) * PAGE_TOKENS >= len(tokens) and to.flags.writeable,
        "too little room for the tokens",
    )
    check(not len(tokens) or tokens.max() < len(pages) * PAGE_TOKENS, "tokens beyond the last chunk")
    sources = pages[tokens // PAGE_TOKENS]
    dtype = KV_DTYPES.index(kv_dtype)
    library.fd_gather_k(dtype, head_size, sources.ctypes.data, tokens.ctypes.data, len(tokens), to.ctypes.data)
