"""The data path of a link by itself, for an S-Part that is timed alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from fastdecode.region.region import Region
from fastdecode.transports._native import Port
from fastdecode.transports.base import Lease, Link, LinkDown


class DataPath(Link):
    """A region and a port into it, without a control connection: control messages do nothing, and a refusal is not
    told from an answer. It owns both."""

    def __init__(self, url: str, lease: Lease, region: Region, port: Port):
        self.url, self.geometry, self.lease, self.layout = url, region.geometry, lease, region.layout
        self._memory, self.region, self.port = region, region.view, port

    def arm(self, slot: int, entries: np.ndarray) -> None:
        self.port.arm(slot, entries.view(np.uint8))

    def ring(self, slot: int, layer: int) -> None:
        self.port.ring(slot, layer)

    def wait(self, slot: int, timeout: float) -> None:
        self.port.wait(slot, timeout)

    def disarm(self, slot: int) -> None:
        self.port.disarm(slot)

    def failure(self, status: int, message: str) -> LinkDown:
        return LinkDown(message, self)

    async def free(self, handles: Sequence[tuple[int, int]]) -> None:
        pass

    async def trim(self, seq_index: int, tag: int, length: int) -> None:
        pass

    async def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None:
        pass

    async def receive(self, seq: tuple[int, int], length: int, token: str) -> None:
        pass

    async def push(self, seq: tuple[int, int], pages: range, length: int, url: str, token: str) -> None:
        pass

    async def resize(self, n_pages: int) -> dict[str, int]:
        return {}

    async def stats(self) -> dict[str, int]:
        return {}

    async def leaving(self) -> None:
        await asyncio.Event().wait()

    async def closed(self) -> None:
        return None

    async def close(self) -> None:
        self.port.close()
        self._memory.close()
