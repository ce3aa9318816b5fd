"""How far the result of an attention kernel may be from float64 over the same cached values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attention.emulated import SCALAR
from attention.kv_accuracy import INTEGERS, multiplied


class Budget(NamedTuple):
    """The largest errors of a kernel, against float64 over the cached values."""

    output: float  # relative to the largest element that a weight multiplies (`unit`)
    l: float  # noqa: E741 (its name in attention.h and in the paper); relative
    m: float  # relative to 1 + |m|


FLOATS = Budget(2e-6, 5e-6, 5e-6)  # fp32 arithmetic, the polynomial exp
INT16 = Budget(2e-4, 5e-4, 2e-4)  # queries and weights rounded to 16 bits
INT8 = Budget(1.5e-2, 5e-2, 3e-2)  # to 8 bits
INT7 = INT8._replace(output=3e-2)  # weights to 7 bits, which are AVX2's for int4
BF16 = Budget(4e-3, 2e-2, 1e-2)  # to bf16


def budget(isa: str, kv_dtype: str, head_size: int = 8, rows: int = 1) -> Budget:
    if kv_dtype == "bf16" and isa in ("avx512bf16", "amx"):
        return BF16 if isa == "avx512bf16" else INT16  # queries and weights as two bf16 each
    if isa in ("scalar", SCALAR) or kv_dtype not in INTEGERS:
        return FLOATS
    tiles = isa == "amx" and head_size % 64 == 0 and rows > 8  # the rest is left to VNNI
    int8 = isa in ("avx2", "avxvnni", "avx512vnni", "avx512bf16", "amx") and not tiles
    if isa == "avx2" and kv_dtype != "int8":
        return INT7
    return INT8 if int8 else INT16


def unit(v: np.ndarray, kv_dtype: str, allowed: Budget) -> float:
    """The largest element that a weight multiplies, and so the unit of an error of O after v [tokens, head_size] was
    appended. Without int4 that is the largest |V|. Weights multiply an int4 row's codes, or with 16 bits its stored
    integers, which are 8 more; the transform back collects the mean of n of them, sqrt(n) times, in one element."""
    rows = v[:512] if kv_dtype.endswith("int4") else v  # 512 random rows say it, and take less time
    return float(np.abs(multiplied(rows, kv_dtype, 8 if allowed is INT16 else 0)).max())
