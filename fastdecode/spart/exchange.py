"""A step's Q, K, V and O rows on their way between the decoder and the slots of the links.

The decoder works on three tensors a step: `q` [attending rows, n_q_heads * head_size], `kv` [rows, 2 * n_kv_heads *
head_size] and `o`, shaped like `q`. On a CPU, in a step that uses one link, these tensors are the slot itself and
nothing is copied. Otherwise they are buffers on the device: their rows are copied into each link's slot before a layer
is rung, and the O rows are gathered from the slots after the wait. A StepGroup does that for all links in one C call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastdecode.region.contract import ROW_ATTEND, ROW_DTYPE
from fastdecode.spart.batch import Chunk
from fastdecode.spart.served import TORCH_DTYPES
from fastdecode.transports._native import StepGroup
from fastdecode.transports.base import Link, StepTimes, TransportError

if TYPE_CHECKING:
    from fastdecode.transports._native import Port


class SlotViews:
    """torch views of one slot of a link's region: `q`, `kv` and `o`, each [max_rows, elements of a row]."""

    def __init__(self, link: Link, slot: int):
        """Raises ValueError if the link has no such slot."""
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
        # numpy exports the buffer, which keeps the region mapped as long as a tensor uses it. torch.frombuffer does
        # not: a link that goes down during a step would unmap the region while the step still writes to it.
        rows = np.frombuffer(self._region, np.uint8, self._max_rows * row_bytes, offset)
        return torch.from_numpy(rows).view(self._dtype).view(self._max_rows, -1)


@dataclass(frozen=True, slots=True)
class LinkRows:
    """One link's part of a step, as ranges of the step's rows. In the slot, appended rows follow attending rows."""

    views: SlotViews
    entries: np.ndarray  # row table, ROW_DTYPE
    attending: slice[int, int, None]
    appended: slice[int, int, None]

    @property
    def n_attend(self) -> int:
        return self.attending.stop - self.attending.start

    @property
    def n_rows(self) -> int:
        return self.n_attend + self.appended.stop - self.appended.start


def link_rows(chunks: list[Chunk], views: dict[int, SlotViews]) -> list[LinkRows]:
    """Split a step among its links. `views` has the slot of every link that a chunk names, by the link's index.

    Raises ValueError if the chunks are not in order or a link gets more rows than its slot has.
    """
    entries: dict[int, list[tuple[int, ...]]] = {}
    ranges: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})  # attending, appended: link -> [start, stop]
    row, last_order = 0, (False, -1)
    for chunk in chunks:
        order = (chunk.prefill, chunk.link)
        if order < last_order:
            raise ValueError("the chunks of a step are not in order: attending chunks first, then by link")
        last_order, start, n = order, row, len(chunk.tokens)
        row += n
        flags = 0 if chunk.prefill else ROW_ATTEND
        entries.setdefault(chunk.link, []).append((chunk.seq_index, chunk.tag, chunk.pos, n, flags, 0))
        ranges[chunk.prefill].setdefault(chunk.link, [start, start])[1] = row
    result = []
    for link, table in entries.items():
        attending, appended = (slice(*kind.get(link, (0, 0))) for kind in ranges)
        rows = LinkRows(views[link], np.array(table, ROW_DTYPE), attending, appended)
        limit = rows.views.link.geometry.max_rows
        if rows.n_rows > limit:
            raise ValueError(f"a step has {rows.n_rows} rows for a link that takes {limit}")
        result.append(rows)
    return result


class Exchange:
    """The tensors `q`, `kv` and `o` of one step, and the messages that carry them. Not thread-safe.

    A link that fails takes no part in the rest of the step: its O rows are zeros, and `failures` says why. The step
    goes on for the other links; its methods raise CallRefused or LinkDown only when no link is left.
    """

    def __init__(self, slot: int, link_rows: list[LinkRows], device: torch.device, dtype: torch.dtype):
        self._link_rows, self._device = link_rows, device
        self._armed = False  # the R-nodes have judged the step
        self.failures: dict[Link, TransportError] = {}
        n_attend, n_rows = sum(rows.n_attend for rows in link_rows), sum(rows.n_rows for rows in link_rows)
        views = link_rows[0].views
        if device.type == "cpu" and len(link_rows) == 1:
            self.q, self.kv, self.o = views.q[:n_attend], views.kv[:n_rows], views.o[:n_attend]
            self._group = StepGroup(slot, self._members())
            return
        q_size, kv_size = views.q.shape[1], views.kv.shape[1]
        self.q = torch.empty(n_attend, q_size, device=device, dtype=dtype)
        self.kv = torch.empty(n_rows, kv_size, device=device, dtype=dtype)
        self.o = torch.empty(n_attend, q_size, device=device, dtype=dtype)
        self._host = (self.q, self.kv, self.o)
        if device.type == "cuda":
            q, kv, o = (torch.empty(x.shape, dtype=dtype, pin_memory=True) for x in self._host)
            self._host = (q, kv, o)
            self._event = torch.cuda.Event()
        self._group = StepGroup(slot, self._members(), *(x.view(torch.uint8).numpy() for x in self._host))

    def _members(self) -> list[tuple[Port, np.ndarray, int, int, int, int]]:
        return [
            (
                rows.views.link.port,
                rows.entries.view(np.uint8),
                rows.attending.start,
                rows.attending.stop,
                rows.appended.start,
                rows.appended.stop,
            )
            for rows in self._link_rows
        ]

    def arm(self) -> None:
        """Publish the step to every link. Returns at once: the R-nodes plan it while the S-Part computes the first
        layer's rows."""
        self._check(self._group.arm())

    def post(self, layer: int, timeout: float) -> None:
        """Ask every link for a layer. `q` and `kv` must not be written before `wait`.

        The first layer waits up to `timeout` seconds for the R-nodes' verdicts on the step.
        """
        if not self._armed:
            self._check(self._group.wait(timeout, rows=False))
            self._armed = True
        if self._device.type == "cuda":
            q, kv, _ = self._host
            q.copy_(self.q, non_blocking=True)
            kv.copy_(self.kv, non_blocking=True)
            self._event.record()
            self._event.synchronize()
        self._check(self._group.ring(layer))

    def wait(self, timeout: float) -> None:
        """Block until every link has answered; then `o` is filled. `timeout` is in seconds."""
        self._check(self._group.wait(timeout))
        if self._device.type == "cuda":
            # The next `post` synchronises with the stream before `o` on the host is written again.
            self.o.copy_(self._host[2], non_blocking=True)

    def disarm(self) -> dict[Link, StepTimes]:
        """End the step. Returns its cost on each link."""
        return {self._link_rows[i].views.link: StepTimes(*times) for i, *times in self._group.disarm()}

    def settle(self, timeout: float) -> None:
        """After a failure, wait for the calls that are still in progress, so that the slots can be used again."""
        self._group.wait(timeout, rows=False)
        self._group.disarm()

    def _check(self, failures: list[tuple[int, int, str]] | None) -> None:
        for member, status, message in failures or ():
            link = self._link_rows[member].views.link
            self.failures[link] = link.failure(status, message)
        if len(self.failures) == len(self._link_rows):
            # An exception that is raised holds this frame: kept here as well, it would keep the regions mapped until
            # the garbage collector runs.
            errors, self.failures = list(self.failures.values()), {}
            raise errors.pop(0)
