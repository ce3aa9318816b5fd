"""PageKernels: attention over KV pages in a GPU's memory, in the layout of R-nodes (kernels/attention/chunk.h).

Each call puts one launch into a stream. What changes from step to step lies in tables in the device's memory, so a
captured graph serves every step of its size class. Pointers are addresses as the device sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastdecode.kernels._native import gpu_splits
from fastdecode.kernels.gpu.cupy_kernels import DeviceLimits, Launch, device_limits, load_functions, load_kernels
from fastdecode.region.contract import ACT_DTYPES, PAGE_TOKENS

_HERE = Path(__file__).parent
ATTENTION_SOURCES = tuple(_HERE / name for name in ("lanes.cu", "chunk.cu", "append.cu", "tiles.cu", "attend.cu"))
PAGE_SOURCES = (_HERE / "pages.cu",)

#: FD_FORMAT of chunk.cu.
_FORMATS = {"fp16": 1, "bf16": 2, "int8": 3}
_HEAD_UNIT, _MOST_HEAD, _MOST_GROUP = 16, 256, 16
_LANES, _LINE, _SLAB = 32, 128, 64  # of tiles.cu
#: The first devices with the products of each format.
_CAPABILITIES = {"fp16": (7, 5), "bf16": (8, 0), "int8": (7, 5)}
#: FD_THREADS of pages.cu.
_PAGE_THREADS = 128
#: Bytes in which strides between planes are counted.
_STRIDE_UNIT = 64
#: Bytes of a multiprocessor's shared memory that each block takes beyond its own.
_RESERVED_SHARED = 1024
_MOST_RESIDENT = 2  # blocks on a multiprocessor: 128 threads with up to 255 registers each


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """What a layer's attention does. Sizes of heads count elements."""

    kv_dtype: str
    act_dtype: str  # of Q, K, V and O rows
    n_q_heads: int
    n_kv_heads: int
    head_size: int
    softmax_scale: float
    window: int = 0  # tokens, 0: none
    softcap: float = 0.0  # 0: none
    segment: int = 0  # tokens, 0: none (chunked attention)
    v_size: int = 0  # of V and O; 0: head_size
    v_in_k: bool = False
    hadamard: bool = False  # Q and K arrive transformed (kernels/cpu/hadamard.h)

    @property
    def group(self) -> int:
        return self.n_q_heads // self.n_kv_heads

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a page's K and V of one KV head."""
        scales = 2 * PAGE_TOKENS * 4 if self.kv_dtype == "int8" else 0
        return 2 * PAGE_TOKENS * self.head_size * (1 if self.kv_dtype == "int8" else 2) + scales


def unsupported(layer: PagedLayer, capability: tuple[int, int] | None = None) -> str | None:
    """Why the kernels do not serve a layer, for people; None if they do. `capability` is the compute capability of the
    device, None: that of any device since 8.0."""
    if layer.kv_dtype not in _FORMATS:
        return f"the GPU's attention kernels have no {layer.kv_dtype} KV-cache, only {', '.join(_FORMATS)}"
    if layer.act_dtype not in ACT_DTYPES:
        return f"the GPU's attention kernels have no {layer.act_dtype} activations"
    if layer.v_in_k:
        return "the GPU's attention kernels store K and V apart, and this model's V is a part of K"
    if layer.v_size not in (0, layer.head_size):
        return (
            f"the GPU's attention kernels take V heads of the size of K heads, "
            f"not {layer.v_size} and {layer.head_size} elements"
        )
    if layer.head_size % _HEAD_UNIT or not 0 < layer.head_size <= _MOST_HEAD:
        return (
            f"the GPU's attention kernels take heads of multiples of {_HEAD_UNIT} elements up to {_MOST_HEAD}, "
            f"not {layer.head_size}"
        )
    if layer.n_q_heads % layer.n_kv_heads or layer.group > _MOST_GROUP:
        return (
            f"the GPU's attention kernels take up to {_MOST_GROUP} query heads for a KV head, "
            f"not {layer.n_q_heads} for {layer.n_kv_heads}"
        )
    if capability is not None and capability < _CAPABILITIES[layer.kv_dtype]:
        least = _CAPABILITIES[layer.kv_dtype]
        return (
            f"a {layer.kv_dtype} KV-cache on a GPU needs compute capability {least[0]}.{least[1]}, "
            f"the GPU has {capability[0]}.{capability[1]}"
        )
    return None


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Where the K and V of a layer lie (kernels/cache/kvcache.h)."""

    chunks: int  # address of the chunk of page 0 and KV head 0
    page_bytes: int  # from a page to the next one in the layer's plane
    table: int  # address of int32 [sequences][table_blocks]: the page of each block, of the layer's section
    table_blocks: int


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a step, in tables on the device.

    `rows` is the address of int32 [max_rows][4]: the sequence's entry in the page table, the position, the number of
    the row among the sequence's rows of the step, and the first position that the sequence's rows may see. Rows of a
    sequence are neighbours and in the order of their positions. Attending rows come first, then rows that are only
    appended. `counts` is the address of uint32 [2]: attending rows, all rows.
    """

    rows: int
    counts: int
    max_attending: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Blocks of fd_attend: their warps, the parts in the ring of a warp, and the blocks that a device runs at once."""

    warps: int
    stages: int
    at_once: int


class PageKernels:
    """The kernels of a layer, or of all layers that are alike."""

    def __init__(self, layer: PagedLayer, shape: BlockShape, append: Launch, attend: Launch, merge: Launch):
        """The launches are those of fd_append, fd_attend and fd_merge_answers, compiled with `definitions`."""
        self.layer = layer
        self._shape, self._append, self._attend, self._merge = shape, append, attend, merge

    @classmethod
    def load(cls, layer: PagedLayer, device: int) -> PageKernels:
        """Raises KernelError, and ValueError for a layer that is unsupported."""
        shape = _shape_for(layer, device)
        names, shared = ("fd_append", "fd_attend"), shared_bytes(layer, shape)
        append, attend = load_kernels(ATTENTION_SOURCES, definitions(layer, shape), names, device, shared)
        [merge] = load_kernels(PAGE_SOURCES, {}, ["fd_merge_answers"], device)
        return cls(layer, shape, append, attend, merge)

    def splits(self, rows: PagedRows, tokens: int) -> int:
        """Into how many blocks to cut the work of a row and KV head, if contexts have up to `tokens` tokens, so that
        the blocks fill the device."""
        pairs, rounds = rows.max_attending * self.layer.n_kv_heads, -(-tokens // (_SLAB * self._shape.warps))
        return gpu_splits(pairs, rounds, self._shape.at_once)

    def n_counters(self, rows: PagedRows) -> int:
        """The uint32 counters at the beginning of the memory of `scratch_bytes`."""
        return rows.max_attending * self.layer.n_kv_heads

    def scratch_bytes(self, rows: PagedRows, splits: int) -> int:
        """Bytes of the memory that `attend` needs beside its rows. It holds zeros before the first launch, and belongs
        to one stream."""
        pairs = self.n_counters(rows)
        partial = _queries(self.layer) * (self.layer.head_size + 2) * 4
        return -(-pairs * 4 // 256) * 256 + (pairs * splits * partial if splits > 1 else 0)

    def append(self, stream: int, kv: int, kv_stride: int, rows: PagedRows, pages: LayerPages) -> None:
        """Write kv [rows][kv_stride], K heads before V heads, to the pages."""
        self._append(
            (rows.max_rows, self.layer.n_kv_heads),
            self.layer.head_size,
            stream,
            (pages.chunks, pages.table, rows.rows, rows.counts, kv),
            (pages.page_bytes, pages.table_blocks, kv_stride),
        )

    def attend(
        self,
        stream: int,
        q: int,
        q_stride: int,
        o: int,
        o_stride: int,
        rows: PagedRows,
        pages: LayerPages,
        scratch: int,
        splits: int,
        lse: int = 0,
        sinks: int = 0,
        slopes: int = 0,
    ) -> None:
        """Attend the rows of q [attending rows][q_stride] to their tokens, their own included: o [attending
        rows][o_stride].

        Without `lse`, O is the answer. `lse` is the address of fp32 [attending rows][n_q_heads]: O is then an answer
        for `merge`, without sinks, and lse the log-sum-exp of its scores. A row that sees no token has O = 0 and lse =
        -inf. `sinks` and `slopes` (ALiBi), if not 0, are the addresses of fp32 [n_q_heads].
        """
        c = self.layer
        self._attend(
            (splits, c.n_kv_heads, rows.max_attending),
            32 * self._shape.warps,
            stream,
            (pages.chunks, pages.table, rows.rows, rows.counts, q, o, lse, sinks, slopes, scratch),
            (
                pages.page_bytes,
                pages.table_blocks,
                q_stride,
                o_stride,
                c.n_q_heads,
                _bits(c.softmax_scale),
                _bits(c.softcap),
                c.window,
                c.segment,
            ),
        )

    def merge(self, stream: int, o: int, o_stride: int, lse: int, others: int, rows: PagedRows, sinks: int = 0) -> None:
        """Merge O rows of `attend` with other places' answers, in place.

        `others` is the address of uint64 [attending rows]: for each row the address of an answer as R-nodes give it to
        a partial row (region/region.h), whose rows have `o_stride` elements, too; or 0.
        """
        c = self.layer
        self._merge(
            (rows.max_attending, c.n_q_heads),
            _PAGE_THREADS,
            stream,
            (o, lse, others, rows.counts, sinks),
            (o_stride, c.head_size, ACT_DTYPES.index(c.act_dtype)),
        )


class PageFunctions(NamedTuple):
    """The kernels of a layer for an R-engine with a GPU (fd_gpu_kernels_t of kernels/engine/gpu_work.h)."""

    append: int  # CUfunction
    attend: int
    warps: int
    shared_bytes: int
    queries: int
    at_once: int

    @classmethod
    def load(cls, layer: PagedLayer, device: int) -> PageFunctions:
        """Raises KernelError, and ValueError for a layer that is unsupported."""
        shape = _shape_for(layer, device)
        names, shared = ("fd_append", "fd_attend"), shared_bytes(layer, shape)
        return cls.of(
            layer, shape, *load_functions(ATTENTION_SOURCES, definitions(layer, shape), names, device, shared)
        )

    @classmethod
    def of(cls, layer: PagedLayer, shape: BlockShape, append: int, attend: int) -> PageFunctions:
        return cls(append, attend, shape.warps, shared_bytes(layer, shape), _queries(layer), shape.at_once)


class PageCopier:
    """Copies whole pages: forks within an arena, and pages to bytes and back."""

    def __init__(self, copy: Launch):
        """`copy` is the launch of fd_copy_pages."""
        self._copy = copy

    @classmethod
    def load(cls, device: int) -> PageCopier:
        """Raises KernelError."""
        return cls(*load_kernels(PAGE_SOURCES, {}, ["fd_copy_pages"], device))

    def copy(
        self,
        stream: int,
        moves: int,
        counts: int,
        max_moves: int,
        n_planes: int,
        plane_bytes: int,
        source_stride: int,
        target_stride: int,
    ) -> None:
        """Copy pages of `n_planes` planes of `plane_bytes` bytes, which lie a stride apart.

        `moves` is the address of uint64 [max_moves][2]: the addresses of a page's first plane where it lies and where
        it goes; `counts` that of uint32 [1]: pages of this launch. An arena's stride is the plane_stride of its cache.
        With plane_bytes as stride a page is contiguous, as R-nodes send it.
        """
        strides = source_stride // _STRIDE_UNIT, target_stride // _STRIDE_UNIT
        assert not any(n % _STRIDE_UNIT for n in (source_stride, target_stride, plane_bytes))
        self._copy((max_moves, n_planes), _PAGE_THREADS, stream, (moves, counts), (plane_bytes, *strides))


def definitions(layer: PagedLayer, shape: BlockShape) -> dict[str, int]:
    """What ATTENTION_SOURCES are compiled with."""
    return {
        "FD_FORMAT": _FORMATS[layer.kv_dtype],
        "FD_HEAD_SIZE": layer.head_size,
        "FD_ACT": ACT_DTYPES.index(layer.act_dtype),
        "FD_HADAMARD": int(not layer.hadamard),
        "FD_GROUP": layer.group,
        "FD_WARPS": shape.warps,
        "FD_STAGES": shape.stages,
    }


def shared_bytes(layer: PagedLayer, shape: BlockShape) -> int:
    """Bytes of dynamic shared memory of a block of fd_attend: WARPS * RING of tiles.cu."""
    int8, columns = layer.kv_dtype == "int8", -(-layer.head_size // _LANES)
    lines = min(layer.head_size, 128 if int8 else 64) // (4 if int8 else 2) + int8
    k = 2 * lines * _LINE + (_SLAB * 4 if int8 else 0)
    v = (2 if layer.kv_dtype == "fp16" else min(columns, 4 if int8 else 2)) * (16 if int8 else 32) * _LINE
    partial = _queries(layer) * (layer.head_size + 2) * 4
    return shape.warps * max(shape.stages * max(k, v), -(-partial // _LINE) * _LINE)


def choose_shape(layer: PagedLayer, limits: DeviceLimits) -> BlockShape:
    """The largest blocks of which a device runs two on a multiprocessor, or else one."""
    for per_multiprocessor in (_MOST_RESIDENT, 1):
        for warps, stages in ((4, 3), (4, 2), (2, 3), (2, 2), (1, 2)):
            shape = BlockShape(warps, stages, limits.multiprocessors * per_multiprocessor)
            shared = shared_bytes(layer, shape)
            fits = per_multiprocessor * (shared + _RESERVED_SHARED) <= limits.multiprocessor_shared_bytes
            if fits and shared <= limits.shared_bytes:
                return shape
    raise ValueError(f"a multiprocessor with {limits.shared_bytes} bytes of shared memory is too small")


def _shape_for(layer: PagedLayer, device: int) -> BlockShape:
    """The blocks of a layer's kernels on a device. Raises KernelError, and ValueError for an unsupported layer."""
    limits = device_limits(device)
    if fault := unsupported(layer, limits.capability):
        raise ValueError(fault)
    return choose_shape(layer, limits)


def _queries(layer: PagedLayer) -> int:
    """Queries of a block of fd_attend."""
    return 8 if layer.group <= 8 else 16


def _bits(x: float) -> int:
    """The bits of an fp32 number."""
    return int(np.float32(x).view(np.uint32))
