"""StreamRows: the rows of a step whose layers a CUDA stream rings and waits for, without a thread of the host.

Each call puts operations into a stream: kernels that move rows between the S-Part's tensors and the slots, in host
memory that is mapped into the device, and the layer words, which start every step at 0. All of them can be captured in
a graph: no address and no value changes from step to step. Tables tell the kernels where each row belongs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fastdecode.kernels.gpu.cupy_kernels import Launch, load_kernels
from fastdecode.region.contract import REPLY_OFFSET, REQUEST_OFFSET
from fastdecode.spart.exchange.base import LinkRows, held_region
from fastdecode.spart.exchange.driver import Driver
from fastdecode.spart.exchange_kernels import CHUNK_BYTES, ROW_THREADS, SOURCE, RowAddresses, SlotRows, row_addresses
from fastdecode.transports.base import DataPath


@dataclass(frozen=True, slots=True)
class Gate:
    """The layer words of a slot, by their addresses on the device."""

    request: int
    reply: int


class MappedMemory:
    """Memory of the host, registered with the driver until `close` is called or this object goes away. The object keeps
    the memory mapped."""

    def __init__(self, driver: Driver, memory: npt.NDArray[np.uint8]):
        """Raises DriverError."""
        self.device = driver.register(memory.ctypes.data, memory.nbytes)
        self.close = weakref.finalize(self, _release, driver, memory)
        self.close.atexit = False


class MappedRegion(MappedMemory):
    """A link's region."""

    def __init__(self, driver: Driver, link: DataPath):
        """Raises DriverError."""
        super().__init__(driver, held_region(link))
        self.layout = link.layout

    def gate(self, slot: int) -> Gate:
        start = self.device + self.layout.slot(slot)
        return Gate(start + REQUEST_OFFSET, start + REPLY_OFFSET)

    def addresses(self, slot: int, rows: LinkRows) -> SlotRows:
        y = self.layout
        start = self.device + y.slot(slot)
        return SlotRows(start + y.q, start + y.kv, start + y.o, rows.attending, rows.appended, rows.partial)


def _release(driver: Driver, memory: npt.NDArray[np.uint8]) -> None:
    driver.unregister(memory.ctypes.data)


def step_addresses(regions: Sequence[MappedRegion], slot: int, rows: Sequence[LinkRows]) -> RowAddresses:
    """Where the rows of a step are in the slots; `regions` has the region of each link of `rows`."""
    y = regions[0].layout
    slots = [region.addresses(slot, link_rows) for region, link_rows in zip(regions, rows, strict=True)]
    return row_addresses(slots, y.q_row_bytes, y.kv_row_bytes, y.o_row_bytes)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The functions of rows.cu, loaded."""

    driver: Driver
    pack: Launch
    unpack: Launch

    @classmethod
    def load(cls, driver: Driver, device: int) -> Kernels:
        """Raises KernelError."""
        names = ("fd_pack_rows", "fd_unpack_rows")
        return cls(driver, *load_kernels([SOURCE], {"FD_ROW_THREADS": ROW_THREADS}, names, device))


class StreamRows:
    """A RowExchange whose `post` and `wait` are operations of a stream. `q`, `kv` and `o` have as many rows as the
    largest step that is run on them."""

    def __init__(
        self,
        kernels: Kernels,
        stream: int,
        gates: Sequence[Gate],
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        tables: dict[str, torch.Tensor],
    ):
        """`stream` is a stream's handle; `gates` are the slots of the links that take part; `rows` are the tensors `q`,
        `kv` and `o`. `tables` are the fields of RowAddresses on the device; the kernels read them when they run."""
        self._kernels, self._driver, self._stream, self._gates = kernels, kernels.driver, stream, gates
        self.q, self.kv, self.o = rows
        self._tables = {name: table.data_ptr() for name, table in tables.items()}
        self._chunks = [x.shape[1] * x.element_size() // CHUNK_BYTES for x in rows]
        self._asked = 0

    def post(self, layer: int, timeout: float = 0.0) -> None:
        """Write the layer's rows into the slots, then the words that ask for it."""
        tables = self._tables
        self._kernels.pack(
            (len(self.kv), 2),
            ROW_THREADS,
            self._stream,
            (self.q.data_ptr(), self.kv.data_ptr(), tables["q"], tables["kv"], tables["counts"]),
            self._chunks[:2],
        )
        self._asked = layer + 1
        for gate in self._gates:
            self._driver.write_word(self._stream, gate.request, self._asked)

    def wait(self, timeout: float = 0.0) -> None:
        """Wait for the words that answer the layer, then read the O rows from the slots."""
        for gate in self._gates:
            self._driver.wait_word(self._stream, gate.reply, self._asked)
        self._kernels.unpack(
            (len(self.o), 1),
            ROW_THREADS,
            self._stream,
            (self.o.data_ptr(), self._tables["o"], self._tables["counts"]),
            self._chunks[2:],
        )
