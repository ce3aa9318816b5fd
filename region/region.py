"""The activation region as memory: how a process creates one and maps it.

Over shared memory the R side creates the region and hands it to the S side; over TCP and RDMA each side creates its
own. A region is an anonymous memfd: it has no name in any file system, so nothing is left behind however its owners
die. Its size is sealed, so that a peer cannot truncate the file while the other side has it mapped.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from . import _native
from .geometry import Geometry, RegionError, geometry_tuple, region_layout

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Region:
    """A mapped region. `view` is the whole region as writable bytes; `fd` is its memfd."""

    def __init__(self, fd: int, geometry: Geometry):
        """Map the memfd `fd`. The Region owns `fd`, and closes it on failure. Raises RegionError, OSError."""
        self.fd = fd
        try:
            self.geometry = geometry
            self.layout = region_layout(geometry)
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise RegionError("the region's memory is not sealed against resizing")
            size = os.fstat(fd).st_size
            if size != self.layout.region_bytes:
                raise RegionError(f"the region has {size} bytes, this end expects {self.layout.region_bytes}")
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

        Raises RegionError if the region has another size, layout or protocol version.
        """
        region = cls(fd, geometry)
        try:
            _native.check_region_header(region.view, geometry_tuple(geometry))
        except ValueError as error:
            region.close()
            raise RegionError(str(error)) from None
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
