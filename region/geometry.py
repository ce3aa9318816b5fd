"""The geometry of a link, and the layout of its region, which follows from the geometry."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from . import _native, wire
from .contract import ACT_DTYPES

#: Largest region and largest slot that this end creates, whatever the peer asks for. A slot holds all rows of one call,
#: and the R-engine serves a call as a whole before it takes the next. Memory that no call uses is never committed.
MAX_REGION_BYTES = 16 << 30
MAX_SLOT_BYTES = 2 << 30


class RegionError(Exception):
    """A region cannot be created or mapped; the message is a sentence for the user."""


class GeometryError(RegionError):
    """No region can have this geometry; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers from which a region's layout follows (fd_geometry_t).

    `max_rows` is the largest number of rows of one call. Heads of Q and K have `head_size` elements, heads of V and O
    `v_size`; 0 stands for `head_size`. `v_in_k`: V of a head is the first `v_size` elements of its K, as in latent
    attention, and a KV row has no V. A layer may have fewer or smaller heads (transports.base.LayerOptions).
    Layers that select `index_topk` tokens have indexers of `index_heads` heads of `index_size` elements; all three are
    0 in other models.
    """

    n_slots: wire.U32
    max_rows: wire.U32
    n_layers: wire.U32
    n_q_heads: wire.U32
    n_kv_heads: wire.U32
    head_size: wire.U32
    act_dtype: wire.ActDtype
    v_size: wire.U32 = 0
    v_in_k: bool = False
    index_heads: wire.U32 = 0
    index_size: wire.U32 = 0
    index_topk: wire.U32 = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_size", self.v_size or self.head_size)


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Byte offsets into a region (fd_layout_t). `table`, `q`, `kv` and `o` count from the start of a slot."""

    slot0: int
    slot_bytes: int
    region_bytes: int
    table: int
    q: int
    kv: int
    o: int
    q_row_bytes: int
    kv_row_bytes: int
    o_row_bytes: int

    def slot(self, i: int) -> int:
        """Offset of slot `i` from the start of the region."""
        return self.slot0 + i * self.slot_bytes


def geometry_tuple(geometry: Geometry) -> tuple[int, ...]:
    """`geometry` as the C functions take it: its fields as integers, in order. Raises GeometryError for an unknown
    activation dtype."""
    if geometry.act_dtype not in ACT_DTYPES:
        raise GeometryError(f"unknown activation dtype {geometry.act_dtype!r}, known are {', '.join(ACT_DTYPES)}")
    return tuple(ACT_DTYPES.index(field) if isinstance(field, str) else int(field) for field in astuple(geometry))


def region_layout(geometry: Geometry) -> RegionLayout:
    """The layout of a region with this geometry (fd_region_layout of region.h). Raises GeometryError."""
    try:
        layout = RegionLayout(*_native.region_layout(geometry_tuple(geometry)))
    except ValueError as error:
        raise GeometryError(f"{error} ({geometry})") from None
    for part, n, limit in (
        ("a call", layout.slot_bytes, MAX_SLOT_BYTES),
        ("the region", layout.region_bytes, MAX_REGION_BYTES),
    ):
        if n > limit:
            raise GeometryError(f"{part} would have {n} bytes, more than the {limit} allowed ({geometry})")
    return layout
