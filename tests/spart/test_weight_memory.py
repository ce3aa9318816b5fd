"""Where a CPU's weights lie: in huge pages, many small matrices side by side."""

from __future__ import annotations

import contextlib
import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from fastdecode.spart.linears import huge_pages
from fastdecode.spart.linears.dense16 import Linear16, keeps16
from fastdecode.spart.linears.grouped import GroupedLinear
from fastdecode.spart.linears.quantised import ACTIVATION_BITS
from fastdecode.spart.linears.rounding import quantise

HUGE = 2 << 20


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No memory is left from other tests."""
    monkeypatch.setattr(huge_pages, "_shared", None)


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


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture
def has_huge_pages() -> None:
    """Skips the test if the OS has no huge pages to give."""
    size = 16 << 20
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as plain:
        with contextlib.suppress(OSError):
            plain.madvise(mmap.MADV_HUGEPAGE)
        plain.write(bytes(size))
        numbers = np.frombuffer(plain, np.uint8)
        found = mapping(numbers.ctypes.data)["AnonHugePages"]
        del numbers
    if found < size // 2:
        pytest.skip("the OS has no huge pages")


@pytest.mark.usefixtures("has_huge_pages")
def test_a_large_matrix_lies_in_huge_pages():
    weight = huge_pages.in_huge_pages(torch.ones(16 << 20, dtype=torch.uint8))
    assert weight.data_ptr() % HUGE == 0
    assert mapping(weight.data_ptr())["AnonHugePages"] >= 8 << 20  # or less than all if memory is in pieces


@pytest.mark.usefixtures("has_huge_pages")
def test_small_pages_are_for_comparison():
    with huge_pages.small_pages():
        small = huge_pages.in_huge_pages(torch.ones(16 << 20, dtype=torch.uint8))
    huge = huge_pages.in_huge_pages(torch.ones(16 << 20, dtype=torch.uint8))
    assert mapping(small.data_ptr())["AnonHugePages"] == 0
    assert mapping(huge.data_ptr())["AnonHugePages"] > 0


def test_small_matrices_share_memory_and_do_not_overlap():
    sizes = [1, 63, 64, 65, 4097, 1 << 20]
    parts = [huge_pages.empty(n) for n in sizes]
    for i, part in enumerate(parts):
        part[:] = i
    assert [set(part.tolist()) for part in parts] == [{i} for i in range(len(sizes))]
    begins = [part.ctypes.data for part in parts]
    assert all(begin % 64 == 0 for begin in begins)
    assert max(begins) - min(begins) < HUGE


def test_matrices_that_do_not_fit_get_memory_of_their_own():
    small = huge_pages.empty(1000)
    large = huge_pages.empty(huge_pages._PIECE + 1)
    assert large.nbytes == huge_pages._PIECE + 1
    large[-1] = 1
    assert huge_pages.empty(1000).ctypes.data - small.ctypes.data == 1024  # the shared memory is still in use
    many = [huge_pages.empty(huge_pages._PIECE // 4) for _ in range(9)]
    assert len({part.ctypes.data for part in many}) == 9


def test_memory_is_freed_with_its_last_matrix():
    before = resident()
    weight = huge_pages.empty(huge_pages._PIECE)
    weight[:] = 1
    assert resident() > before + huge_pages._PIECE // 2
    del weight
    gc.collect()
    assert resident() < before + huge_pages._PIECE // 2
    kept = huge_pages.empty(10)
    kept[:] = 7
    huge_pages._shared = None
    gc.collect()
    assert kept.tolist() == [7] * 10


def test_a_copy_has_the_dtype_the_shape_and_the_numbers():
    for weight in (torch.randn(3, 5), torch.randn(2, 3, 4).half(), torch.arange(6, dtype=torch.int16), torch.ones(0)):
        copy = huge_pages.in_huge_pages(weight)
        assert copy.dtype is weight.dtype and torch.equal(copy, weight)


@pytest.mark.usefixtures("has_huge_pages")
@pytest.mark.skipif(not keeps16(torch.device("cpu")), reason="the ISA has no products with 16-bit weights")
def test_the_weights_of_linears_lie_in_huge_pages():
    weight = torch.randn(4096, 1024)
    before = huge_pages._shared
    linears = [Linear16(weight.half()), GroupedLinear(quantise(weight, 8, ACTIVATION_BITS), None)]
    shared = huge_pages._shared
    assert before is None and shared is not None
    address = shared._free.ctypes.data - 1
    assert mapping(address)["AnonHugePages"] >= 4 << 20
    x = torch.randn(2, 1024)
    want = x.double() @ weight.double().T
    for linear, most in zip(linears, (1e-3, 2e-2), strict=True):  # AVX2 rounds activations to 7 bits
        assert (linear(x).double() - want).abs().max() < most * want.abs().max()


def test_a_kernel_without_huge_pages_has_the_same_numbers(monkeypatch):
    class Refusing(huge_pages.mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Refusing)
    weight = torch.randn(100)
    assert torch.equal(huge_pages.in_huge_pages(weight), weight)
