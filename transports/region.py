"""The activation region as memory: made by the R side (or, over TCP, by each side for itself), mapped, described.

A region is an anonymous memfd. Nothing of it has a name, so nothing is left behind however its owners die; and its size
is sealed, so no peer can truncate it under the other's feet.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from . import _native
from .base import ACT_DTYPES, PROTOCOL_VERSION, Geometry, RegionLayout, TransportError

assert _native.PROTOCOL_VERSION == PROTOCOL_VERSION

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

#: No region is larger, whatever the peer asks for, and no slot of one: all rows of a call together, which an R-engine
#: serves before it looks at the next. Pages that no call uses are never committed.
MAX_REGION_BYTES = 16 << 30
MAX_SLOT_BYTES = 2 << 30


class GeometryError(TransportError):
    """A geometry that no region can have; the message says what is wrong with it."""


def geometry_tuple(geometry: Geometry) -> tuple[int, int, int, int, int, int, int]:
    """`geometry` as the C functions take it."""
    if geometry.act_dtype not in ACT_DTYPES:
        raise GeometryError(f"unknown activation dtype {geometry.act_dtype!r}, known are {', '.join(ACT_DTYPES)}")
    return (
        geometry.n_slots,
        geometry.max_rows,
        geometry.n_layers,
        geometry.n_q_heads,
        geometry.n_kv_heads,
        geometry.head_size,
        ACT_DTYPES.index(geometry.act_dtype),
    )


def region_layout(geometry: Geometry) -> RegionLayout:
    """The layout of region/region.h. Raises GeometryError."""
    try:
        layout = RegionLayout(*_native.region_layout(geometry_tuple(geometry)))
    except (ValueError, OverflowError) as error:
        raise GeometryError(f"{error} ({geometry})") from None
    for part, n, most in (
        ("a call", layout.slot_bytes, MAX_SLOT_BYTES),
        ("the region", layout.region_bytes, MAX_REGION_BYTES),
    ):
        if n > most:
            raise GeometryError(f"{part} would have {n} bytes, more than the {most} allowed ({geometry})")
    return layout


class Region:
    """One mapped region. `view` is all of it, writable bytes; `fd` is its memfd."""

    def __init__(self, fd: int, geometry: Geometry):
        """Map the memfd `fd`, which is owned from now on, also on failure. Raises TransportError, OSError."""
        self.fd = fd
        try:
            self.geometry = geometry
            self.layout = region_layout(geometry)
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise TransportError("the region's memory is not sealed against resizing")
            size = os.fstat(fd).st_size
            if size != self.layout.region_bytes:
                raise TransportError(f"the region has {size} bytes, this end expects {self.layout.region_bytes}")
            self._map = mmap.mmap(fd, size)
            self.view = memoryview(self._map)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def create(cls, geometry: Geometry) -> Region:
        """A fresh region, zero-filled but for its header. Raises GeometryError, OSError."""
        layout = region_layout(geometry)
        fd = os.memfd_create("fastdecode-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, layout.region_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
        region = cls(fd, geometry)
        _native.init_region_header(region.view, geometry_tuple(geometry))
        return region

    @classmethod
    def adopt(cls, fd: int, geometry: Geometry) -> Region:
        """Map the peer's region, handed over as a descriptor, once it is what it should be. Raises TransportError."""
        region = cls(fd, geometry)
        try:
            _native.check_region_header(region.view, geometry_tuple(geometry))
        except ValueError as error:
            region.close()
            raise TransportError(str(error)) from None
        return region

    def close(self) -> None:
        """Unmap, now or, while someone still holds a view of it, when the last view is gone. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass
