"""The read-only roofline: the bandwidth of threads that only read memory, which no attention kernel can exceed."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import closing

from fastdecode.daemon.machine import available_memory, cache_bytes
from fastdecode.kernels._native import read_seconds, read_variants

#: Bytes that an R-node reads at once to measure its roofline, each time others of a buffer that no cache holds.
_PROBE_BYTES = 128 << 20
_MOST_BYTES = 2 << 30  # of that buffer
_MEMORY_SHARE = 16  # of the available memory, which that buffer may take: one part
#: Readings with each variant, of which the best counts: whatever else runs makes one slower.
_PROBES = 2


def huge_pages(n_bytes: int) -> mmap.mmap:
    """Zeroed memory, in huge pages if the OS has them, like the R-engine's."""
    memory = mmap.mmap(-1, -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Roofline:
    """A buffer of `n_bytes` that one thread pinned to each of `cpus` reads. A reading takes all of it, or the next
    `part_bytes`.

    `variant` is the way in which the threads read (`read_variants`): which one is fastest depends on the processor.
    """

    def __init__(self, n_bytes: int, cpus: Sequence[int], variant: int = 0, *, part_bytes: int | None = None):
        self.cpus, self.variant = tuple(cpus), variant
        self._map = huge_pages(n_bytes)
        self._part, self._next = part_bytes or len(self._map), 0  # bytes of a reading, and where the next one begins
        for offset in range(0, len(self._map), mmap.PAGESIZE):  # else all pages would be the one page of zeros
            self._map[offset] = 1

    def gbps(self, passes: int = 1) -> float:
        """GB/s over `passes` readings of the next part of the buffer. Raises OSError."""
        begin, self._next = self._next, (self._next + self._part) % len(self._map)
        with memoryview(self._map) as whole, whole[begin : begin + self._part] as part:
            return passes * len(part) / read_seconds(part, self.cpus, passes, self.variant) * 1e-9

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


def probe_parts(caches: int, available: int) -> int:
    """How many parts of _PROBE_BYTES the buffer of a measurement has: twice the bytes of the `caches`, so that a part
    has left them before it is read again, as far as the bytes of `available` memory allow."""
    return max(1, min(-(-2 * caches // _PROBE_BYTES), min(_MOST_BYTES, available // _MEMORY_SHARE) // _PROBE_BYTES))


def measure(cpus: Sequence[int], n_bytes: int | None = None) -> int:
    """Bytes a second at which one thread on each of `cpus` reads the memory, or a buffer of `n_bytes`, in the fastest
    way. Raises OSError."""
    parts = probe_parts(cache_bytes(cpus), available_memory())
    part = None if n_bytes else _PROBE_BYTES
    with closing(Roofline(n_bytes or parts * _PROBE_BYTES, cpus, part_bytes=part)) as roofline:
        return int(roofline.choose() * 1e9)
