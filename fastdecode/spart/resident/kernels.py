"""ResidentKernels: the kernels of kernels/gpu for all layers of an arena, and the tables that a step gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from fastdecode.kernels.gpu.page_kernels import LayerPages, PageCopier, PagedLayer, PagedRows, PageKernels
from fastdecode.spart.resident.arena import PageArena
from fastdecode.spart.resident.layers import attention_layers


@dataclass(frozen=True, slots=True)
class ResidentTables:
    """A step's tables on the device."""

    rows: torch.Tensor  # int32 [most rows * 4], PagedRows.rows
    counts: torch.Tensor  # int32 [2]: attending rows, and all rows
    pages: torch.Tensor  # int32 [sections, sequences, blocks]
    tokens: int  # of the longest sequence, at most
    attending: bool
    scratch: torch.Tensor | None = None  # zeros for the kernels of the stream; None: those of ResidentKernels
    #: int64 [attending rows]: the address of an R-node's answer to each row, for PageKernels.merge, or 0. None: no row
    #: attends to a remote prefix.
    answers: torch.Tensor | None = None
    lse: torch.Tensor | None = None  # fp32 [attending rows, query heads], which `answers` needs

    @property
    def paged_rows(self) -> PagedRows:
        n = len(self.rows) // 4
        return PagedRows(self.rows.data_ptr(), self.counts.data_ptr(), n if self.attending else 0, n)


class ResidentKernels:
    """Reads and writes the pages of an arena, in the stream that torch computes in."""

    def __init__(
        self,
        arena: PageArena,
        load: Callable[[PagedLayer], PageKernels],
        copies: PageCopier,
        current_stream: Callable[[], int],
    ):
        """`current_stream` returns the handle of that stream. Raises what `load` raises."""
        layers = attention_layers(arena.hello)
        loaded = {layer: load(layer) for layer in dict.fromkeys(layers)}
        self._arena, self._of_layer = arena, [loaded[layer] for layer in layers]
        self._most_heads = max(layer.n_q_heads for layer in layers)
        self._heads_differ = len({layer.n_kv_heads for layer in layers}) > 1
        self._copies, self._current_stream = copies, current_stream
        self._scratch: dict[int, tuple[torch.Tensor, int]] = {}  # by stream: the memory, and the counters in use there
        options, n = arena.hello.layers, len(layers)
        self._sinks = self._uploaded(options.sinks, n)
        slopes = self._uploaded(options.slopes, 1)
        self._slopes = None if slopes is None else slopes[0]  # fp32 [query heads], of ALiBi; None: there are none

    @classmethod
    def on_gpu(cls, arena: PageArena) -> ResidentKernels:
        """The kernels of a CUDA device. Raises KernelError, and ValueError for layers that they do not serve."""
        device = arena.memory.device
        index = device.index or 0
        return cls(
            arena,
            partial(PageKernels.load, device=index),
            PageCopier.load(index),
            lambda: int(torch.cuda.current_stream(device).cuda_stream),
        )

    def copy(self, moves: torch.Tensor, count: torch.Tensor) -> None:
        """Copy pages; `moves`, int64 [moves * 2], are the addresses of pages to read and to write, in plane 0, and
        `count`, int32 [1], is their number."""
        lists, stride = self._arena.lists, self._arena.plane_stride
        self._copies.copy(
            self._current_stream(),
            moves.data_ptr(),
            count.data_ptr(),
            len(moves) // 2,
            lists.n_planes,
            lists.plane_bytes,
            stride,
            stride,
        )

    def pass_layer(
        self, layer: int, q: torch.Tensor, kv: torch.Tensor, o: torch.Tensor, tables: ResidentTables
    ) -> None:
        """Append K and V of a layer's rows `kv`, and let the rows `q` attend, whose results are `o`."""
        arena, kernels, stream, rows = self._arena, self._of_layer[layer], self._current_stream(), tables.paged_rows
        table = tables.pages[arena.section(layer)]
        pages = LayerPages(arena.chunks(layer), arena.lists.plane_bytes, table.data_ptr(), table.shape[1])
        if arena.kv_layers[layer] == layer:
            kernels.append(stream, kv.data_ptr(), kv.stride(0), rows, pages)
        if tables.attending:
            splits = kernels.splits(rows, tables.tokens)
            scratch = tables.scratch
            if scratch is None:
                scratch = self._scratch_of(stream, kernels.scratch_bytes(rows, splits), kernels.n_counters(rows))
            elif self._heads_differ:
                scratch[: 4 * kernels.n_counters(rows)].zero_()
            kernels.attend(
                stream,
                q.data_ptr(),
                q.stride(0),
                o.data_ptr(),
                o.stride(0),
                rows,
                pages,
                scratch.data_ptr(),
                splits,
                lse=0 if tables.lse is None else tables.lse.data_ptr(),
                sinks=self._sinks_of(layer),
                slopes=0 if self._slopes is None else self._slopes.data_ptr(),
            )

    def merge(self, layer: int, o: torch.Tensor, tables: ResidentTables) -> None:
        """Merge the answers `o` of `pass_layer` with those of R-nodes, in place, if the tables have any."""
        if tables.answers is None or tables.lse is None:
            return
        self._of_layer[layer].merge(
            self._current_stream(),
            o.data_ptr(),
            o.stride(0),
            tables.lse.data_ptr(),
            tables.answers.data_ptr(),
            tables.paged_rows,
            self._sinks_of(layer),
        )

    def new_lse(self, n_rows: int) -> torch.Tensor:
        """Memory for ResidentTables.lse, with room for every layer's heads."""
        return torch.empty(n_rows, self._most_heads, dtype=torch.float32, device=self._arena.memory.device)

    def _sinks_of(self, layer: int) -> int:
        return 0 if self._sinks is None else self._sinks[layer].data_ptr()

    def _uploaded(self, values: bytes, rows: int) -> torch.Tensor | None:
        """fp32 numbers [rows, ...] on the device; None for none."""
        if not values:
            return None
        return torch.frombuffer(bytearray(values), dtype=torch.float32).view(rows, -1).to(self._arena.memory.device)

    def n_counters(self, n_rows: int) -> int:
        """The most counters at the beginning of `ResidentTables.scratch` that a layer uses for a table of `n_rows`."""
        return max(kernels.n_counters(PagedRows(0, 0, n_rows, n_rows)) for kernels in self._of_layer)

    def scratch_bytes(self, n_rows: int, tokens: int) -> int:
        """Bytes of `ResidentTables.scratch` for a table of `n_rows` rows of sequences of up to `tokens` tokens."""
        rows = PagedRows(0, 0, n_rows, n_rows)
        return max(kernels.scratch_bytes(rows, kernels.splits(rows, tokens)) for kernels in self._of_layer)

    def _scratch_of(self, stream: int, n_bytes: int, n_counters: int) -> torch.Tensor:
        """At least `n_bytes` bytes of memory for the kernels of a stream. The kernels leave their counters at zero, but
        where more counters are wanted than the last time, partial results of that time lie."""
        scratch, before = self._scratch.get(stream, (None, 0))
        if scratch is None or scratch.nbytes < n_bytes:
            scratch = torch.zeros(n_bytes, dtype=torch.uint8, device=self._arena.memory.device)
        elif n_counters > before:
            scratch[: 4 * n_counters].zero_()
        self._scratch[stream] = scratch, n_counters
        return scratch
