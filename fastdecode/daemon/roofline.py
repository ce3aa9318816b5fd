"""The read-only roofline: the bandwidth of threads that only read memory, which no attention kernel can exceed."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import closing

from fastdecode.kernels._native import read_seconds

#: Bytes that an R-node reads to measure its roofline: more than most last-level caches hold.
_PROBE_BYTES = 128 << 20
#: Readings, of which the best counts: whatever else runs makes one slower.
_PROBES = 8


def huge_pages(n_bytes: int) -> mmap.mmap:
    """Zeroed memory, in huge pages if the OS has them, like the R-engine's."""
    memory = mmap.mmap(-1, -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


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


def measure(cpus: Sequence[int]) -> int:
    """Bytes a second that one thread on each of `cpus` reads, the best of a few tries. Raises OSError."""
    with closing(Roofline(_PROBE_BYTES, cpus)) as roofline:
        return int(max(roofline.gbps() for _ in range(_PROBES)) * 1e9)
