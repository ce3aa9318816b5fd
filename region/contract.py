"""The constants of region.h and formats.h. C holds the only copy; this module reads them from the extension."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

try:
    from . import _native
except ImportError as error:
    message = f"{error}. In a checkout: python setup.py build_ext --inplace builds the C beside the sources"
    raise ImportError(message) from None

#: Version of the region's layout, the control messages and the hand-shake together. Both ends must have the same one.
PROTOCOL_VERSION = _native.PROTOCOL_VERSION

#: Tokens of a KV page.
PAGE_TOKENS = _native.PAGE_TOKENS
#: Names of the activation dtypes; the index is the number that goes over the wire (fd_act_dtype_t).
ACT_DTYPES = _native.ACT_DTYPES
#: Names of the KV-cache dtypes; the index is the number that C uses (fd_kv_dtype_t). "int8-int4": K in int8, V in int4.
KV_DTYPES = _native.KV_DTYPES

#: Limits of a geometry. A head size is a multiple of HEAD_SIZE_UNIT.
MAX_SLOTS = _native.MAX_SLOTS
MAX_ROWS = _native.MAX_ROWS
MAX_LAYERS = _native.MAX_LAYERS
MAX_HEADS = _native.MAX_HEADS
MAX_HEAD_SIZE = _native.MAX_HEAD_SIZE
MAX_INDEX_TOPK = _native.MAX_INDEX_TOPK
HEAD_SIZE_UNIT = _native.HEAD_SIZE_UNIT
#: Limits of a lease.
MAX_PAGES = _native.MAX_PAGES
MAX_SEQS = _native.MAX_SEQS
MAX_SECTIONS = _native.MAX_SECTIONS
#: Bytes of a region's header page; the parts of a slot are aligned to this size.
REGION_PAGE = _native.REGION_PAGE
#: Bytes of a step's header (fd_arm_t), a row table entry (fd_row_t), a report (fd_report_t) and a slot's head
#: (fd_slot_t).
ARM_BYTES = _native.ARM_BYTES
ROW_BYTES = _native.ROW_BYTES
REPORT_BYTES = _native.REPORT_BYTES
SLOT_BYTES = _native.SLOT_BYTES
#: Where the layer words are in a slot.
REQUEST_OFFSET = _native.REQUEST_OFFSET
REPLY_OFFSET = _native.REPLY_OFFSET

#: The layer word of a step that has failed.
POISON = _native.POISON
#: Flag of a row table entry: its rows attend. Without it their K and V are only appended.
ROW_ATTEND = _native.ROW_ATTEND
#: Flag of a row table entry: the sequence may have more than `pos` tokens, which the R-node drops first.
ROW_TRIM = _native.ROW_TRIM
#: Flag of a row table entry: the R-node gives back the pages that no row from `pos` on sees, and refuses earlier rows.
ROW_SLIDE = _native.ROW_SLIDE
#: Flag of a row table entry: its queries attend to the `pos` cached tokens alone, and nothing is appended. Each query
#: has two rows: its Q and O, then the log-sum-exp of its scores, fp32 [query heads], in the O row.
ROW_PARTIAL = _native.ROW_PARTIAL
#: One row table entry (fd_row_t).
ROW_DTYPE = np.dtype(
    {
        "names": [name for name, _ in _native.ROW_FIELDS],
        "formats": ["<u4"] * len(_native.ROW_FIELDS),
        "offsets": [offset for _, offset in _native.ROW_FIELDS],
        "itemsize": ROW_BYTES,
    }
)


def blocks_for(tokens: int) -> int:
    """The blocks, of PAGE_TOKENS tokens each, that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


class Status(IntEnum):
    """Outcome of a step or of a control request (fd_status_t)."""

    OK = _native.STATUSES["OK"]
    BAD_CALL = _native.STATUSES["BAD_CALL"]
    BAD_TABLE = _native.STATUSES["BAD_TABLE"]
    BAD_SEQUENCE = _native.STATUSES["BAD_SEQUENCE"]
    OUT_OF_PAGES = _native.STATUSES["OUT_OF_PAGES"]
    LINK_CLOSED = _native.STATUSES["LINK_CLOSED"]
    INTERNAL = _native.STATUSES["INTERNAL"]
