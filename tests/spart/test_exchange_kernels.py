"""The CUDA kernels of the exchange: compiled for a GPU, which is not needed, and run on the host by loops.

This shows that the source is accepted and moves the right bytes. It shows nothing of a GPU's memory or its speed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from gpu.compiled_by_cupy import compiled_by_cupy
from gpu.host_kernels import HostKernels
from sources.compiled import compiled, kernel_names

from fastdecode.region.geometry import Geometry, RegionLayout, region_layout
from fastdecode.spart import block_kernels, exchange_kernels
from fastdecode.spart.exchange_kernels import CHUNK_BYTES, ROW_THREADS, SlotRows, row_addresses

UNTOUCHED = 0xAB


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(compiled("kernels.so", tmp_path_factory.mktemp("kernels")))


class FakeLink:
    """A region of poison, and the slot that a step uses in it."""

    def __init__(self, layout: RegionLayout, slot: int):
        self._memory = np.full(layout.region_bytes + 64, UNTOUCHED, np.uint8)
        start = -self._memory.ctypes.data % 64
        self.region = self._memory[start : start + layout.region_bytes]
        self.layout, self.start = layout, layout.slot(slot)

    def rows(self, offset: int, n: int, row_bytes: int) -> np.ndarray:
        """The first `n` rows of one kind, as bytes [n, row_bytes]."""
        start = self.start + offset
        return self.region[start : start + n * row_bytes].reshape(n, row_bytes)

    def slot_rows(self, attending: slice, appended: slice) -> SlotRows:
        base = self.region.ctypes.data + self.start
        y = self.layout
        return SlotRows(base + y.q, base + y.kv, base + y.o, attending, appended)


def steps(chance: random.Random) -> Iterator[tuple[list[slice], list[slice]]]:
    """Attending and appended rows of one to four links, all attending rows before all appended ones."""
    for _ in range(20):
        links = chance.randint(1, 4)
        bounds = [0]
        for i in range(2 * links):
            bounds.append(bounds[-1] + chance.choice([0, 1, 1, 7, 20]))
            if i == 0 and bounds[-1] == 0:
                bounds[-1] = 1
        parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        yield parts[:links], parts[links:]


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_size", "v_size"),
    [(4, 2, 8, 8), (1, 1, 8, 8), (9, 3, 64, 64), (32, 8, 128, 128), (4, 4, 24, 16)],
)
def test_rows_go_to_their_places_in_the_slots_and_nowhere_else(kernels, dtype, q_heads, kv_heads, head_size, v_size):
    """Against copies by numpy, link by link; every other byte of the regions keeps its value."""
    chance = random.Random(head_size)
    layout = region_layout(Geometry(2, 64, 1, q_heads, kv_heads, head_size, dtype, v_size))
    q_bytes, kv_bytes, o_bytes = layout.q_row_bytes, layout.kv_row_bytes, layout.o_row_bytes
    for attending, appended in steps(chance):
        links = [FakeLink(layout, chance.randint(0, 1)) for _ in attending]
        n_attend, n_rows = attending[-1].stop, max(attending[-1].stop, appended[-1].stop)
        generator = np.random.default_rng(n_rows)
        q = generator.integers(0, 256, (n_attend, q_bytes), np.uint8)
        kv = generator.integers(0, 256, (n_rows, kv_bytes), np.uint8)
        parts = [link.slot_rows(a, b) for link, a, b in zip(links, attending, appended, strict=True)]
        table = row_addresses(parts, q_bytes, kv_bytes, o_bytes)
        chunks = q_bytes // CHUNK_BYTES, kv_bytes // CHUNK_BYTES
        blocks = n_rows + chance.choice([0, 5])
        tables = (table.q, table.kv, table.counts)
        kernels.launch("fd_pack_rows", (blocks, 2), ROW_THREADS, q, kv, *tables, *chunks)

        want = [FakeLink(layout, 0) for _ in links]
        for link, copy, a, b in zip(links, want, attending, appended, strict=True):
            n, more = a.stop - a.start, b.stop - b.start
            copy.start = link.start
            copy.rows(layout.q, n, q_bytes)[:] = q[a]
            copy.rows(layout.kv, n + more, kv_bytes)[:n] = kv[a]
            copy.rows(layout.kv, n + more, kv_bytes)[n:] = kv[b]
            assert np.array_equal(link.region, copy.region)

        answer = generator.integers(0, 256, (n_attend, o_bytes), np.uint8)
        o = np.full((n_attend + 1, o_bytes), UNTOUCHED, np.uint8)
        for link, a in zip(links, attending, strict=True):
            link.rows(layout.o, a.stop - a.start, o_bytes)[:] = answer[a]
        kernels.launch("fd_unpack_rows", (blocks, 1), ROW_THREADS, o, table.o, table.counts, o_bytes // CHUNK_BYTES)
        assert np.array_equal(o[:-1], answer) and (o[-1] == UNTOUCHED).all()


def test_rows_without_a_slot_are_left_out(kernels):
    """Of three rows the second one goes to a slot, and gets an answer from there."""
    q, kv, answer = (np.full((3, 16), i, np.uint8) for i in (1, 2, 3))
    slots = [np.full(16, UNTOUCHED, np.uint8) for _ in range(2)]
    tables = [np.array([0, slot.ctypes.data, 0], np.uint64) for slot in slots]
    counts = np.array([3, 3], np.uint32)
    kernels.launch("fd_pack_rows", (3, 2), ROW_THREADS, q, kv, *tables, counts, 1, 1)
    assert (slots[0] == 1).all() and (slots[1] == 2).all()
    kernels.launch("fd_unpack_rows", (3, 1), ROW_THREADS, answer, tables[0], counts, 1)
    assert answer.tolist() == [[3] * 16, [1] * 16, [3] * 16]


def test_rows_that_are_not_aligned_are_refused():
    aligned = SlotRows(64, 128, 192, slice(0, 1), slice(1, 1))
    row_addresses([aligned], 32, 64, 32)
    with pytest.raises(ValueError, match="aligned to 16"):
        row_addresses([aligned], 32, 72, 32)
    with pytest.raises(ValueError, match="aligned to 16"):
        row_addresses([SlotRows(64, 136, 192, slice(0, 1), slice(1, 1))], 32, 64, 32)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_every_geometry_is_aligned(dtype):
    for head_size in range(8, 264, 8):
        layout = region_layout(Geometry(2, 33, 1, 3, 1, head_size, dtype))
        numbers = [layout.q, layout.kv, layout.o, layout.slot(0), layout.slot(1)]
        assert not any(number % CHUNK_BYTES for number in [*numbers, layout.q_row_bytes, layout.kv_row_bytes])


@pytest.mark.tools
@pytest.mark.parametrize(
    ("source", "defines"),
    [
        (exchange_kernels.SOURCE, {"FD_ROW_THREADS": ROW_THREADS}),
        (block_kernels.SOURCE, {"FD_BLOCK_THREADS": block_kernels.BLOCK_THREADS}),
    ],
    ids=["rows", "block"],
)
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_the_kernels_compile_for_every_architecture(architecture, source, defines):
    image = compiled_by_cupy(architecture, [source], defines)
    assert image.startswith(b"\x7fELF") and all(name.encode() in image for name in kernel_names(source))
