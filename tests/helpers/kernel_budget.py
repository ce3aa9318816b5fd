"""How far the result of an attention kernel may be from float64 over the same cached values."""

from __future__ import annotations

from typing import NamedTuple

from emulated import SCALAR

INTEGERS = ("int8", "int4", "int8-int4")


class Budget(NamedTuple):
    """The largest errors of a kernel, against float64 over the cached values."""

    output: float  # relative to the largest |V|
    l: float  # noqa: E741 (its name in attention.h and in the paper); relative
    m: float  # relative to 1 + |m|


FLOATS = Budget(2e-6, 5e-6, 5e-6)  # fp32 arithmetic, the polynomial exp
INT16 = Budget(2e-4, 5e-4, 2e-4)  # queries and weights rounded to 16 bits
INT8 = Budget(1.5e-2, 5e-2, 3e-2)  # to 8 bits
BF16 = Budget(4e-3, 2e-2, 1e-2)  # to bf16
# V of int4 is rotated: an error that all elements of a rotated row have in common is in one element of the row itself.
# The budgets of errors of O are three times as large.
INT16_ROTATED = INT16._replace(output=6e-4)
INT8_ROTATED = INT8._replace(output=4.5e-2)


def budget(isa: str, kv_dtype: str, head_size: int = 8, rows: int = 1) -> Budget:
    if kv_dtype == "bf16" and isa in ("avx512bf16", "amx"):
        return BF16 if isa == "avx512bf16" else INT16  # queries and weights as two bf16 each
    if isa in ("scalar", SCALAR) or kv_dtype not in INTEGERS:
        return FLOATS
    tiles = isa == "amx" and head_size % 64 == 0 and rows > 8  # the rest is left to VNNI
    int8 = isa in ("avx2", "avxvnni", "avx512vnni", "avx512bf16", "amx") and not tiles
    if kv_dtype == "int8":
        return INT8 if int8 else INT16
    return INT8_ROTATED if int8 else INT16_ROTATED
