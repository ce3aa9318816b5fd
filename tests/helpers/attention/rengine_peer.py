"""The S side of a link in plain Python over the bytes of a region, and float64 attention to compare the R-engine with.

Its structs and offsets are written from the comments of region/region.h alone, so that the layout is checked from
outside; only the constants are region.h's own.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from fastdecode.region._native import init_region_header
from fastdecode.region.contract import (
    ACT_DTYPES,
    HEAD_SIZE_UNIT,
    KV_DTYPES,
    POISON,
    REGION_PAGE,
    ROW_ATTEND,
    ROW_SLIDE,
    ROW_TRIM,
    Status,
)

FP32, FP16, BF16 = ACT_DTYPES.index("fp32"), ACT_DTYPES.index("fp16"), ACT_DTYPES.index("bf16")
KV_FP32, KV_FP16, KV_BF16 = KV_DTYPES.index("fp32"), KV_DTYPES.index("fp16"), KV_DTYPES.index("bf16")
KV_INT8, KV_INT4, KV_INT8_INT4 = KV_DTYPES.index("int8"), KV_DTYPES.index("int4"), KV_DTYPES.index("int8-int4")

#: LayerOptions.selections
SELECT_OWN, SELECT_SHARED = 1, 2

_ARM = struct.Struct("<QIIII10I")
_ROW = struct.Struct("<6I")
_REPORT = struct.Struct("<QIIQQ224s")
# Offsets within a slot's head: each word and each header begins a cache line of its own.
_ARM_BELL, _ARM_AT, _LAYER_REQUEST, _ARMED_BELL, _LAYER_REPLY, _REPORT_AT = 0, 64, 128, 192, 256, 320
_HEAD = 640
_ASLEEP = 64


@dataclass(frozen=True)
class Geometry:
    n_slots: int = 2
    max_rows: int = 32
    n_layers: int = 2
    n_q_heads: int = 4
    n_kv_heads: int = 2
    head_size: int = 16
    act_dtype: int = FP32
    v_size: int = 0  # 0: head_size
    v_in_k: int = 0  # 1: V is the first elements of K
    index_heads: int = 0  # of an indexer, whose heads have `index_size` elements and which selects `index_topk` tokens
    index_size: int = 0
    index_topk: int = 0

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Query heads, KV heads, size of a K head, size of a V head."""
        return self.n_q_heads, self.n_kv_heads, self.head_size, self.v_size or self.head_size

    def tuple(self) -> tuple[int, ...]:
        return (
            self.n_slots,
            self.max_rows,
            self.n_layers,
            self.n_q_heads,
            self.n_kv_heads,
            self.head_size,
            self.act_dtype,
            self.heads[3],
            self.v_in_k,
            self.index_heads,
            self.index_size,
            self.index_topk,
        )


@dataclass(frozen=True)
class Reply:
    """The answer to a layer: the report of a step that was refused, has failed or is over; else one without totals."""

    number: int
    status: int
    n_layers: int
    busy_ns: int
    kv_bytes: int
    message: str


def _pages(n: int) -> int:
    return -(-n // REGION_PAGE) * REGION_PAGE


def encode(x: np.ndarray, act_dtype: int) -> bytes:
    """fp32 to activation dtype, round to nearest even."""
    if act_dtype == FP32:
        return x.astype("<f4").tobytes()
    if act_dtype == FP16:
        return x.astype("<f2").tobytes()
    bits = np.ascontiguousarray(x, "<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def decode(data: bytes, act_dtype: int) -> np.ndarray:
    if act_dtype == FP32:
        return np.frombuffer(data, "<f4").astype(np.float64)
    if act_dtype == FP16:
        return np.frombuffer(data, "<f2").astype(np.float64)
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)


class Peer:
    """Arms steps and rings layers in a region, and reads the answers. `wake_fd`: eventfd of the R-engine's end."""

    def __init__(self, g: Geometry, fd: int | None = None):
        self.g = g
        elem = 4 if g.act_dtype == FP32 else 2
        n_q, n_kv, k_size, v_size = g.heads
        index_q = g.index_heads * g.index_size + -(-g.index_heads // HEAD_SIZE_UNIT) * HEAD_SIZE_UNIT
        self.q_row, self.o_row = (n_q * k_size + index_q) * elem, n_q * v_size * elem
        self.kv_row = (n_kv * (k_size if g.v_in_k else k_size + v_size) + g.index_size) * elem
        self.q_at = _pages(_HEAD + g.max_rows * 24)
        self.kv_at = _pages(self.q_at + g.max_rows * self.q_row)
        self.o_at = _pages(self.kv_at + g.max_rows * self.kv_row)
        self.slot_bytes = _pages(self.o_at + g.max_rows * self.o_row)
        self.bytes = REGION_PAGE + g.n_slots * self.slot_bytes
        if fd is not None and os.fstat(fd).st_size < self.bytes:
            os.ftruncate(fd, self.bytes)
        self.map = mmap.mmap(-1 if fd is None else fd, self.bytes)
        self.words = np.frombuffer(self.map, "<u8")
        self.halves = np.frombuffer(self.map, "<u4")
        self.numbers = [0] * g.n_slots  # of the last step armed in each slot
        self.n_layers = [0] * g.n_slots  # of that step
        self.refused: dict[int, Reply] = {}
        self.wake_fd = -1

    def at(self, slot: int) -> int:
        return REGION_PAGE + slot * self.slot_bytes

    def put(self, offset: int, data: bytes) -> None:
        self.map[offset : offset + len(data)] = data

    def header(self, slot: int, number: int, *counts: int, reserved: int = 0) -> None:
        """counts: entries, rows, attending rows, and layers if not all of the link."""
        *rows, self.n_layers[slot] = counts if len(counts) == 4 else (*counts, self.g.n_layers)
        self.put(self.at(slot) + _ARM_AT, _ARM.pack(number, *rows, self.n_layers[slot], reserved, *[0] * 9))

    def table(self, slot: int, rows: list[tuple[int, ...]]) -> None:
        """rows: (seq_index, tag, pos, n_rows, flags[, reserved])."""
        self.put(self.at(slot) + _HEAD, b"".join(_ROW.pack(*r, *[0] * (6 - len(r))) for r in rows))

    def _wake(self) -> None:
        if self.wake_fd >= 0 and self.map[_ASLEEP]:
            os.eventfd_write(self.wake_fd, 1)

    def ring_arm(self, slot: int, number: int) -> None:
        self.words[(self.at(slot) + _ARM_BELL) // 8] = number
        self._wake()

    def ring_layer(self, slot: int, word: int) -> None:
        self.halves[(self.at(slot) + _LAYER_REQUEST) // 4] = word
        self._wake()

    def armed_bell(self, slot: int) -> int:
        return int(self.words[(self.at(slot) + _ARMED_BELL) // 8])

    def layer_reply(self, slot: int) -> int:
        return int(self.halves[(self.at(slot) + _LAYER_REPLY) // 4])

    def report(self, slot: int) -> Reply:
        at = self.at(slot) + _REPORT_AT
        *numbers, text = _REPORT.unpack(self.map[at : at + _REPORT.size])
        return Reply(*numbers, text.split(b"\0")[0].decode())

    def arm(self, slot: int, *counts: int, seconds: float = 20.0) -> Reply:
        """Arm the step whose table is in the slot; `counts` as for `header`. Returns the verdict."""
        self.numbers[slot] += 1
        self.header(slot, self.numbers[slot], *counts)
        self.ring_arm(slot, self.numbers[slot])
        return self.verdict(slot, self.numbers[slot], seconds)

    def verdict(self, slot: int, number: int, seconds: float = 20.0) -> Reply:
        deadline = time.monotonic() + seconds
        while self.armed_bell(slot) != number:
            assert time.monotonic() < deadline, f"no verdict on step {number}"
            time.sleep(0)
        self.halves[(self.at(slot) + _LAYER_REPLY) // 4] = 0
        return self.report(slot)

    def wait(self, slot: int, word: int, seconds: float = 20.0) -> Reply:
        """The answer to the layer request `word`, or the verdict if `post` was refused."""
        if slot in self.refused:
            return self.refused.pop(slot)
        deadline = time.monotonic() + seconds
        while (reply := self.layer_reply(slot)) != word and reply != POISON:
            assert time.monotonic() < deadline, f"no reply to layer request {word}"
            time.sleep(0)
        if reply in (POISON, self.n_layers[slot]):
            return self.report(slot)
        return Reply(self.numbers[slot], Status.OK, reply, 0, 0, "")

    def post(self, slot: int, layer: int, n_entries: int, n_rows: int, n_attend: int, new_step: bool) -> int:
        """Ask for a layer, and arm its step first if it is new. Returns the word to wait for."""
        if new_step:
            verdict = self.arm(slot, n_entries, n_rows, n_attend)
            if verdict.status:
                self.refused[slot] = verdict
                return 0
        self.ring_layer(slot, layer + 1)
        return layer + 1

    def call(self, slot: int, layer: int, n_entries: int, n_rows: int, n_attend: int, new_step: bool) -> Reply:
        return self.wait(slot, self.post(slot, layer, n_entries, n_rows, n_attend, new_step))

    def put_rows(self, slot: int, q: np.ndarray, kv: np.ndarray) -> None:
        """Rows [n, elements]; what is left of a row after them keeps what it had."""
        for first, length, rows in ((self.q_at, self.q_row, q), (self.kv_at, self.kv_row, kv)):
            at, data = self.at(slot) + first, encode(rows, self.g.act_dtype)
            used = len(data) // max(1, len(rows))
            for i in range(len(rows)) if used < length else ():
                self.put(at + i * length, data[i * used : (i + 1) * used])
            if used == length:
                self.put(at, data)

    def o_rows(self, slot: int, n: int) -> np.ndarray:
        """O rows [n, elements]."""
        at = self.at(slot) + self.o_at
        n_q, _, _, v_size = self.g.heads
        return decode(self.map[at : at + n * self.o_row], self.g.act_dtype).reshape(n, n_q * v_size)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    pos: int,
    window: int,
    scale: float,
    *,
    segment: int = 0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
    selected: np.ndarray | None = None,
) -> np.ndarray:
    """float64 causal attention of q [n, n_q_heads, d] at positions pos.. to k, v [tokens, n_kv_heads, d].

    `sinks` and `slopes` are [n_q_heads]. `selected`, bool [n, tokens]: the only tokens that a row sees.
    """
    n, heads, _ = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("nhd,thd->nht", q, k) * scale
    t, p = np.arange(len(k))[None, :], pos + np.arange(n)[:, None]
    seen = (t <= p) & ((window == 0) | (t > p - window))
    if segment:
        seen &= t // segment == p // segment
    if selected is not None:
        seen &= selected
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if slopes is not None:
        scores += slopes[:, None] * (t - p)[:, None, :]
    scores = np.where(seen[:, None, :], scores, -np.inf)
    largest = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - largest)
    sums = weights.sum(axis=2, keepdims=True)
    if sinks is not None:
        sums += np.exp(sinks[:, None] - largest)
    return np.einsum("nht,thd->nhd", weights / sums, v)


# Largest error of an O element for normally distributed K and V; the cache formats' own error, then the activations'.
# V in 4 bits is transformed before it is rounded, so an element's error is a sum of many, nearly normal: 0.4 is over 4
# deviations of 0.09.
KV_ERROR = {KV_FP32: 2e-5, KV_FP16: 2e-3, KV_BF16: 2e-2, KV_INT8: 5e-2, KV_INT4: 5e-1, KV_INT8_INT4: 4e-1}
ACT_ERROR = {FP32: 0.0, FP16: 2e-3, BF16: 1.6e-2}


@dataclass
class Shadow:
    tag: int
    k: list[np.ndarray]  # per layer [tokens, KV heads, size of a K head] float64
    v: list[np.ndarray]  # [tokens, KV heads, size of a V head]
    index: list[np.ndarray]  # [tokens, index_size] index keys

    @property
    def length(self) -> int:
        return len(self.k[0])

    def cut(self, length: int) -> tuple[list[np.ndarray], ...]:
        """K, V and index keys of the first `length` tokens."""
        return tuple([rows[:length] for rows in layers] for layers in (self.k, self.v, self.index))


class Link(Peer):
    """A link to an engine in this process, whose every O row is compared with a float64 shadow of the cache."""

    options: Mapping[str, Any] = MappingProxyType({})
    #: Rows whose O was compared, and rows of which rounding decides which tokens they select.
    n_certain = n_doubtful = 0

    def __init__(
        self,
        engine,
        g: Geometry,
        kv_dtype=KV_FP32,
        n_pages=64,
        max_seqs=8,
        windows: Sequence[int] = (),
        max_pages=0,
        options: dict[str, Any] | None = None,
    ):
        """`options` are the keyword arguments of REngine.add_link that say what the layers' attention does."""
        super().__init__(g)
        self.options = options or {}
        self.kv_dtype, self.scale = kv_dtype, g.head_size**-0.5
        self.windows = list(windows) or [0] * g.n_layers
        self.rng = np.random.default_rng(0)
        self.shadows: dict[int, Shadow] = {}
        self.next_tag = 1
        self._cut: set[int] = set()
        self._slide: set[int] = set()
        init_region_header(self.map, g.tuple())
        self.lease = engine.add_link(
            self.map, g.tuple(), kv_dtype, n_pages, max_seqs, self.scale, self.windows, None, max_pages, **self.options
        )
        self.wake_fd = self.lease.eventfd

    def heads(self, layer: int) -> tuple[int, int, int, int]:
        return self.options["heads"][layer] if "heads" in self.options else self.g.heads

    @property
    def kv_layers(self) -> Sequence[int]:
        return self.options.get("kv_layers", range(self.g.n_layers))

    @property
    def selections(self) -> Sequence[int]:
        return self.options.get("selections", [0] * self.g.n_layers)

    def index_heads(self, layer: int) -> int:
        """Heads of the layer's own indexer."""
        return self.g.index_heads if self.selections[layer] == SELECT_OWN else 0

    def layer_options(self, layer: int) -> dict[str, Any]:
        """The keyword arguments of `attention` for a layer."""
        options = {"segment": "segments", "softcap": "softcaps", "sinks": "sinks"}
        chosen = {name: self.options[given][layer] for name, given in options.items() if given in self.options}
        chosen |= {name: self.options[name] for name in ("slopes",) if name in self.options}
        n_q = self.heads(layer)[0]
        return {name: values[:n_q] if name in ("sinks", "slopes") else values for name, values in chosen.items()}

    def close(self) -> None:
        self.lease.close()
        self.wake_fd = -1

    def entries(self, plan: list[tuple[int, int, bool]]) -> list[tuple[int, ...]]:
        """Row table for (sequence, rows, attend), from what the shadow says is cached."""
        table = []
        for seq_index, n, attend in plan:
            if seq_index not in self.shadows:
                heads = [self.heads(layer) for layer in range(self.g.n_layers)]
                k, v = ([np.zeros((0, h[1], h[i])) for h in heads] for i in (2, 3))
                index = [np.zeros((0, self.g.index_size))] * self.g.n_layers
                self.shadows[seq_index] = Shadow(self.next_tag, k, v, index)
                self.next_tag += 1
            s = self.shadows[seq_index]
            flags = (ROW_ATTEND if attend else 0) | (ROW_TRIM if seq_index in self._cut else 0)
            flags |= ROW_SLIDE if seq_index in self._slide else 0
            self._cut.discard(seq_index)
            self._slide.discard(seq_index)
            table.append((seq_index, s.tag, s.length, n, flags))
        return table

    def begin(self, slot: int, plan: list[tuple[int, int, bool]]) -> Step:
        """Write the row table of a step; its layers are then called one by one."""
        table = self.entries(plan)
        self.table(slot, table)
        return Step(self, slot, plan, table)

    def step(self, slot: int, plan: list[tuple[int, int, bool]], layers: int | None = None) -> None:
        """A step, or its first `layers` layers, every O row checked."""
        step = self.begin(slot, plan)
        for layer in range(self.g.n_layers if layers is None else layers):
            step.call(layer)

    def fill(self, seq_index: int, tokens: int, slot: int = 0) -> None:
        """Append-only prefill in chunks of the slot's size."""
        while tokens:
            n = min(tokens, self.g.max_rows)
            self.step(slot, [(seq_index, n, False)])
            tokens -= n

    def forget(self, seq_index: int) -> None:
        self.lease.free(seq_index, self.shadows.pop(seq_index).tag)

    def trim(self, seq_index: int, length: int) -> None:
        self.lease.trim(seq_index, self.shadows[seq_index].tag, length)
        self._shorten(seq_index, length)

    def cut(self, seq_index: int, length: int) -> None:
        """Let the sequence's next step cut it to `length` tokens."""
        self._shorten(seq_index, length)
        self._cut.add(seq_index)

    def slide(self, *seq_indexes: int) -> None:
        """Let the next step of these sequences give back the pages that no later row sees."""
        self._slide.update(seq_indexes)

    def _shorten(self, seq_index: int, length: int) -> None:
        s = self.shadows[seq_index]
        s.k, s.v, s.index = s.cut(length)

    def fork(self, src: int, dst: int, length: int) -> None:
        s = self.shadows[src]
        self.lease.fork(src, s.tag, dst, self.next_tag, length)
        self.shadows[dst] = Shadow(self.next_tag, *s.cut(length))
        self.next_tag += 1


class Step:
    """The calls of one step of one slot."""

    def __init__(self, link: Link, slot: int, plan, table):
        self.link, self.slot, self.plan, self.table = link, slot, plan, table
        self.n_rows = sum(n for _, n, _ in plan)
        self.n_attend = sum(n for _, n, attend in plan if attend)
        self.first = True
        #: The tokens that the rows of a sequence have selected last, and which rows are sure to have selected these:
        #: the scores at the border do not differ by rounding alone.
        self.selected: dict[int, np.ndarray] = {}
        self.certain = np.ones(self.n_rows, bool)

    def write(self, layer: int) -> None:
        """Write new rows into the slot."""
        link, act_dtype = self.link, self.link.g.act_dtype
        n_q, n_kv, k_size, v_size = link.heads(layer)
        g, n_index = link.g, link.index_heads(layer)
        sizes = {
            "k": n_kv * k_size,
            "v": 0 if g.v_in_k else n_kv * v_size,
            "index key": g.index_size if n_index else 0,
            "q": n_q * k_size,
            "index q": n_index * g.index_size,
            "index weights": n_index,
        }
        ends = np.cumsum(list(sizes.values()))
        values = link.rng.standard_normal((self.n_rows, ends[-1]))
        if n_index and link.kv_dtype != KV_FP32:
            values[:, ends[1] : ends[2]] = link.rng.integers(1, 256, (self.n_rows, 1))
        rows = decode(encode(values, act_dtype), act_dtype).reshape(self.n_rows, -1)
        k, v, self.index_key, q, index_q, self.index_weights = np.split(rows, ends[:-1], axis=1)
        link.put_rows(self.slot, rows[: self.n_attend, ends[2] :], rows[:, : ends[2]])
        self.k = k.reshape(self.n_rows, n_kv, k_size)
        self.v = self.k[:, :, :v_size] if g.v_in_k else v.reshape(self.n_rows, n_kv, v_size)
        self.q = q[: self.n_attend].reshape(self.n_attend, n_q, k_size)
        self.index_q = index_q.reshape(self.n_rows, n_index, g.index_size)

    def select(self, layer: int, rows: slice, pos: int, keys: np.ndarray) -> np.ndarray:
        """The tokens that each of the rows selects, bool [rows, tokens], and notes for which rows this is certain."""
        g, selected = self.link.g, []
        for row in range(rows.start, rows.stop):
            seen = pos + row - rows.start + 1
            chosen = np.arange(len(keys)) < seen
            if seen > g.index_topk:
                products = np.maximum(self.index_q[row] @ keys[:seen].T, 0)
                scores, reach = self.index_weights[row] @ products, np.abs(self.index_weights[row]) @ products
                scores = np.round(scores, 9)  # equal keys have equal scores, in whatever order numpy adds
                order = np.argsort(-scores, kind="stable")
                gap = scores[order[g.index_topk - 1]] - scores[order[g.index_topk]]
                self.certain[row] = gap == 0 or gap > reach.max() * (1e-5 if self.link.kv_dtype == KV_FP32 else 2e-4)
                chosen[order[g.index_topk :]] = False
            selected.append(chosen)
        return np.array(selected)

    def post(self, layer: int) -> int:
        self.write(layer)
        bell = self.link.post(self.slot, layer, len(self.plan), self.n_rows, self.n_attend, self.first)
        self.first = False
        return bell

    def finish(self, layer: int, bell: int) -> Reply:
        link, g = self.link, self.link.g
        reply = link.wait(self.slot, bell)
        assert (reply.status, reply.message, reply.n_layers) == (Status.OK, "", layer + 1), reply
        n_q, _, _, v_size = link.heads(layer)
        o = link.o_rows(self.slot, self.n_attend)[:, : n_q * v_size].reshape(self.n_attend, n_q, v_size)
        limit = KV_ERROR[link.kv_dtype] + ACT_ERROR[g.act_dtype]
        row = 0
        for (seq_index, n, attend), entry in zip(self.plan, self.table, strict=True):
            s = link.shadows[seq_index]
            store = link.kv_layers[layer]
            rows = slice(row, row + n)
            if store == layer:
                assert len(s.k[layer]) == entry[2]
                s.k[layer] = np.concatenate([s.k[layer], self.k[rows]])
                s.v[layer] = np.concatenate([s.v[layer], self.v[rows]])
            if link.index_heads(layer):
                s.index[layer] = np.concatenate([s.index[layer], self.index_key[rows]])
            if attend:
                options = link.layer_options(layer)
                if link.index_heads(layer):
                    self.selected[seq_index] = self.select(layer, rows, entry[2], s.index[layer])
                if link.selections[layer]:
                    options["selected"] = self.selected[seq_index]
                args = s.k[store], s.v[store], entry[2], link.windows[layer], link.scale
                want, certain = attention(self.q[rows], *args, **options), self.certain[rows]
                np.testing.assert_allclose(o[rows][certain], want[certain], rtol=0, atol=limit)
                link.n_certain += certain.sum()
                link.n_doubtful += (~certain).sum()
            row += n
        return reply

    def call(self, layer: int) -> Reply:
        return self.finish(layer, self.post(layer))
