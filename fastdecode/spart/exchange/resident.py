"""Resident: the exchange of a step of which some rows, or all, belong to pages of the S-Part's own device, and
ResidentStream: the same within a captured step.

The rows of the device's pages come first, in order of link. They go to the kernels of these pages; another exchange
takes the rest, if there are any, to the R-nodes. The R-nodes are asked first, so that they attend while the device
does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fastdecode.spart.exchange.base import Exchange, LinkRows, RowExchange, RowTensors
from fastdecode.spart.resident.kernels import ResidentKernels, ResidentTables
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.spart.resident.rows import ResidentRows
from fastdecode.transports.base import DataPath, Pending, StepCost, TransportError


class Resident:
    """A step with rows of a ResidentLink, all of which attend, or none. `q`, `kv` and `o` are on the device."""

    def __init__(
        self,
        link_rows: list[LinkRows],
        rows: RowTensors,
        make: Callable[[list[LinkRows], RowTensors], Exchange],
    ):
        """`rows` are the step's rows on the device. `make` makes the exchange of the rows that go to R-nodes, of which
        there may be none."""
        own, *others = link_rows
        link, first = own.views.link, own.n_rows
        assert isinstance(link, ResidentLink), "the link of the S-Part's device is the first"
        self.q, self.kv, self.o = rows
        self._own = ResidentRows(link, own.entries, attending=own.n_attend > 0)
        self._own_rows = RowTensors._make(x[:first] for x in rows)
        self._others = make([moved(rows, first) for rows in others], RowTensors._make(x[first:] for x in rows))
        self._others.goes_on = True
        self._computed = torch.Event(self.q.device)

    @property
    def failures(self) -> dict[DataPath, TransportError]:
        return self._others.failures

    @property
    def pending(self) -> Pending:
        return self._others.pending

    @property
    def ready(self) -> bool:
        return self._others.ready

    def arm(self) -> None:
        self._others.arm()
        self._own.arm()
        self._own.upload()

    def post(self, layer: int, timeout: float) -> None:
        self._others.post(layer, timeout)
        self._own.pass_layer(layer, *self._own_rows)

    def wait(self, timeout: float) -> None:
        self._others.wait(timeout)

    def finish(self) -> None:
        self._others.finish()
        self._computed.record()

    def finished(self) -> None:
        """Block until all work of the step has ended: its pages may belong to another step afterwards."""
        self._others.finished()
        self._computed.synchronize()

    def settle(self, timeout: float) -> None:
        self._others.settle(timeout)
        self._computed.record()
        self._computed.synchronize()
        self._own.end()

    def disarm(self) -> dict[DataPath, StepCost]:
        self._own.end()
        return self._others.disarm()


class ResidentStream:
    """A RowExchange within a captured step. The tables say which rows belong to the device's pages; the others go the
    way of `others`, whose `q`, `kv` and `o` the step has."""

    def __init__(self, others: RowExchange, kernels: ResidentKernels, tables: ResidentTables):
        self._others, self._kernels, self._tables = others, kernels, tables
        self.q, self.kv, self.o = others.q, others.kv, others.o

    def post(self, layer: int, timeout: float = 0.0) -> None:
        self._others.post(layer, timeout)
        self._kernels.pass_layer(layer, self.q, self.kv, self.o, self._tables)

    def wait(self, timeout: float = 0.0) -> None:
        self._others.wait(timeout)


def moved(rows: LinkRows, first: int) -> LinkRows:
    """The rows of a link in the part of a step that begins at row `first`."""
    ranges = [slice(max(r.start - first, 0), max(r.stop - first, 0)) for r in (rows.attending, rows.appended)]
    return replace(rows, attending=ranges[0], appended=ranges[1])
