from collections.abc import Buffer, Sequence

#: n_slots, max_rows, n_layers, n_q_heads, n_kv_heads, head_size, index of the activation dtype in ACT_DTYPES, v_size,
#: v_in_k, index_heads, index_size, index_topk
_Geometry = Sequence[int]

# fastdecode.region.contract says what each constant means.
PROTOCOL_VERSION: int
REGION_PAGE: int
PAGE_TOKENS: int
MAX_SLOTS: int
MAX_ROWS: int
MAX_LAYERS: int
MAX_HEADS: int
MAX_HEAD_SIZE: int
MAX_INDEX_TOPK: int
HEAD_SIZE_UNIT: int
MAX_PAGES: int
MAX_SEQS: int
MAX_SECTIONS: int
POISON: int
ROW_ATTEND: int
ROW_TRIM: int
ROW_SLIDE: int
ROW_PARTIAL: int
ARM_BYTES: int
ROW_BYTES: int
REPORT_BYTES: int
SLOT_BYTES: int
REQUEST_OFFSET: int
REPLY_OFFSET: int
ACT_DTYPES: tuple[str, ...]
KV_DTYPES: tuple[str, ...]
#: Name and byte offset of each field of fd_row_t; every field is a uint32.
ROW_FIELDS: tuple[tuple[str, int], ...]
#: Each constant of fd_status_t without its FD_.
STATUSES: dict[str, int]

def region_layout(geometry: _Geometry, /) -> tuple[int, int, int, int, int, int, int, int, int, int]:
    """The fields of RegionLayout, in order. Raises ValueError with a sentence if the geometry is not valid."""

def init_region_header(region: Buffer, geometry: _Geometry, /) -> None:
    """Write a region's header page."""

def check_region_header(region: Buffer, geometry: _Geometry, /) -> None:
    """Raise ValueError with a sentence unless the region was made for this geometry and protocol version."""
