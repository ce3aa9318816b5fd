"""A step's Q, K, V and O rows in the slots of its links.

The decoder works on three tensors a step: `q` [attending rows, n_q_heads * head_size], `kv` [rows, 2 * n_kv_heads *
head_size] and `o`, like `q`. On a CPU and with one link in the step they are the slot itself and nothing is copied.
Otherwise they are buffers of the device whose rows are copied to each link's slot before it is posted, and whose O rows
are gathered from the slots.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import torch

from fastdecode.spart.batch import Chunk
from fastdecode.spart.weights import TORCH_DTYPES
from fastdecode.transports.base import ROW_ATTEND, ROW_DTYPE, Link, TransportError


class SlotViews:
    """torch views over one slot of a link's region, [max_rows, elements of a row] each."""

    def __init__(self, link: Link, slot: int):
        g, y = link.geometry, link.layout
        if not 0 <= slot < g.n_slots:
            raise ValueError(f"slot {slot} is not one of the link's {g.n_slots}")
        self.link = link
        self._dtype = TORCH_DTYPES[g.act_dtype]
        self._region, self._max_rows = link.region, g.max_rows
        self.q = self._rows(y.slot(slot) + y.q, y.q_row_bytes)
        self.kv = self._rows(y.slot(slot) + y.kv, y.kv_row_bytes)
        self.o = self._rows(y.slot(slot) + y.o, y.q_row_bytes)

    def _rows(self, offset: int, row_bytes: int) -> torch.Tensor:
        # By way of numpy, which keeps the buffer exported and with it the region mapped as long as a tensor is there.
        # torch.frombuffer does not: a link that goes down in the middle of a step would unmap it under the step's feet.
        rows = np.frombuffer(self._region, np.uint8, self._max_rows * row_bytes, offset)
        return torch.from_numpy(rows).view(self._dtype).view(self._max_rows, -1)


@dataclass(frozen=True, slots=True)
class LinkRows:
    """What one link gets of a step: ranges of the step's rows. In the slot, appended rows follow attending ones."""

    views: SlotViews
    entries: np.ndarray  # ROW_DTYPE
    attending: slice
    appended: slice

    @property
    def n_attend(self) -> int:
        return self.attending.stop - self.attending.start

    @property
    def n_rows(self) -> int:
        return self.n_attend + self.appended.stop - self.appended.start


def link_rows(chunks: list[Chunk], views: dict[int, SlotViews]) -> list[LinkRows]:
    """Split a step among its links. `views` has the slot of every link that the chunks name. Raises ValueError."""
    entries: dict[int, list[tuple[int, ...]]] = {}
    rows = ({}, {})  # link -> [start, stop), attending and appended
    row, last = 0, (False, -1)
    for chunk in chunks:
        place = (chunk.prefill, chunk.link)
        if place < last:
            raise ValueError("the chunks of a step are not in order: attending ones first, then by link")
        last, start, n = place, row, len(chunk.tokens)
        row += n
        flags = 0 if chunk.prefill else ROW_ATTEND
        entries.setdefault(chunk.link, []).append((chunk.seq_index, chunk.tag, chunk.pos, n, flags, 0))
        rows[chunk.prefill].setdefault(chunk.link, [start, start])[1] = row
    result = []
    for index, table in entries.items():
        attending, appended = (slice(*kind.get(index, (0, 0))) for kind in rows)
        share = LinkRows(views[index], np.array(table, ROW_DTYPE), attending, appended)
        limit = share.views.link.geometry.max_rows
        if share.n_rows > limit:
            raise ValueError(f"a step of {share.n_rows} rows for a link that takes {limit}")
        result.append(share)
    return result


class Exchange:
    """The rows of one step on their way. Not to be shared by threads."""

    def __init__(self, slot: int, shares: list[LinkRows], device: torch.device, dtype: torch.dtype):
        self._slot, self._shares, self._device = slot, shares, device
        self._pending: list[Link] = []  # posted, not yet answered
        self._direct = device.type == "cpu" and len(shares) == 1
        n_attend, n_rows = sum(s.n_attend for s in shares), sum(s.n_rows for s in shares)
        views = shares[0].views
        if self._direct:
            self.q, self.kv, self.o = views.q[:n_attend], views.kv[:n_rows], views.o[:n_attend]
            return
        q_size, kv_size = views.q.shape[1], views.kv.shape[1]
        self.q = torch.empty(n_attend, q_size, device=device, dtype=dtype)
        self.kv = torch.empty(n_rows, kv_size, device=device, dtype=dtype)
        self.o = torch.empty(n_attend, q_size, device=device, dtype=dtype)
        self._host = (self.q, self.kv, self.o)
        if device.type == "cuda":
            self._host = tuple(torch.empty(x.shape, dtype=dtype, pin_memory=True) for x in self._host)
            self._event = torch.cuda.Event()

    def post(self, layer: int) -> None:
        """Ring every link with rows in this step. `q` and `kv` must not be written until `wait`. Raises LinkDown."""
        if not self._direct:
            self._scatter()
        for share in self._shares:
            link = share.views.link
            if layer == 0:
                link.write_table(self._slot, share.entries)
            link.post(self._slot, layer, len(share.entries), share.n_rows, share.n_attend, layer == 0)
            self._pending.append(link)

    def wait(self, timeout: float) -> int:
        """Block until every link has answered; then `o` is filled. Returns the KV-cache bytes read.

        Raises CallRefused and LinkDown.
        """
        kv_bytes = 0
        while self._pending:
            kv_bytes += self._pending.pop().wait(self._slot, timeout).kv_bytes
        if not self._direct:
            self._gather()
        return kv_bytes

    def settle(self, timeout: float) -> None:
        """Wait for what is still under way after a failure, so that the slots can be used again."""
        while self._pending:
            with contextlib.suppress(TransportError):
                self._pending.pop().wait(self._slot, timeout)

    def _scatter(self) -> None:
        q, kv, _ = self._host
        if self._device.type == "cuda":
            q.copy_(self.q, non_blocking=True)
            kv.copy_(self.kv, non_blocking=True)
            self._event.record()
            self._event.synchronize()
        for share in self._shares:
            n = share.n_attend
            share.views.q[:n].copy_(q[share.attending])
            share.views.kv[:n].copy_(kv[share.attending])
            share.views.kv[n : share.n_rows].copy_(kv[share.appended])

    def _gather(self) -> None:
        o = self._host[2]
        for share in self._shares:
            o[share.attending].copy_(share.views.o[: share.n_attend])
        if self._device.type == "cuda":
            # The next `post` synchronises with the stream before `o` on the host is written again.
            self.o.copy_(o, non_blocking=True)
