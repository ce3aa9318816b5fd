"""Regions as memory, and the layout that C computes against one computed from the comments of region.h."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from attention import rengine_peer
from wire.link_driver import SMALL

from fastdecode.region import _native
from fastdecode.region.contract import (
    ACT_DTYPES,
    ARM_BYTES,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_ROWS,
    MAX_SLOTS,
    PROTOCOL_VERSION,
    REPORT_BYTES,
    ROW_BYTES,
    ROW_DTYPE,
    SLOT_BYTES,
    Status,
)
from fastdecode.region.geometry import Geometry, GeometryError, RegionError, geometry_tuple, region_layout
from fastdecode.region.region import Region

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("heads", [(4, 24, 16, False), (4, 24, 16, True), (1, 24, 16, True, 5, 40, 100)])
@pytest.mark.parametrize("act_dtype", ACT_DTYPES)
def test_the_layout_is_the_one_that_region_h_describes(act_dtype, heads):
    n_kv_heads, head_size, *others = heads
    layout = region_layout(Geometry(3, 100, 5, 12, n_kv_heads, head_size, act_dtype, *others))
    act = ACT_DTYPES.index(act_dtype)
    peer = rengine_peer.Peer(rengine_peer.Geometry(3, 100, 5, 12, n_kv_heads, head_size, act, *others))
    assert (layout.q_row_bytes, layout.kv_row_bytes, layout.o_row_bytes) == (peer.q_row, peer.kv_row, peer.o_row)
    assert (layout.q, layout.kv, layout.o) == (peer.q_at, peer.kv_at, peer.o_at)
    assert (layout.slot(2), layout.slot_bytes, layout.region_bytes) == (peer.at(2), peer.slot_bytes, peer.bytes)


def test_headers_have_the_sizes_that_region_h_describes():
    assert (ARM_BYTES, ROW_BYTES, REPORT_BYTES, SLOT_BYTES) == (64, 24, 256, 640)
    rows = np.array([(1, 2, 3, 4, 5, 0), (6, 7, 8, 9, 10, 0)], ROW_DTYPE)
    assert rows.tobytes() == struct.pack("<12I", 1, 2, 3, 4, 5, 0, 6, 7, 8, 9, 10, 0)
    assert list(rows["seq_index"]) == [1, 6] and list(rows["n_rows"]) == [4, 9]


def test_every_status_of_c_has_its_name():
    assert {status.name: status.value for status in Status} == _native.STATUSES


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_slots": 0}, f"number of slots is not within 1..{MAX_SLOTS}"),
        ({"n_slots": MAX_SLOTS + 1}, f"number of slots is not within 1..{MAX_SLOTS}"),
        ({"max_rows": MAX_ROWS + 1}, f"rows per call are not within 1..{MAX_ROWS}"),
        ({"max_rows": 2**32 + 1}, f"rows per call are not within 1..{MAX_ROWS}"),
        ({"max_rows": -1}, f"rows per call are not within 1..{MAX_ROWS}"),
        ({"max_rows": 2**70}, f"rows per call are not within 1..{MAX_ROWS}"),
        ({"n_layers": MAX_LAYERS + 1}, f"number of layers is not within 1..{MAX_LAYERS}"),
        ({"n_q_heads": 2 * MAX_HEADS}, f"number of query heads is not within 1..{MAX_HEADS}"),
        ({"n_kv_heads": 3}, "query heads are not a multiple of KV heads"),
        ({"n_kv_heads": 8}, "number of KV heads is not within 1..query heads"),
        ({"head_size": MAX_HEAD_SIZE + 8}, f"head size is not a multiple of 8 within 8..{MAX_HEAD_SIZE}"),
        ({"v_size": 12}, f"head size is not a multiple of 8 within 8..{MAX_HEAD_SIZE}"),
        ({"head_size": 12}, f"head size is not a multiple of 8 within 8..{MAX_HEAD_SIZE}"),
        ({"act_dtype": "int8"}, "unknown activation dtype 'int8', known are fp32, fp16, bf16"),
    ],
)
def test_a_geometry_out_of_bounds(change, says):
    fields = {name: getattr(SMALL, name) for name in Geometry.__dataclass_fields__}
    with pytest.raises(GeometryError, match=says):
        region_layout(Geometry(**(fields | change)))


@pytest.mark.parametrize(
    "geometry", [(1, 1, 1, 1, 1, 8, 0, 8, 0), "123456789abc", (1, 1, 1, 1, 1, 8, 0, 8, 0, 0, 0, None), 7]
)
def test_c_takes_no_geometry_but_twelve_integers(geometry):
    with pytest.raises(TypeError):
        _native.region_layout(geometry)


def test_a_header_is_written_only_into_the_memory_of_a_region():
    numbers, size = geometry_tuple(SMALL), region_layout(SMALL).region_bytes
    memory = np.zeros(size + 128, np.uint8)
    first = -memory.ctypes.data % 64  # aligned to a cache line
    for begin, end, says in (
        (first, first + size - 1, f"the region has {size - 1} bytes, its geometry needs {size}"),
        (first, first + size + 1, f"the region has {size + 1} bytes"),
        (first + 8, first + 8 + size, "not aligned to 64 bytes"),
    ):
        with pytest.raises(ValueError, match=says):
            _native.init_region_header(memory[begin:end], numbers)
    assert not memory.any()
    _native.init_region_header(memory[first : first + size], numbers)
    _native.check_region_header(memory[first : first + size], numbers)


def test_a_region_of_another_size_layout_version_or_without_seals_is_refused():
    other = Geometry(2, 64, 2, 4, 2, 16, "fp32")
    region = Region.create(SMALL)
    with pytest.raises(RegionError, match="this end expects"):
        Region.from_peer(os.dup(region.fd), other)
    with pytest.raises(RegionError, match="another geometry"):
        Region.from_peer(os.dup(region.fd), Geometry(2, 32, 3, 4, 2, 16, "fp32"))
    region.view[4:8] = struct.pack("<I", PROTOCOL_VERSION + 1)
    with pytest.raises(RegionError, match=f"version {PROTOCOL_VERSION + 1}"):
        Region.from_peer(os.dup(region.fd), SMALL)
    region.view[0:4] = b"none"
    with pytest.raises(RegionError, match="magic number"):
        Region.from_peer(os.dup(region.fd), SMALL)
    region.close()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, region.layout.region_bytes)
    with pytest.raises(RegionError, match="not sealed"):
        Region.from_peer(unsealed, SMALL)


def test_a_region_cannot_be_resized():
    region = Region.create(SMALL)
    for size in (0, region.layout.region_bytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    region.close()


def test_a_checkout_without_its_c_says_how_to_build_it():
    code = "import sys; sys.modules['fastdecode.region._native'] = None; import fastdecode.region.contract"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "python setup.py build_ext --inplace" in done.stderr
