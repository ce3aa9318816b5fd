"""Loopback: a data path without an R-node, for an S-Part that is timed alone."""

from __future__ import annotations

from fastdecode.region.geometry import Geometry, geometry_tuple
from fastdecode.region.region import Region
from fastdecode.transports._native import Port
from fastdecode.transports.base import DataPath


class Loopback(DataPath):
    """Replaces a link of this geometry: every message is answered at once, and the O rows stay as they are."""

    def __init__(self, geometry: Geometry, url: str = "loopback"):
        self._own_region = Region.create(geometry)
        super().__init__(url, self._own_region, Port(self._own_region.view, geometry_tuple(geometry), 0, loopback=True))

    def close(self) -> None:
        self.port.close()
        self._own_region.close()
