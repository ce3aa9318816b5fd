"""The activation region as memory: its layout, and how a process creates and maps one.

Over shared memory the R side creates the region and hands it to the S side; over TCP and RDMA each side creates its
own. A region is an anonymous memfd: it has no name in any file system, so nothing is left behind however its owners
die. Its size is sealed, so that a peer cannot truncate the file while the other side has it mapped.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from . import _native
from .base import ACT_DTYPES, PROTOCOL_VERSION, Geometry, RegionLayout, TransportError

assert _native.PROTOCOL_VERSION == PROTOCOL_VERSION

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

#: Largest region and largest slot that this end creates, whatever the peer asks for. A slot holds all rows of one call,
#: and the R-engine serves a call as a whole before it takes the next. Memory that no call uses is never committed.
MAX_REGION_BYTES = 16 << 30
MAX_SLOT_BYTES = 2 << 30


class GeometryError(TransportError):
    """No region can have this geometry; the message gives the reason."""


def geometry_tuple(geometry: Geometry) -> tuple[int, int, int, int, int, int, int]:
    """`geometry` as the C functions take it: seven integers. Raises GeometryError for an unknown activation dtype."""
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
    """The layout of a region with this geometry (fd_region_layout of region/region.h). Raises GeometryError."""
    try:
        layout = RegionLayout(*_native.region_layout(geometry_tuple(geometry)))
    except (ValueError, OverflowError) as error:
        raise GeometryError(f"{error} ({geometry})") from None
    for part, n, limit in (
        ("a call", layout.slot_bytes, MAX_SLOT_BYTES),
        ("the region", layout.region_bytes, MAX_REGION_BYTES),
    ):
        if n > limit:
            raise GeometryError(f"{part} would have {n} bytes, more than the {limit} allowed ({geometry})")
    return layout


class Region:
    """A mapped region. `view` is the whole region as writable bytes; `fd` is its memfd."""

    def __init__(self, fd: int, geometry: Geometry):
        """Map the memfd `fd`. The Region owns `fd`, and closes it on failure. Raises TransportError, OSError."""
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
        """Create a region: a header, and zeros behind the header. Raises GeometryError, OSError."""
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
    def from_peer(cls, fd: int, geometry: Geometry) -> Region:
        """Map a region that the peer has created, and check its header. Owns `fd` like the constructor.

        Raises TransportError if the region has another size, layout or protocol version.
        """
        region = cls(fd, geometry)
        try:
            _native.check_region_header(region.view, geometry_tuple(geometry))
        except ValueError as error:
            region.close()
            raise TransportError(str(error)) from None
        return region

    def close(self) -> None:
        """Close the memfd and unmap the region. If other views of the region exist, it is unmapped with the last one.

        Idempotent.
        """
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass
