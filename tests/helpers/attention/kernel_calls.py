"""The attention kernels of this machine: those of bench/attention_kernels.py, and the operations of fd_vec_ops_t."""
# ruff: noqa: E741 (m, l and acc are the names of attention.h and of the paper)

from __future__ import annotations

from ctypes import CFUNCTYPE, POINTER, Structure, c_float, c_size_t, c_uint32, c_void_p

import numpy as np

from fastdecode.bench.attention_kernels import (
    address,
    check,
    chunk_bytes,
    isa_number,
    kv_append,
    kv_attend,
    kv_ops,
    library,
)
from fastdecode.region.contract import ACT_DTYPES

__all__ = ["attend_finish", "attend_merge", "chunk_bytes", "isa_of_kernels", "kv_append", "kv_attend", "load_act"]

_ACT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


class _VecOps(Structure):
    """fd_vec_ops_t."""

    _fields_ = [
        ("load_act", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t, c_uint32, c_float)),
        ("merge", CFUNCTYPE(None, *[c_void_p] * 6, c_uint32, c_uint32)),
        ("finish", CFUNCTYPE(None, *[c_void_p] * 3, c_uint32, c_uint32, c_uint32)),
    ]


library.fd_vec_ops.restype = POINTER(_VecOps)


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
