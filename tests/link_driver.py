"""Runs steps over a transports.base.Link and holds every O row against float64 attention (rengine_peer.py)."""

from __future__ import annotations

import os

import numpy as np
import rengine_peer as peer

from fastdecode.transports.base import ACT_DTYPES, KV_DTYPES, ROW_DTYPE, Geometry, Hello, Link

#: Set where everything is slow: an emulated machine takes half a minute for a call of LARGE's full size.
SLOW = "FASTDECODE_SLOW" in os.environ
HANG_S = 300.0 if SLOW else 20.0

SMALL = Geometry(n_slots=2, max_rows=32, n_layers=2, n_q_heads=4, n_kv_heads=2, head_size=16, act_dtype="fp32")
#: Frames of 3 MiB one way and 2 MiB the other: more than a socket takes at once.
LARGE = Geometry(
    n_slots=2, max_rows=64 if SLOW else 256, n_layers=1, n_q_heads=32, n_kv_heads=8, head_size=64, act_dtype="fp32"
)


def hello(
    geometry: Geometry = SMALL,
    kv_dtype: str = "fp32",
    windows: tuple[int, ...] | None = None,
    kv_bytes: int | None = 1 << 20,
    max_seqs: int = 8,
) -> Hello:
    windows = (0,) * geometry.n_layers if windows is None else windows
    return Hello(geometry, kv_dtype, windows, geometry.head_size**-0.5, kv_bytes, max_seqs)


class Driver(peer.Link):
    """As the R-engine's own tests see a link, but with a transport in between."""

    def __init__(self, link: Link, said: Hello, seed: int = 0):
        g = said.geometry
        self.link = link
        self.g = peer.Geometry(
            g.n_slots,
            g.max_rows,
            g.n_layers,
            g.n_q_heads,
            g.n_kv_heads,
            g.head_size,
            ACT_DTYPES.index(g.act_dtype),
        )
        layout = link.layout
        self.q_row, self.kv_row = layout.q_row_bytes, layout.kv_row_bytes
        self.q_at, self.kv_at, self.o_at, self.slot_bytes = layout.q, layout.kv, layout.o, layout.slot_bytes
        self.map = link.region
        self.kv_dtype, self.scale, self.windows = KV_DTYPES.index(said.kv_dtype), said.softmax_scale, said.windows
        self.rng = np.random.default_rng(seed)
        self.shadows: dict[int, peer.Shadow] = {}
        self.next_tag = 1
        self._posted = [0] * g.n_slots

    def table(self, slot: int, rows: list[tuple[int, ...]]) -> None:
        self.link.write_table(slot, np.array([(*r, *[0] * (6 - len(r))) for r in rows], ROW_DTYPE))

    def post(self, slot: int, layer: int, n_entries: int, n_rows: int, n_attend: int, new_step: bool) -> int:
        self._posted[slot] = n_attend
        self.link.post(slot, layer, n_entries, n_rows, n_attend, new_step)
        return 0

    def wait(self, slot: int, bell: int, seconds: float = HANG_S) -> peer.Reply:
        times = self.link.wait(slot, seconds)
        return peer.Reply(bell, peer.OK, self._posted[slot], times.busy_ns, times.kv_bytes, "")

    async def free_seq(self, seq: int) -> None:
        await self.link.free([(seq, self.shadows.pop(seq).tag)])

    async def trim_seq(self, seq: int, length: int) -> None:
        s = self.shadows[seq]
        await self.link.trim(seq, s.tag, length)
        s.k, s.v = [k[:length] for k in s.k], [v[:length] for v in s.v]

    async def fork_seq(self, src: int, dst: int, length: int) -> None:
        s = self.shadows[src]
        await self.link.fork((src, s.tag), (dst, self.next_tag), length)
        self.shadows[dst] = peer.Shadow(self.next_tag, [k[:length] for k in s.k], [v[:length] for v in s.v])
        self.next_tag += 1
