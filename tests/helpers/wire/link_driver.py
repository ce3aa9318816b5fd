"""Runs steps over a transports.base.Link and checks every O row.

Driver runs any step and compares with float64 attention (rengine_peer.py). Payloads makes millions of calls and
compares with results computed beforehand.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

import numpy as np
from attention import rengine_peer as peer

from fastdecode.region.contract import ACT_DTYPES, KV_DTYPES, PAGE_TOKENS, ROW_ATTEND, ROW_DTYPE, Status
from fastdecode.region.geometry import Geometry
from fastdecode.transports.base import CallRefused, Hello, LayerOptions, Link

#: Set on emulated machines, which take half a minute for a call of LARGE's full size.
SLOW = "FASTDECODE_SLOW" in os.environ
HANG_S = 300.0 if SLOW else 60.0
#: Tests divide their numbers of repetitions by this.
FEWER = 4 if SLOW else 1

#: Seconds within which a peer's death must have been noticed. fastdecode notices it after about 4 s of silence, on a
#: busy machine later; TCP alone takes minutes.
NOTICED_S = 20.0

#: How many calls the test of torn payloads makes, and how often the tests of leaks kill a node or cut the wires.
CALLS = int(os.environ.get("FASTDECODE_CALLS", 200 if SLOW else 20_000))
CYCLES = int(os.environ.get("FASTDECODE_CYCLES", 1))

SMALL = Geometry(n_slots=2, max_rows=32, n_layers=2, n_q_heads=4, n_kv_heads=2, head_size=16, act_dtype="fp32")
#: Frames of 3 MiB one way and 2 MiB the other way: larger than a socket's buffer.
LARGE = Geometry(
    n_slots=2, max_rows=256 // FEWER, n_layers=1, n_q_heads=32, n_kv_heads=8, head_size=64, act_dtype="fp32"
)

PLAIN = LayerOptions()
LAYER_REQUEST, LAYER_REPLY = 128, 256  # offsets of these words in a slot's head (fd_slot_t)


def hello(
    geometry: Geometry = SMALL,
    kv_dtype: str = "fp32",
    windows: tuple[int, ...] | None = None,
    kv_bytes: int | None = 1 << 20,
    max_seqs: int = 8,
    layers: LayerOptions = PLAIN,
) -> Hello:
    windows = (0,) * geometry.n_layers if windows is None else windows
    return Hello(geometry, kv_dtype, windows, geometry.head_size**-0.5, kv_bytes, max_seqs, layers)


async def in_thread(function, *args):
    return await asyncio.wait_for(asyncio.to_thread(function, *args), HANG_S)


async def until(happened: Callable[[], Awaitable[bool]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not await happened():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.02)


class Driver(peer.Link):
    """The link of the R-engine's own tests, with a transport in between."""

    def __init__(self, link: Link, wanted: Hello, seed: int = 0):
        g = wanted.geometry
        self.link = link
        self.g = peer.Geometry(
            g.n_slots,
            g.max_rows,
            g.n_layers,
            g.n_q_heads,
            g.n_kv_heads,
            g.head_size,
            ACT_DTYPES.index(g.act_dtype),
            g.v_size,
            int(g.v_in_k),
            g.index_heads,
            g.index_size,
            g.index_topk,
        )
        layout = link.layout
        self.q_row, self.kv_row, self.o_row = layout.q_row_bytes, layout.kv_row_bytes, layout.o_row_bytes
        self.q_at, self.kv_at, self.o_at, self.slot_bytes = layout.q, layout.kv, layout.o, layout.slot_bytes
        self.map = link.region
        self.kv_dtype, self.scale, self.windows = KV_DTYPES.index(wanted.kv_dtype), wanted.softmax_scale, wanted.windows
        layers = wanted.layers
        names = ("segments", "kv_layers", "selections", "softcaps", "heads")
        self.options = {n: getattr(layers, n) for n in names if getattr(layers, n)}
        for name in ("sinks", "slopes"):
            if values := getattr(layers, name):
                numbers = np.frombuffer(values, "<f4")
                self.options[name] = numbers.reshape(-1, g.n_q_heads) if name == "sinks" else numbers
        self.rng = np.random.default_rng(seed)
        self.shadows: dict[int, peer.Shadow] = {}
        self._cut: set[int] = set()
        self._slide: set[int] = set()
        self.next_tag = 1
        self.tables: dict[int, np.ndarray] = {}
        self._refusals: dict[int, CallRefused] = {}

    def table(self, slot: int, rows: list[tuple[int, ...]]) -> None:
        self.tables[slot] = np.array([(*r, *[0] * (6 - len(r))) for r in rows], ROW_DTYPE)

    def post(self, slot: int, layer: int, n_entries: int, n_rows: int, n_attend: int, new_step: bool) -> int:
        """Ask for a layer, and arm its step first if it is new. `wait` raises what the R-node refuses."""
        if new_step:
            self.link.arm(slot, self.tables[slot])
            try:
                self.link.wait(slot, HANG_S)
            except CallRefused as error:
                self._refusals[slot] = error
                return 0
        self.link.ring(slot, layer)
        return layer + 1

    def wait(self, slot: int, bell: int, seconds: float = HANG_S) -> peer.Reply:
        if slot in self._refusals:
            raise self._refusals.pop(slot)
        self.link.wait(slot, seconds)
        times = self.link.disarm(slot) if bell == self.g.n_layers else None
        return peer.Reply(0, Status.OK, bell, times.busy_ns if times else 0, times.kv_bytes if times else 0, "")

    def few_steps(self) -> None:
        """Steps of sequences 0 to 2, which are empty before."""
        self.fill(0, 100)
        self.step(0, [(0, 1, True), (1, 20, False)])
        self.step(1, [(1, 4, True), (0, 1, True), (2, 7, False)])

    async def free_seq(self, seq_index: int) -> None:
        await self.link.free([(seq_index, self.shadows.pop(seq_index).tag)])

    async def trim_seq(self, seq_index: int, length: int) -> None:
        s = self.shadows[seq_index]
        await self.link.trim(seq_index, s.tag, length)
        s.k, s.v, s.index = s.cut(length)

    async def fork_seq(self, src: int, dst: int, length: int) -> None:
        s = self.shadows[src]
        await self.link.fork((src, s.tag), (dst, self.next_tag), length)
        self.shadows[dst] = peer.Shadow(self.next_tag, *s.cut(length))
        self.next_tag += 1


class Payloads:
    """Calls of 4 to 64 KiB, one in each slot at a time, whose O depends on every element of Q, K and V.

    Each pair of rows belongs to another sequence, whose window is two tokens: the first row has K and V of 0, so the O
    of the second is sigmoid(q . k * scale) * v. It is computed beforehand for a few payloads; a call carries another
    payload than the call before it in its slot. Nearly all of the time goes into calls: the sequences are freed only
    when a page is full.
    """

    HELLO = hello(
        Geometry(2, 32, 3, n_q_heads=8, n_kv_heads=4, head_size=32, act_dtype="fp32"),
        windows=(2, 2, 2),
        kv_bytes=12 << 20,
        max_seqs=32,
    )

    def __init__(self, link: Link, seed: int = 0):
        """To be called in the link's event loop."""
        g, y = link.geometry, link.layout
        self.link = link
        self.calls = 0
        self._loop = asyncio.get_running_loop()
        self._rng = np.random.default_rng(seed)
        n, pairs, row = 61, g.max_rows // 2, g.head_size
        self._q = self._rng.standard_normal((n, pairs, g.n_q_heads, row), np.float32)
        self._kv = self._rng.standard_normal((n, pairs, 2, g.n_kv_heads, row), np.float32)
        k, v = np.repeat(self._kv, g.n_q_heads // g.n_kv_heads, axis=3).transpose(2, 0, 1, 3, 4)
        score = (self._q * k).sum(-1, dtype=np.float64, keepdims=True) * self.HELLO.softmax_scale
        self._o = (v / (1 + np.exp(-score))).astype(np.float32)

        def rows_of(slot: int, at: int, like: np.ndarray) -> np.ndarray:
            at += y.slot(slot)
            rows = np.frombuffer(link.region[at : at + 2 * like[0].nbytes], np.float32)
            return rows.reshape(pairs, 2, *like.shape[2:])

        views = [[(y.q, self._q), (y.kv, self._kv), (y.o, self._o)]] * g.n_slots
        self._views = [[rows_of(slot, at, like) for at, like in three] for slot, three in enumerate(views)]
        self._carried = [0] * g.n_slots  # payload of the slot's last call
        self._tag = 1
        self._cached = np.zeros((g.n_slots, pairs), int)  # tokens of each sequence

    def run(self, calls: int) -> None:
        """Make at least `calls` calls. Raises AssertionError for a wrong element, and the errors of the link."""
        slots = range(self.link.geometry.n_slots)
        end = self.calls + calls
        while self.calls < end:
            sizes = self._rng.integers(1, self.link.geometry.max_rows // 2 + 1, len(slots)).tolist()
            for slot in slots:
                self._arm(slot, sizes[slot])
            for i in range(self.link.geometry.n_layers):
                for slot in slots:
                    self._ring(slot, sizes[slot], i)
                for slot in slots if i % 3 else reversed(slots):
                    self._check(slot, sizes[slot])
            if self._cached.max() + 2 > PAGE_TOKENS:
                self._free()

    def _free(self) -> None:
        handles = [(index, self._tag) for index in range(self._cached.size)]
        asyncio.run_coroutine_threadsafe(self.link.free(handles), self._loop).result(HANG_S)
        self._tag += 1
        self._cached[:] = 0

    def _arm(self, slot: int, n: int) -> None:
        table = np.zeros(n, ROW_DTYPE)
        table["seq_index"] = slot * self._cached.shape[1] + np.arange(n)
        table["tag"], table["pos"], table["n_rows"], table["flags"] = self._tag, self._cached[slot, :n], 2, ROW_ATTEND
        self.link.arm(slot, table)
        self.link.wait(slot, HANG_S)
        self._cached[slot, :n] += 2

    def _ring(self, slot: int, n: int, layer: int) -> None:
        this = self._carried[slot] = (self._carried[slot] + 1 + slot) % len(self._q)
        q, kv, o = self._views[slot]
        q[:n], kv[:n, 0], kv[:n, 1], o[:n] = self._q[this, :n, None], 0, self._kv[this, :n], np.nan
        self.link.ring(slot, layer)
        self.calls += 1

    def _check(self, slot: int, n: int) -> None:
        self.link.wait(slot, HANG_S)
        o = self._views[slot][2][:n]
        error = np.abs(o[:, 1] - self._o[self._carried[slot], :n]).max()
        assert error < 1e-5, f"call {self.calls}: an O element is wrong by {error}"
        assert np.isfinite(o).all()
