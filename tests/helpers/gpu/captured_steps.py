"""Steps of a mini-batch that a captured CUDA graph drives by itself, over links to real R-nodes.

A graph has, for each layer, what StreamRows puts into a stream: the kernel that packs Q and KV rows into the slots, the
words that ask the links for the layer, the waits for their replies, and the kernel that fetches the O rows. It is
captured once and replayed for steps of every size up to its own. In place of a model there are copies of given rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from wire.link_driver import HANG_S

from fastdecode.region.contract import POISON, ROW_ATTEND, ROW_DTYPE
from fastdecode.region.geometry import Geometry
from fastdecode.spart.exchange.stream_rows import MappedRegion, StreamRows
from fastdecode.spart.exchange_kernels import row_addresses
from fastdecode.transports._native import Proxy
from fastdecode.transports.base import Link, StepCost
from gpu.cuda_driver import Cuda

MINI_BATCHES = 8
#: A slot for the stream of each mini-batch, and one for the host.
GEOMETRY = Geometry(
    n_slots=MINI_BATCHES + 1, max_rows=16, n_layers=3, n_q_heads=4, n_kv_heads=2, head_size=16, act_dtype="fp32"
)
HOST_SLOT = MINI_BATCHES
TURNS = 8  # tags in a row that have sequences of their own, so that a test need not free them after each
MAX_SEQS = TURNS * 2 * GEOMETRY.n_slots  # see Payload.table
ROWS = 8  # of a graph, attending and appended
DTYPES = {"fp32": np.float32, "fp16": np.float16}


@dataclass(frozen=True)
class Payload:
    """A step's rows, [layer, row, elements], and how many of them each link has."""

    q: np.ndarray
    kv: np.ndarray
    attending: list[slice]
    appended: list[slice]

    @classmethod
    def random(cls, n_links: int, seed: int) -> Payload:
        """One or two attending rows on each link, and up to two that are only appended."""
        rng = np.random.default_rng(seed)
        return cls.of(GEOMETRY, n_links, [*rng.integers(1, 3, n_links), *rng.integers(0, 3, n_links)], seed)

    @classmethod
    def of(cls, g: Geometry, n_links: int, sizes: Sequence[int], seed: int) -> Payload:
        """`sizes` are the attending rows of each link, then the appended ones."""
        rng = np.random.default_rng(seed)
        bounds = np.cumsum([0, *sizes]).tolist()
        parts = list(itertools.starmap(slice, itertools.pairwise(bounds)))
        q = rng.standard_normal((g.n_layers, bounds[n_links], g.n_q_heads * g.head_size), np.float32)
        kv = rng.standard_normal((g.n_layers, bounds[-1], 2 * g.n_kv_heads * g.head_size), np.float32)
        dtype = DTYPES[g.act_dtype]
        return cls(q.astype(dtype), kv.astype(dtype), parts[:n_links], parts[n_links:])

    def table(self, link: int, slot: int, tag: int) -> np.ndarray:
        """The link's row table: one sequence that attends, and one whose rows are only appended."""
        n, more = (part[link].stop - part[link].start for part in (self.attending, self.appended))
        index = 2 * (tag % TURNS * GEOMETRY.n_slots + slot)
        rows = [(index, tag, 0, n, ROW_ATTEND, 0)] + ([(index + 1, tag, 0, more, 0, 0)] if more else [])
        return np.array(rows, ROW_DTYPE)

    def handles(self, link: int, slot: int, tag: int) -> list[tuple[int, int]]:
        return [(int(row["seq_index"]), tag) for row in self.table(link, slot, tag)]


def by_host(links: Sequence[Link], payload: Payload, tag: int) -> np.ndarray:
    """The O rows of a step that the host drives, [layer, attending row, elements]."""
    o = np.empty_like(payload.q)
    for i, link in enumerate(links):
        y, memory = link.layout, np.frombuffer(link.region, np.uint8)
        slot, attending, appended = y.slot(HOST_SLOT), payload.attending[i], payload.appended[i]
        link.arm(HOST_SLOT, payload.table(i, HOST_SLOT, tag))
        link.wait(HOST_SLOT, HANG_S)
        for layer in range(len(payload.q)):
            q = payload.q[layer, attending]
            kv = np.concatenate([payload.kv[layer, attending], payload.kv[layer, appended]])
            memory[slot + y.q : slot + y.q + q.nbytes] = q.view(np.uint8).ravel()
            memory[slot + y.kv : slot + y.kv + kv.nbytes] = kv.view(np.uint8).ravel()
            link.ring(HOST_SLOT, layer)
            link.wait(HOST_SLOT, HANG_S)
            o[layer, attending] = memory[slot + y.o : slot + y.o + q.nbytes].view(q.dtype).reshape(q.shape)
        assert link.disarm(HOST_SLOT) is not None
    return o


@dataclass(frozen=True)
class Ranges:
    """Which rows of a step are a link's, as LinkRows names them."""

    attending: slice
    appended: slice
    partial: tuple[slice, ...] = ()


@dataclass(frozen=True)
class DeviceRows:
    """Rows in the device's memory, as StreamRows sees a tensor."""

    pointer: int
    shape: tuple[int, int]
    itemsize: int

    def __len__(self) -> int:
        return self.shape[0]

    def data_ptr(self) -> int:
        return self.pointer

    def element_size(self) -> int:
        return self.itemsize


class CapturedStep:
    """One slot of each link, driven by a graph on a stream of its own.

    Before each layer the graph waits for the host's `gate` to pass the layer's number: so a test can hold it there.
    """

    def __init__(
        self,
        cuda: Cuda,
        links: Sequence[Link],
        regions: Sequence[MappedRegion],
        slot: int,
        rows: int = ROWS,
        left_out: str = "",
    ):
        """Steps have up to `rows` rows. `left_out` is "wait": no reply is waited for."""
        self.cuda, self.links, self.slot, self._regions = cuda, links, slot, regions
        self.stream = cuda.call("cuStreamCreate", 1)
        self.event = cuda.call("cuEventCreate", 2)
        g, y = links[0].geometry, links[0].layout
        itemsize = np.dtype(DTYPES[g.act_dtype]).itemsize
        self._rows, q_bytes, kv_bytes = rows, rows * y.q_row_bytes, rows * y.kv_row_bytes
        #: The upload: q and kv of all layers, the tables of q, kv and o, and the counts.
        sizes = [g.n_layers * q_bytes, g.n_layers * kv_bytes, 8 * rows, 8 * rows, 8 * rows, 16]
        self._at = np.cumsum([0, *sizes]).tolist()
        self.upload, self.download = cuda.pinned(self._at[-1]), cuda.pinned(sizes[0])
        self.gate, opened = (cuda.pinned(64).view(np.uint32) for _ in range(2))
        self.gate[0], opened[0] = g.n_layers, POISON
        gate, always_open = (int(cuda.call("cuMemHostGetDevicePointer", x.ctypes.data, 0)) for x in (self.gate, opened))
        inside, o = (int(cuda.call("cuMemAlloc", n_bytes)) for n_bytes in (self._at[-1], sizes[0]))
        q, kv, *tables = (DeviceRows(inside + at, (rows, 1), itemsize) for at in self._at[:-1])
        parts = [
            DeviceRows(int(cuda.call("cuMemAlloc", n_bytes)), (rows, n_bytes // rows // itemsize), itemsize)
            for n_bytes in (q_bytes, kv_bytes, q_bytes)
        ]
        gates = [region.gate(slot) for region in regions]
        if left_out == "wait":
            gates = [replace(each, reply=always_open) for each in gates]
        driver, stream = cuda.product, int(self.stream)
        kernels = cuda.kernels()
        exchange = StreamRows(
            kernels, stream, gates, tuple(parts), dict(zip(("q", "kv", "o", "counts"), tables, strict=True))
        )

        def copy(to: int, source: int, n_bytes: int) -> None:
            cuda.call("cuMemcpyDtoDAsync", to, source, n_bytes, self.stream)

        def work() -> None:
            cuda.call("cuMemcpyHtoDAsync", inside, self.upload.ctypes.data, self.upload.nbytes, self.stream)
            for layer in range(g.n_layers):
                driver.wait_word(stream, gate, layer + 1)
                copy(parts[0].pointer, q.pointer + layer * q_bytes, q_bytes)
                copy(parts[1].pointer, kv.pointer + layer * kv_bytes, kv_bytes)
                exchange.post(layer)
                exchange.wait()
                copy(o + layer * q_bytes, parts[2].pointer, q_bytes)
            cuda.call("cuMemcpyDtoHAsync", self.download.ctypes.data, o, self.download.nbytes, self.stream)

        self._graph = cuda.capture(self.stream, work)

    def arm(self, payload: Payload, tag: int) -> None:
        """Arm the step on every link."""
        for i, link in enumerate(self.links):
            link.arm(self.slot, payload.table(i, self.slot, tag))

    def begin(self, proxy: Proxy) -> None:
        """Let the device drive the step, once every R-node has planned it."""
        for link in self.links:
            link.wait(self.slot, HANG_S)
            proxy.begin(link.port, self.slot, HANG_S)

    def launch(self, payload: Payload) -> None:
        """Fill the upload and replay the graph."""
        y, layers = self.links[0].layout, self.links[0].geometry.n_layers
        parts = [self.upload[a:b] for a, b in itertools.pairwise(self._at)]
        for part, rows, n_bytes in ((parts[0], payload.q, y.q_row_bytes), (parts[1], payload.kv, y.kv_row_bytes)):
            part.reshape(layers, self._rows, n_bytes)[:, : rows.shape[1]] = rows.view(np.uint8)
        each = zip(self._regions, payload.attending, payload.appended, strict=True)
        slots = [region.addresses(self.slot, Ranges(*ranges)) for region, *ranges in each]
        table = row_addresses(slots, y.q_row_bytes, y.kv_row_bytes, y.o_row_bytes)
        for part, numbers in zip(parts[2:], (table.q, table.kv, table.o, table.counts), strict=True):
            part[: numbers.nbytes] = numbers.view(np.uint8)
        self.download[:] = 0xFF  # NaN, until the copy at the graph's end has run
        self.cuda.call("cuGraphLaunch", self._graph, self.stream)
        self.cuda.call("cuEventRecord", self.event, self.stream)

    def o(self, payload: Payload) -> np.ndarray:
        """The O rows as they are in the host's memory now, [layer, attending row, elements]."""
        rows = self.download.view(payload.q.dtype).reshape(len(payload.q), self._rows, -1)
        return rows[:, : payload.q.shape[1]].copy()

    def finish(self) -> bool:
        return self.cuda.finish(self.stream, HANG_S)

    def end(self, proxy: Proxy) -> list[StepCost | None]:
        """End the step on every link. Raises ConnectionError for a link that is down."""
        outcomes = [proxy.end(link.port, self.slot) for link in self.links]
        assert all(outcome is True for outcome in outcomes), outcomes
        return [link.disarm(self.slot) for link in self.links]
