"""Where a CPU's weights lie: in huge pages, many small matrices side by side."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from fastdecode.spart.linears import memory
from fastdecode.spart.linears.dense16 import Dense16Linear, keeps16
from fastdecode.spart.linears.grouped import GroupedLinear
from fastdecode.spart.linears.quantised import ACTIVATION_BITS, quantise

HUGE = 2 << 20
TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No memory is left from other tests."""
    monkeypatch.setattr(memory, "_shared", None)


def mapping(address: int) -> dict[str, int]:
    """What /proc/self/smaps says of the mapping that an address is in, in bytes."""
    values: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin <= address < end
        elif inside and line.endswith(" kB"):
            values[first[:-1]] = int(line.split()[1]) << 10
    return values


needs_huge_pages = pytest.mark.skipif(
    not TRANSPARENT.exists() or "[never]" in TRANSPARENT.read_text(), reason="the OS has no transparent huge pages"
)


@needs_huge_pages
def test_a_large_matrix_lies_in_huge_pages():
    weight = memory.in_huge_pages(torch.ones(16 << 20, dtype=torch.uint8))
    assert weight.data_ptr() % HUGE == 0
    assert mapping(weight.data_ptr())["AnonHugePages"] >= 8 << 20  # the rest if memory is not in pieces


@needs_huge_pages
def test_small_pages_are_for_comparison():
    with memory.small_pages():
        small = memory.in_huge_pages(torch.ones(16 << 20, dtype=torch.uint8))
    huge = memory.in_huge_pages(torch.ones(16 << 20, dtype=torch.uint8))
    assert mapping(small.data_ptr())["AnonHugePages"] == 0
    assert mapping(huge.data_ptr())["AnonHugePages"] > 0


def test_small_matrices_share_memory_and_do_not_overlap():
    sizes = [1, 63, 64, 65, 4097, 1 << 20]
    parts = [memory.empty(n) for n in sizes]
    for i, part in enumerate(parts):
        part[:] = i
    assert [set(part.tolist()) for part in parts] == [{i} for i in range(len(sizes))]
    begins = [part.ctypes.data for part in parts]
    assert all(begin % 64 == 0 for begin in begins)
    assert max(begins) - min(begins) < HUGE


def test_matrices_that_do_not_fit_get_memory_of_their_own():
    small = memory.empty(1000)
    large = memory.empty(memory._PIECE + 1)
    assert large.nbytes == memory._PIECE + 1
    large[-1] = 1
    assert memory.empty(1000).ctypes.data - small.ctypes.data == 1024  # the shared memory is still in use
    many = [memory.empty(memory._PIECE // 4) for _ in range(9)]
    assert len({part.ctypes.data for part in many}) == 9


def test_memory_is_freed_with_its_last_matrix():
    address = memory.empty(memory._PIECE).ctypes.data
    gc.collect()
    assert "Rss" not in mapping(address)
    kept = memory.empty(10)
    kept[:] = 7
    memory._shared = None
    gc.collect()
    assert kept.tolist() == [7] * 10


def test_a_copy_has_the_dtype_the_shape_and_the_numbers():
    for weight in (torch.randn(3, 5), torch.randn(2, 3, 4).half(), torch.arange(6, dtype=torch.int16), torch.ones(0)):
        copy = memory.in_huge_pages(weight)
        assert copy.dtype is weight.dtype and torch.equal(copy, weight)


@needs_huge_pages
@pytest.mark.skipif(not keeps16(torch.device("cpu")), reason="the ISA has no products with 16-bit weights")
def test_the_weights_of_linears_lie_in_huge_pages():
    weight = torch.randn(4096, 1024)
    before = memory._shared
    linears = [Dense16Linear(weight.half()), GroupedLinear(quantise(weight, 8, ACTIVATION_BITS), None, weight.device)]
    shared = memory._shared
    assert before is None and shared is not None
    address = shared._free.ctypes.data - 1
    assert mapping(address)["AnonHugePages"] >= 4 << 20
    x = torch.randn(2, 1024)
    want = x.double() @ weight.double().T
    for linear, most in zip(linears, (1e-3, 1e-2), strict=True):
        assert (linear(x).double() - want).abs().max() < most * want.abs().max()


def test_a_kernel_without_huge_pages_has_the_same_numbers(monkeypatch):
    class Refusing(memory.mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Refusing)
    weight = torch.randn(100)
    assert torch.equal(memory.in_huge_pages(weight), weight)
