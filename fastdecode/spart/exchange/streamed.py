"""Streamed: the exchange of prompts on a device, whose K and V rows stream out behind the layers.

The R-nodes only append these rows, so no layer waits for an answer. The device copies a layer's rows to one of a few
pinned buffers, on a stream beside the one that computes. A thread waits for the copy, rings the R-nodes with the
buffer's rows and waits for the answers; then the buffer is free. A layer waits for a free buffer only, and the end of
the step for all appends.
"""

from __future__ import annotations

import os
import select
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fastdecode.spart.exchange.base import Exchange, LinkRows, RowTensors, pinned
from fastdecode.transports.base import Pending

#: Pinned buffers of a step, each of which holds the rows of a layer. One is filled, one is appended; the others let
#: the device go on while an R-node is late.
BUFFERS = 4


class Appender:
    """What the streamed steps of an S-Part share: a stream of copies, and the thread that rings the R-nodes."""

    def __init__(self, device: torch.device):
        self.stream = torch.Stream(device)
        self.thread = ThreadPoolExecutor(1, "fastdecode-append")


class Streamed(Exchange):
    """A step of prompts, whose rows the R-nodes only append. `q`, `kv` and `o` are on the device."""

    def __init__(
        self, slot: int, link_rows: list[LinkRows], device: torch.device, rows: RowTensors, appender: Appender
    ):
        """`rows` are the step's rows on the device."""
        self.q, self.kv, self.o = rows
        self._appender = appender
        on_host = [pinned(rows, 0) for _ in range(BUFFERS)]
        self._buffers = [rows.kv for rows in on_host]
        self._rows = [buffer.view(torch.uint8).numpy() for buffer in self._buffers]
        self._written = torch.Event(device)
        self._copied = [torch.Event(device, blocking=True) for _ in self._buffers]
        # Counts the free buffers; its reader takes one.
        self._free = os.eventfd(BUFFERS, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        for fd in (self._free, self._ended):
            weakref.finalize(self, os.close, fd).atexit = False
        self._awaited = self._free
        self._last: Future[None] | None = None
        self._over = False  # nothing more is appended
        self._fault: BaseException | None = None
        super().__init__(slot, link_rows, on_host[0])

    @property
    def pending(self) -> Pending:
        """A free buffer for the next layer, and after `finish` the end of all work: the device's and all appends."""
        return self._awaited

    @property
    def ready(self) -> bool:
        poll = select.poll()  # select takes no descriptor beyond 1023
        poll.register(self._awaited, select.POLLIN)
        return bool(poll.poll(0))

    def post(self, layer: int, timeout: float) -> None:
        """Let the device copy the layer's K and V rows to a free buffer, and the thread append them. Waits for the
        buffer, up to `timeout` seconds for each layer before this one."""
        if not self._link_rows:
            return
        os.eventfd_read(self._free)
        self._raise_fault()
        self._layer = layer
        buffer, copied = self._buffers[layer % BUFFERS], self._copied[layer % BUFFERS]
        self._written.record()
        with self._appender.stream:
            self._written.wait()
            buffer.copy_(self.kv, non_blocking=True)
            copied.record()
        self._last = self._appender.thread.submit(self._append, layer, timeout)

    def wait(self, timeout: float) -> None:
        """Let the device write no rows to `kv` before the last ones are copied. The host does not wait."""
        if self._link_rows:
            self._copied[self._layer % BUFFERS].wait()

    def finish(self) -> None:
        self._written.record()
        self._last = self._appender.thread.submit(self._end)
        self._awaited = self._ended

    def finished(self) -> None:
        os.eventfd_read(self._ended)
        self._raise_fault()

    def settle(self, timeout: float) -> None:
        self._over = True
        if self._last is not None:
            self._last.result()
        self._fault = None
        super().settle(timeout)

    def _raise_fault(self) -> None:
        """Raise the error that has ended the appends."""
        fault, self._fault = self._fault, None  # this frame, which the exception holds, must not hold the exception
        if fault is not None:
            try:
                raise fault
            finally:
                del fault

    # -- in the thread --------------------------------------------------------------------------------------------

    def _append(self, layer: int, timeout: float) -> None:
        """Append a layer's rows on all R-nodes, unless an earlier layer's rows could not be appended."""
        try:
            if self._over:
                return
            self.judge(timeout)
            self._copied[layer % BUFFERS].synchronize()
            self._check(self._group.ring(layer, self._rows[layer % BUFFERS]))
            self._check(self._group.wait(timeout, rows=False))
        except BaseException as error:
            self._over, self._fault = True, error
        finally:
            os.eventfd_write(self._free, 1)

    def _end(self) -> None:
        try:
            self._written.synchronize()
        except BaseException as error:
            self._fault = self._fault or error
        finally:
            os.eventfd_write(self._ended, 1)
