"""Memory of a CPU for weights and states: huge pages, where the operating system has them.

A step of few rows reads every weight once, so memory limits it. A processor fetches ahead within a page only, and the
entries of its TLB cover more memory if pages are huge.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

import numpy as np
import torch

_HUGE = 2 << 20  # bytes of a huge page
_PIECE = 64 << 20  # small matrices share memory of this size
_LINE = 64  # bytes; where a matrix begins


class _Memory:
    """Memory that is given out from its beginning. It is freed with the last array in it."""

    def __init__(self, nbytes: int):
        nbytes = -(-nbytes // _HUGE) * _HUGE
        memory = mmap.mmap(-1, nbytes + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        numbers = np.frombuffer(memory, np.uint8)
        begin = -numbers.ctypes.data % _HUGE
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(_advice, begin, nbytes)
        self._free = numbers[begin : begin + nbytes]

    def take(self, nbytes: int) -> np.ndarray | None:
        """The next `nbytes`; None if there are fewer."""
        if nbytes > len(self._free):
            return None
        taken, self._free = self._free[:nbytes], self._free[-(-nbytes // _LINE) * _LINE :]
        return taken


_advice = mmap.MADV_HUGEPAGE
_shared: _Memory | None = None
_lock = threading.Lock()


@contextlib.contextmanager
def small_pages() -> Iterator[None]:
    """Weights that are loaded meanwhile lie in small pages, for comparison."""
    global _advice, _shared
    before = _advice
    _advice, _shared = mmap.MADV_NOHUGEPAGE, None
    try:
        yield
    finally:
        _advice, _shared = before, None


def empty(nbytes: int) -> np.ndarray:
    """New memory of `nbytes` in huge pages, uint8 [nbytes]; it begins on a cache line."""
    global _shared
    with _lock:
        taken = _shared.take(nbytes) if _shared is not None else None
        if taken is None:
            piece = _Memory(max(nbytes, _PIECE))
            taken = piece.take(nbytes)
            assert taken is not None
            if nbytes < _PIECE:
                _shared = piece
        return taken


def in_huge_pages(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU's tensor in huge pages; a tensor of another device is returned as it is."""
    if weight.device.type != "cpu" or not weight.nbytes:
        return weight
    copy = torch.from_numpy(empty(weight.nbytes)).view(weight.dtype).view(weight.shape)
    return copy.copy_(weight)
