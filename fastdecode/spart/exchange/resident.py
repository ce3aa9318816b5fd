"""Resident: the exchange of a step of which some rows, or all, belong to pages of the S-Part's own device, and
ResidentStream: the same within a captured step.

The rows of the device's pages come first, in order of link. They go to the kernels of these pages; another exchange
takes the rest, if there are any, to the R-nodes. The R-nodes are asked first, so that they attend while the device
does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from fastdecode.spart.exchange.base import Exchange, LinkRows, RowExchange, RowTensors
from fastdecode.spart.resident.kernels import ResidentKernels, ResidentTables
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.spart.resident.rows import ResidentRows
from fastdecode.spart.step.step_table import StepTable
from fastdecode.transports.base import DataPath, Pending, StepCost, TransportError


class Resident:
    """A step with rows of a ResidentLink, all of which attend, or none. `q`, `kv` and `o` are on the device."""

    def __init__(
        self, link_rows: list[LinkRows], rows: RowTensors, make: Callable[[list[LinkRows], RowTensors], Exchange]
    ):
        """`rows` are the step's rows on the device. `make` makes the exchange of the rows that go to R-nodes, of which
        there may be none."""
        own, *others = link_rows
        link, first = own.views.link, own.n_rows
        assert isinstance(link, ResidentLink), "the link of the S-Part's device is the first"
        self.q, self.kv, self.o = rows
        self._own = ResidentRows(link, own.entries, own.n_attend > 0, own.cuts)
        self._own_rows = RowTensors._make(x[:first] for x in rows)
        self._prefixes = RemotePrefixes(others, rows) if any(rows.partial for rows in others) else None
        if self._prefixes is not None:
            self._others = make(self._prefixes.link_rows, self._prefixes.rows)
        else:
            self._others = make([moved(rows, first) for rows in others], RowTensors._make(x[first:] for x in rows))
        self._others.goes_on = True
        self._layer = 0
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

    def arm(self, n_layers: int = 0) -> None:
        self._others.arm(n_layers)
        self._own.arm()
        self._own.upload(None if self._prefixes is None else self._prefixes.answers)

    def post(self, layer: int, timeout: float) -> None:
        self._layer = layer
        if self._prefixes is not None:
            self._prefixes.gather()
        self._others.post(layer, timeout)
        self._own.pass_layer(layer, *self._own_rows)

    def wait(self, timeout: float) -> None:
        self._others.wait(timeout)
        if self._prefixes is not None:
            self._prefixes.scatter()
            self._own.merge(self._layer, self._own_rows.o)

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


class RemotePrefixes:
    """The rows of a step that go to R-nodes, some of them because their sequences have remote prefixes.

    `rows` are copies of them, in the order of the slots. `link_rows` are their ranges, and `answers` is the table of
    ResidentTables.
    """

    def __init__(self, others: list[LinkRows], step: RowTensors):
        """`others` are the rows of the links to R-nodes, `step` those of the step, of which all attend."""
        self._step = step
        sources: list[int] = []  # the step's row of each row
        whole: list[int] = []  # the rows whose answers need no merging
        partial: list[tuple[int, int]] = []  # the others: the step's row, and the row of its answer
        self.link_rows = []
        for rows in others:
            start = len(sources)
            whole += range(start, start + rows.n_attend)
            sources += range(rows.attending.start, rows.attending.stop)
            for row in (row for some in rows.partial for row in range(some.start, some.stop)):
                partial.append((row, len(sources)))
                sources += [row, row]  # the second one is for the log-sum-exp
            self.link_rows.append(replace(rows, attending=slice(start, len(sources)), appended=slice(0, 0), partial=()))
        table = StepTable()
        table.add("sources", np.array(sources, np.int64))
        table.add("whole", np.array(whole, np.int64))
        table.add("targets", np.array([sources[row] for row in whole], np.int64))
        self._tables = table.upload(step.q.device)
        self.rows = RowTensors._make(x.new_empty(len(sources), x.shape[1]) for x in step)
        o = self.rows.o
        self.answers = np.zeros(len(step.o), np.uint64)
        for row, at in partial:
            self.answers[row] = o.data_ptr() + at * o.stride(0) * o.element_size()

    def gather(self) -> None:
        """Copy Q, K and V of the rows."""
        sources = self._tables["sources"]
        self.rows.q.copy_(self._step.q.index_select(0, sources))
        self.rows.kv.copy_(self._step.kv.index_select(0, sources))

    def scatter(self) -> None:
        """Copy the answers that need no merging."""
        self._step.o.index_copy_(0, self._tables["targets"], self.rows.o.index_select(0, self._tables["whole"]))


class ResidentStream:
    """A RowExchange within a captured step. The tables say which rows belong to the device's pages; the others go the
    way of `others`, whose `q`, `kv` and `o` the step has."""

    def __init__(self, others: RowExchange, kernels: ResidentKernels, tables: ResidentTables):
        self._others, self._kernels, self._tables = others, kernels, tables
        self.q, self.kv, self.o = others.q, others.kv, others.o
        self._layer = 0

    def post(self, layer: int, timeout: float = 0.0) -> None:
        self._layer = layer
        self._others.post(layer, timeout)
        self._kernels.pass_layer(layer, self.q, self.kv, self.o, self._tables)

    def wait(self, timeout: float = 0.0) -> None:
        self._others.wait(timeout)
        self._kernels.merge(self._layer, self.o, self._tables)


def moved(rows: LinkRows, first: int) -> LinkRows:
    """The rows of a link in the part of a step that begins at row `first`."""
    ranges = [slice(max(r.start - first, 0), max(r.stop - first, 0)) for r in (rows.attending, rows.appended)]
    return replace(rows, attending=ranges[0], appended=ranges[1])
