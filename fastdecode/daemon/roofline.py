"""The read-only roofline: the bandwidth of threads that only read memory, which no attention kernel can exceed."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import closing

from fastdecode.kernels._native import read_seconds, read_variants

#: Bytes that an R-node reads to measure its roofline.
_PROBE_BYTES = 128 << 20
#: Readings with each variant, of which the best counts: whatever else runs makes one slower.
_PROBES = 2


def huge_pages(n_bytes: int) -> mmap.mmap:
    """Zeroed memory, in huge pages if the OS has them, like the R-engine's."""
    memory = mmap.mmap(-1, -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Roofline:
    """A buffer of `n_bytes` that one thread pinned to each of `cpus` reads.

    `variant` is the way in which the threads read (`read_variants`): which one is fastest depends on the processor. If
    `cold`, the threads first take the buffer out of all caches, so that they read it from memory.
    """

    def __init__(self, n_bytes: int, cpus: Sequence[int], variant: int = 0, *, cold: bool = False):
        self.cpus, self.variant, self.cold = tuple(cpus), variant, cold
        self._map = huge_pages(n_bytes)
        for offset in range(0, len(self._map), mmap.PAGESIZE):  # else all pages would be the one page of zeros
            self._map[offset] = 1

    def gbps(self, passes: int = 1) -> float:
        """GB/s over `passes` readings of the whole buffer. Raises OSError."""
        seconds = read_seconds(self._map, self.cpus, passes, self.variant, self.cold)
        return passes * len(self._map) / seconds * 1e-9

    def choose(self, passes: int = 1) -> float:
        """Try every variant a few times and keep the fastest; GB/s of its best reading. Raises OSError."""
        best: dict[int, float] = {}  # of each variant
        for _ in range(_PROBES):
            for self.variant in range(len(read_variants())):
                best[self.variant] = max(best.get(self.variant, 0.0), self.gbps(passes))
        self.variant = max(best, key=best.__getitem__)
        return best[self.variant]

    def close(self) -> None:
        self._map.close()


def measure(cpus: Sequence[int]) -> int:
    """Bytes a second at which one thread on each of `cpus` reads memory in the fastest way. Raises OSError."""
    with closing(Roofline(_PROBE_BYTES, cpus, cold=True)) as roofline:
        return int(roofline.choose() * 1e9)
