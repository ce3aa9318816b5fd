"""The read-only roofline: the bandwidth of threads that only read, measured in turns with what it is compared with."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from fastdecode.bench.shape import huge_pages
from fastdecode.kernels._native import read_seconds


class Roofline:
    """A buffer of `n_bytes` that one thread pinned to each of `cpus` reads."""

    def __init__(self, n_bytes: int, cpus: Sequence[int]):
        self.cpus = tuple(cpus)
        self._map = huge_pages(n_bytes)
        for offset in range(0, len(self._map), mmap.PAGESIZE):  # else all pages would be the one page of zeros
            self._map[offset] = 1

    def gbps(self, passes: int = 1) -> float:
        """GB/s over `passes` readings of the whole buffer. Raises OSError."""
        return passes * len(self._map) / read_seconds(self._map, self.cpus, passes) * 1e-9

    def close(self) -> None:
        self._map.close()
