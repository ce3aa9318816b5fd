"""A captured graph of the page kernels serves the steps of its size class: what changes lies in the device's tables.

Through cuda-bindings, on this machine's driver or on the simulated one, whose kernels are compiled for the host and
whose every access to memory is checked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu.compiled_by_cupy import compiled_by_cupy
from gpu.cuda_driver import Cuda
from gpu.page_kernels_on_host import SHAPE, HostPageKernels, launch_on
from gpu.page_reference import ReferencePageKernels

from fastdecode.kernels.gpu.page_kernels import (
    ATTENTION_SOURCES,
    PAGE_SOURCES,
    LayerPages,
    PageCopier,
    PagedLayer,
    PagedRows,
    PageKernels,
    definitions,
    shared_bytes,
)

pytestmark = pytest.mark.tools

LAYER = PagedLayer("fp16", "fp16", 4, 2, 32, 32**-0.5, window=150)
ROWS, BLOCKS, PAGES, SPLITS = 4, 3, 8, 2
WIDTH, KV_WIDTH = LAYER.n_q_heads * LAYER.head_size, 2 * LAYER.n_kv_heads * LAYER.head_size
PAGE_BYTES = LAYER.n_kv_heads * LAYER.chunk_bytes


def images(cuda: Cuda, folder: Path) -> tuple[bytes, bytes]:
    """The kernels of attention, and those of pages."""
    if not cuda.simulated:
        parts = [cuda.product.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR")]
        architecture = "sm_{}{}".format(*parts)
        attention = compiled_by_cupy(architecture, ATTENTION_SOURCES, definitions(LAYER, SHAPE))
        return attention, compiled_by_cupy(architecture, PAGE_SOURCES, {})
    host = HostPageKernels(folder)
    return host.attention(LAYER).path.read_bytes(), host.library(PAGE_SOURCES, []).path.read_bytes()


def test_a_graph_serves_every_step_of_its_class(cuda: Cuda, tmp_path: Path) -> None:
    """Rows of three sequences come and grow; then a page is copied as for a fork. The reference has the same memory."""
    attention, pages_image = images(cuda, tmp_path)
    kernels = PageKernels(
        LAYER,
        SHAPE,
        launch_on(cuda, attention, "fd_append"),
        launch_on(cuda, attention, "fd_attend", shared_bytes(LAYER, SHAPE)),
        launch_on(cuda, pages_image, "fd_merge_answers"),
    )
    stream, rng = cuda.call("cuStreamCreate", 1), np.random.default_rng(5)
    arena = np.full(PAGES * PAGE_BYTES, 0xFF, np.uint8)
    table = np.array([[4, 1, 6], [0, 7, 2], [5, 3, -1]], np.int32)
    rows, counts = np.zeros((ROWS, 4), np.int32), np.zeros(2, np.uint32)
    q, kv = np.zeros((ROWS, WIDTH), np.float16), np.zeros((ROWS, KV_WIDTH), np.float16)
    o = np.zeros((ROWS, WIDTH), np.float16)
    step = PagedRows(0, 0, ROWS, ROWS)
    scratch = np.zeros(kernels.scratch_bytes(step, SPLITS), np.uint8)
    at = {
        name: cuda.alloc(x)
        for name, x in {
            "arena": arena, "table": table, "rows": rows, "counts": counts, "q": q, "kv": kv, "o": o, "scratch": scratch
        }.items()
    }  # fmt: skip
    step, pages = (
        PagedRows(at["rows"], at["counts"], ROWS, ROWS),
        LayerPages(at["arena"], PAGE_BYTES, at["table"], BLOCKS),
    )

    def work() -> None:
        kernels.append(stream, at["kv"], KV_WIDTH, step, pages)
        kernels.attend(stream, at["q"], WIDTH, at["o"], WIDTH, step, pages, at["scratch"], SPLITS)

    work()  # loads the kernels, with no rows
    cuda.call("cuStreamSynchronize", stream)
    graph = cuda.capture(stream, work)
    reference = ReferencePageKernels(LAYER)
    want, mine = np.zeros_like(o), LayerPages(arena.ctypes.data, PAGE_BYTES, table.ctypes.data, BLOCKS)
    lengths = [0, 0, 0]
    for turn in range(220):
        runs = [(0, 1), (1, 2)] if turn % 2 else [(2, 1), (0, 2), (1, 1)]
        listed = [(s, lengths[s] + i, i, 0) for s, n in runs for i in range(n) if lengths[s] < 256]
        for sequence, _, _, _ in listed:
            lengths[sequence] += 1
        rows[: len(listed)], counts[:] = np.reshape(listed, (-1, 4)), len(listed)
        q[:], kv[:] = rng.standard_normal(q.shape), rng.standard_normal(kv.shape)
        for name, x in {"rows": rows, "counts": counts, "q": q, "kv": kv}.items():
            cuda.call("cuMemcpyHtoD", at[name], x.ctypes.data, x.nbytes)
        cuda.call("cuGraphLaunch", graph, stream)
        cuda.call("cuStreamSynchronize", stream)
        mine_step = PagedRows(rows.ctypes.data, counts.ctypes.data, ROWS, ROWS)
        reference.append(0, kv.ctypes.data, KV_WIDTH, mine_step, mine)
        if turn % 20 == 0 or turn > 210:
            reference.attend(0, q.ctypes.data, WIDTH, want.ctypes.data, WIDTH, mine_step, mine, 0, 1)
            got = cuda.download(at["o"], o)[: len(listed)]
            assert np.allclose(got.astype(float), want[: len(listed)].astype(float), atol=4e-3)
    assert np.array_equal(cuda.download(at["arena"], arena), arena)

    copier = PageCopier(launch_on(cuda, pages_image, "fd_copy_pages"))
    moves = np.array([[at["arena"] + page * PAGE_BYTES for page in (4, 3)]], np.uint64)
    tables = cuda.alloc(moves), cuda.alloc(np.array([1], np.uint32))
    copier.copy(stream, *tables, 2, 1, PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
    cuda.call("cuStreamSynchronize", stream)
    arena.reshape(PAGES, -1)[3] = arena.reshape(PAGES, -1)[4]
    assert np.array_equal(cuda.download(at["arena"], arena), arena)


def test_a_page_beyond_the_arena_ends_the_context(simulated: Cuda, tmp_path: Path) -> None:
    """The simulated driver sees each copy to shared memory as a GPU would."""
    cuda = simulated
    image, _ = images(cuda, tmp_path)
    attend = launch_on(cuda, image, "fd_attend", shared_bytes(LAYER, SHAPE))
    kernels = PageKernels(LAYER, SHAPE, attend, attend, attend)
    stream, step = cuda.call("cuStreamCreate", 1), PagedRows(0, 0, 1, 1)
    arena, o = cuda.alloc(np.zeros(2 * PAGE_BYTES, np.uint8)), cuda.alloc(np.zeros(2 * WIDTH, np.float16))
    rows, counts = cuda.alloc(np.array([0, 5, 0, 0], np.int32)), cuda.alloc(np.array([1, 1], np.uint32))
    scratch = cuda.alloc(np.zeros(kernels.scratch_bytes(step, 1), np.uint8))
    step = PagedRows(rows, counts, 1, 1)

    def attend_page(page: int) -> None:
        pages = LayerPages(arena, PAGE_BYTES, cuda.alloc(np.array([page], np.int32)), 1)
        kernels.attend(stream, o, WIDTH, o, WIDTH, step, pages, scratch, 1)
        cuda.call("cuStreamSynchronize", stream)

    attend_page(1)
    with pytest.raises(Exception, match="fd_attend reads"):
        attend_page(2)
    cuda.reset()
