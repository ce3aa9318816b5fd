"""RPart: the R-Part of one layer. The R-engine runs in this process and is called as an S-node calls it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from fastdecode.bench.shape import Data, Shape
from fastdecode.kernels._native import REngine, page_bytes
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE, blocks_for
from fastdecode.region.geometry import Geometry, geometry_tuple
from fastdecode.region.region import Region
from fastdecode.spart.int4.balance import hadamard_by_s_node
from fastdecode.transports._native import Port
from fastdecode.transports.base import DataPath

_FILL_PAGES = 32  # appended by one call: a slot has room for 4096 rows of the heads of DeepSeek-V3
TIMEOUT = 60.0  # seconds for a call
_TAG = 1


class RPart:
    """Sequences that make up at least `kv_bytes` of KV, cached by an R-engine whose threads are pinned to `cpus`.

    The sequences grow page by page in a random order, so their pages lie as the R-node's allocator lays them: in runs
    of adjacent pages, with the runs shuffled. With `scattered` the free pages are single pages everywhere, so no page
    of a sequence is adjacent to its last one: the worst case for a cache.

    No thread spins: the caller sleeps while the engine works and the other way round, so neither takes cores of the
    other.
    """

    def __init__(
        self,
        shape: Shape,
        kv_dtype: str,
        kv_bytes: int,
        cpus: Sequence[int],
        isa: str | None = None,
        progress: bool = True,
        scattered: bool = False,
    ):
        """Raises ValueError, MemoryError."""
        self.shape, self.kv_dtype, self._scattered = shape, kv_dtype, scattered
        heads = shape.q_heads, shape.kv_heads, shape.head_size
        index = shape.index_heads, shape.index_size, shape.index_topk
        geometry = Geometry(1, 1, 1, *heads, "fp16", shape.v_size, shape.v_in_k, *index)
        selections = (int(shape.index_heads > 0),)  # a layer with an indexer of its own
        one_page = page_bytes(geometry_tuple(geometry), KV_DTYPES.index(kv_dtype), selections=selections)
        self.sequences = shape.sequences(one_page / PAGE_TOKENS, kv_bytes)
        n_pages = self.sequences * blocks_for(shape.context)
        self.kv_bytes = n_pages * one_page
        rows = max(self.sequences, _FILL_PAGES * PAGE_TOKENS)
        geometry = replace(geometry, max_rows=rows)
        self._region = Region.create(geometry)
        numbers = geometry_tuple(geometry)
        self._engine = REngine(len(cpus), self.kv_bytes, isa, cpus, 0)
        self.isa, self.threads = self._engine.isa, self._engine.threads
        self._link = self._engine.add_link(
            self._region.view,
            numbers,
            KV_DTYPES.index(kv_dtype),
            n_pages,
            self.sequences + scattered * n_pages,
            shape.head_size**-0.5,
            (0,),
            selections=selections,
            hadamard=hadamard_by_s_node(kv_dtype),
        )
        self._port = Port(self._region.view, numbers, 0, wake_fd=self._link.eventfd)
        self._path = DataPath("the R-engine", self._region, self._port)
        self._table = np.zeros(self.sequences, ROW_DTYPE)
        self._table["seq_index"] = np.arange(self.sequences)
        self._table["tag"], self._table["pos"] = _TAG, shape.context - 1
        self._table["n_rows"], self._table["flags"] = 1, ROW_ATTEND
        self._fill(Data.of(shape), progress)

    def close(self) -> None:
        self._port.close()
        self._link.close()
        self._engine.close()
        self._region.close()

    def _rows(self, offset: int, n: int, row_bytes: int) -> np.ndarray:
        """A view of `n` rows of the slot, fp16 [n, elements of a row]."""
        start = self._region.layout.slot(0) + offset
        raw = np.frombuffer(self._region.view[start : start + n * row_bytes], np.float16)
        return raw.reshape(n, row_bytes // 2)

    def run_pages(self) -> float:
        """The average number of adjacent pages of a sequence."""
        lists = [self._link.pages(seq_index, _TAG) for seq_index in range(self.sequences)]
        jumps = sum(b != a + 1 for pages in lists for a, b in itertools.pairwise(pages))
        return sum(map(len, lists)) / (len(lists) + jumps)

    def _occupy(self, n_pages: int) -> list[int]:
        """Fill the cache with `n_pages` sequences of one token each; returns their indexes, behind the measured
        ones."""
        indexes, step_rows = list(range(self.sequences, self.sequences + n_pages)), _FILL_PAGES * PAGE_TOKENS
        for i in range(0, n_pages, step_rows):
            some = indexes[i : i + step_rows]
            table = np.zeros(len(some), ROW_DTYPE)
            table["seq_index"], table["tag"], table["n_rows"] = some, _TAG, 1
            self._step(table)
        return indexes

    def _fill(self, data: Data, progress: bool) -> None:
        """Cache all tokens but the last of every sequence, page by page in a random order of sequences."""
        y, shape, cached = self._region.layout, self.shape, self.shape.context - 1
        parts = [data.k, data.index_keys] if shape.v_in_k else [data.k, data.v]
        source = np.concatenate([part.reshape(shape.context, -1) for part in parts], axis=1)
        rng = np.random.default_rng(0)
        turns = rng.permutation(np.repeat(np.arange(self.sequences), blocks_for(cached)))
        lengths = np.zeros(self.sequences, np.int64)
        kv = self._rows(y.kv, _FILL_PAGES * PAGE_TOKENS, y.kv_row_bytes)
        occupying = rng.permutation(self._occupy(len(turns))).tolist() if self._scattered else []
        bar = tqdm(total=len(turns), desc=f"filling {self.kv_dtype}", unit="page", leave=False, disable=not progress)
        entries: dict[int, tuple[int, int]] = {}  # sequence index -> position, rows
        for turn, seq_index in enumerate(turns.tolist()):
            n = min(PAGE_TOKENS, cached - int(lengths[seq_index]))
            entries[seq_index] = (int(lengths[seq_index]), n)
            lengths[seq_index] += n
            last = turn + 1 == len(turns)
            if last or len(entries) == _FILL_PAGES or turns[turn + 1] in entries:  # a call names a sequence once
                table, row = np.zeros(len(entries), ROW_DTYPE), 0
                for i, (s, (pos, n_rows)) in enumerate(entries.items()):
                    kv[row : row + n_rows] = source[pos : pos + n_rows]
                    table[i] = (s, _TAG, pos, n_rows, 0, 0)
                    row += n_rows
                for _ in entries if occupying else ():
                    self._link.free(occupying.pop(), _TAG)
                self._step(table)
                bar.update(len(entries))
                entries.clear()
        bar.close()
        kv = self._rows(y.kv, self.sequences, y.kv_row_bytes)
        kv[:] = source[-1]
        q = np.concatenate([part.reshape(-1) for part in (data.q, data.index_q, data.index_weights)])
        self._rows(y.q, self.sequences, y.q_row_bytes)[:, : len(q)] = q

    def _step(self, table: np.ndarray) -> int:
        """Run a step of one layer; returns how many bytes of KV the engine read. Raises CallRefused."""
        self._path.arm(0, table)
        self._path.wait(0, TIMEOUT)
        self._path.ring(0, 0)
        self._path.wait(0, TIMEOUT)
        cost = self._path.disarm(0)
        if cost is None:
            raise RuntimeError("the R-engine has not finished a step")
        return cost.kv_bytes

    def layer(self) -> tuple[float, int]:
        """Run one layer as a step of its own; returns the seconds from arming to the reply and the bytes of KV read."""
        n = self.sequences
        start = time.perf_counter()
        kv_bytes = self._step(self._table)
        seconds = time.perf_counter() - start
        for seq_index in range(n):
            self._link.trim(seq_index, _TAG, self.shape.context - 1)
        return seconds, kv_bytes

    def output(self) -> np.ndarray:
        """O of all sequences after `layer`, [sequences, q_heads, v_size] fp16."""
        y = self._region.layout
        o = self._rows(y.o, self.sequences, y.o_row_bytes)
        return o.reshape(self.sequences, self.shape.q_heads, self.shape.v_size).copy()
