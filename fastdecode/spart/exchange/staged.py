"""Staged: the exchange of decoding rows that works on every device, by copies in pinned memory."""

from __future__ import annotations

import torch

from fastdecode.spart.exchange.base import Exchange, LinkRows, RowTensors, pinned


class Staged(Exchange):
    """A step whose rows all attend on R-nodes. `q`, `kv` and `o` are on the device. Each layer, the host waits for
    copies of `q` and `kv`, rings, waits for the R-nodes, and lets the device copy `o`."""

    def __init__(self, slot: int, link_rows: list[LinkRows], device: torch.device, rows: RowTensors):
        """`rows` are the step's rows on the device."""
        self.q, self.kv, self.o = rows
        self._host = pinned(rows, len(rows.q))
        self._copied = torch.Event(device)
        super().__init__(slot, link_rows, self._host)

    def _send_rows(self) -> None:
        if not self._link_rows:
            return
        self._host.q.copy_(self.q, non_blocking=True)
        self._host.kv.copy_(self.kv, non_blocking=True)
        self._copied.record()
        self._copied.synchronize()

    def _take_rows(self) -> None:
        # The next `post` waits for the device before `o` on the host is written again.
        self.o.copy_(self._host.o, non_blocking=True)
