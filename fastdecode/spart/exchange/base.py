"""The contract of an exchange: a step's Q, K, V and O rows on their way between the decoder and the links' slots.

The decoder works on three tensors a step, which the exchange makes: `q` [rows, n_q_heads * head_size], `kv` [rows,
n_kv_heads * (head_size + v_size)] and `o` [rows, n_q_heads * v_size]. A layer with fewer or smaller heads uses the
first elements of a row. Attending rows stand first; the Q and O rows of prompts, behind them, are the S-Part's own. In
each layer the decoder fills `q` and `kv`, calls `post`, does the work that needs no R-node, calls `wait`, and reads
`o`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fastdecode.region.contract import ROW_ATTEND, ROW_DTYPE, ROW_PARTIAL, ROW_SLIDE, ROW_TRIM
from fastdecode.spart.served import TORCH_DTYPES
from fastdecode.spart.step.batch import Chunk
from fastdecode.transports._native import Port, StepGroup
from fastdecode.transports.base import DataPath, LinkDown, Pending, StepCost, TransportError
from fastdecode.transports.token_team import TokenTeam


class SlotViews:
    """torch views of one slot of a link's region: `q`, `kv` and `o`, each [max_rows, elements of a row]. A resident
    link has none."""

    def __init__(self, link: DataPath, slot: int):
        """Raises ValueError if the link has no such slot."""
        g, y = link.geometry, link.layout
        if not 0 <= slot < g.n_slots:
            raise ValueError(f"slot {slot} is not one of the link's {g.n_slots}")
        self.link = link
        self._dtype = TORCH_DTYPES[g.act_dtype]
        if link.resident:
            return
        self._region, self._max_rows = held_region(link), g.max_rows
        self.q = self._rows(y.slot(slot) + y.q, y.q_row_bytes)
        self.kv = self._rows(y.slot(slot) + y.kv, y.kv_row_bytes)
        self.o = self._rows(y.slot(slot) + y.o, y.o_row_bytes)

    def _rows(self, offset: int, row_bytes: int) -> torch.Tensor:
        # Not torch.frombuffer, which holds no region: a link that goes down during a step would unmap it while the step
        # still writes to it.
        rows = self._region[offset : offset + self._max_rows * row_bytes]
        return torch.from_numpy(rows).view(self._dtype).view(self._max_rows, -1)


def held_region(link: DataPath) -> np.ndarray:
    """The bytes of a link's region, which stays mapped as long as the array lives. For a link that went down before the
    step began, memory that no one reads: the step fails on this link, and goes on for the others."""
    try:
        # One call looks at the region and holds it: the event loop may release it at any time.
        return np.frombuffer(link.region, np.uint8)
    except ValueError:  # the region is released
        return np.zeros(link.layout.region_bytes, np.uint8)


@dataclass(frozen=True, slots=True)
class LinkRows:
    """One link's rows of a step, as ranges of the step's rows. In the slot, appended rows follow attending rows.

    Rows of the S-Part's device may attend to a remote prefix (RemotePrefix), too. In the slot these rows follow the
    link's other attending rows; each has two, for Q and O, and for the log-sum-exp of its scores.
    """

    views: SlotViews
    entries: np.ndarray  # row table, ROW_DTYPE
    attending: slice[int, int, None]  # rows that attend here, and are appended
    appended: slice[int, int, None]  # rows that are only appended: of prompts that the S-Part attends to
    partial: tuple[slice[int, int, None], ...] = ()  # the rows that attend to remote prefixes here
    cuts: tuple[int, ...] = ()  # of a resident link: tokens of each entry's remote prefix; empty: no entry has one

    @property
    def n_attend(self) -> int:
        return self.attending.stop - self.attending.start

    @property
    def n_rows(self) -> int:
        return self.n_attend + self.appended.stop - self.appended.start

    @property
    def n_partial(self) -> int:
        return sum(rows.stop - rows.start for rows in self.partial)


def link_rows(chunks: list[Chunk], views: dict[int, SlotViews]) -> list[LinkRows]:
    """Split a step among its links. `views` has the slot of every link that a chunk names, by the link's index.

    Raises ValueError if the chunks are not in order or a link gets more rows than its slot has.
    """
    kinds = [(chunk.prefill, chunk.link) for chunk in chunks]
    if kinds != sorted(kinds):
        raise ValueError("the chunks of a step are not in order: attending chunks first, then by link")
    table = np.array([_entry(chunk) for chunk in chunks], np.uint32).view(ROW_DTYPE)[:, 0]
    ranges: tuple[dict[int, slice], dict[int, slice]] = ({}, {})  # attending, appended: the rows of a link
    tables_of: dict[int, list[np.ndarray]] = {}
    partial = _partial_rows(chunks)
    start = row = 0
    for (prefill, link), members in groupby(kinds):
        stop = start + len(list(members))
        first, row = row, row + sum(len(chunk.tokens) for chunk in chunks[start:stop])
        tables_of.setdefault(link, []).append(table[start:stop])
        ranges[prefill][link] = slice(first, row)
        start = stop
    result = []
    for link in sorted({*tables_of, *partial}) if partial else tables_of:
        attending, appended = (kind.get(link, slice(0, 0)) for kind in ranges)
        partials = partial.get(link, [])
        tables = tables_of.get(link, [])
        if partials:
            tables.append(np.array([entry for entry, _ in partials], np.uint32).view(ROW_DTYPE)[:, 0])
        entries = tables[0] if len(tables) == 1 else np.concatenate(tables)
        of_device = partial and views[link].link.resident
        cuts = [0 if c.prefix is None else c.prefix.length for c in chunks if c.link == link] if of_device else []
        rows = LinkRows(views[link], entries, attending, appended, tuple(rows for _, rows in partials), tuple(cuts))
        n, limit = rows.n_rows + 2 * rows.n_partial, rows.views.link.geometry.max_rows
        if n > limit:
            raise ValueError(f"a step has {n} rows for a link that takes {limit}")
        result.append(rows)
    return result


def _partial_rows(chunks: list[Chunk]) -> dict[int, list[tuple[tuple[int, ...], slice]]]:
    """By link, the row table's entry and the step's rows of each chunk that attends to a remote prefix there."""
    if not any(chunk.prefix for chunk in chunks):
        return {}
    partial: dict[int, list[tuple[tuple[int, ...], slice]]] = {}
    row = 0
    for chunk in chunks:
        n = len(chunk.tokens)
        if chunk.prefix is not None:
            if chunk.prefill:
                raise ValueError("a prompt that the S-Part attends to has no remote prefix")
            link, seq_index, tag, length = chunk.prefix
            entry = (seq_index, tag, length, 2 * n, ROW_ATTEND | ROW_PARTIAL, 0)
            partial.setdefault(link, []).append((entry, slice(row, row + n)))
        row += n
    return partial


assert ROW_DTYPE.names == ("seq_index", "tag", "pos", "n_rows", "flags", "reserved")


def _entry(chunk: Chunk) -> tuple[int, int, int, int, int, int]:
    """The entry of the row table, in the order of ROW_DTYPE."""
    flags = 0 if chunk.prefill else ROW_ATTEND
    if chunk.trim:
        flags |= ROW_TRIM
    if chunk.slide:
        flags |= ROW_SLIDE
    return chunk.seq_index, chunk.tag, chunk.pos, len(chunk.tokens), flags, 0


class RowTensors(NamedTuple):
    """The rows of a step in the activation dtype, with the shapes that the docstring of this module names."""

    q: torch.Tensor
    kv: torch.Tensor
    o: torch.Tensor


class _GroupMember(NamedTuple):
    """One member of a link in a StepGroup, in the order that transports/_native.pyi names."""

    port: Port
    entries: npt.NDArray[np.uint8]
    attend_from: int
    attend_to: int
    append_from: int
    append_to: int
    columns: npt.NDArray[np.uint32] | None  # None: whole rows


class StepLinks:
    """One step on all of its links, from the message that arms it to its end. Not thread-safe.

    A link that fails takes no part in the rest of the step, and `failures` says why. The step goes on for the other
    links; the methods raise CallRefused or LinkDown only when no link is left.
    """

    _judged = False
    goes_on = False  # True: the step has other rows too, and goes on if all of these links fail

    def __init__(self, slot: int, link_rows: list[LinkRows], host: RowTensors | None = None):
        """`host` is the step's `q`, `kv` and `o` on the CPU, `q` and `o` without the rows of prompts. One C call
        a layer copies each link's rows to its slot and back. Without `host` the decoder or the device writes and reads
        the rows in the slots."""
        self._link_rows = link_rows
        self.failures: dict[DataPath, TransportError] = {}
        pairs = [(rows, member) for rows in link_rows for member in rows.views.link.members]
        self._members = [(rows.views.link, member.link) for rows, member in pairs]
        members = [
            _GroupMember(
                port=member.link.port,
                entries=rows.entries.view(np.uint8),
                attend_from=rows.attending.start,
                attend_to=rows.attending.stop,
                append_from=rows.appended.start,
                append_to=rows.appended.stop,
                columns=member.columns,
            )
            for rows, member in pairs
        ]
        self._merged: npt.NDArray[np.uint8] | None = None
        if host is None:
            self._group = StepGroup(slot, members)
            return
        q, kv, o = (x.view(torch.uint8).numpy() for x in host)
        if link_rows and isinstance(link_rows[0].views.link, TokenTeam):
            # R-nodes that share tokens each answer with O rows of their own, which `wait` merges.
            self._merged, o = o, np.empty((len(o), self._team.o_row_bytes), np.uint8)
            self._partial_o = o
        self._group = StepGroup(slot, members, q=q, kv=kv, o=o)

    @property
    def _team(self) -> TokenTeam:
        team = self._link_rows[0].views.link
        assert isinstance(team, TokenTeam)
        return team

    def arm(self, n_layers: int = 0) -> None:
        """Publish the step, which runs the first `n_layers` layers of the links, to every link; 0: all layers. Returns
        at once: the R-nodes plan it while the S-Part computes the first layer's rows."""
        self._check(self._group.arm(n_layers))

    def judge(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the R-nodes' verdicts on the step, which come once."""
        if not self._judged:
            self._check(self._group.wait(timeout, rows=False))
            self._judged = True

    def disarm(self) -> dict[DataPath, StepCost]:
        """End the step. Returns its cost on each link that has not failed."""
        costs: dict[DataPath, list[StepCost]] = {}
        for i, *times in self._group.disarm():
            link, _ = self._members[i]
            if link not in self.failures:
                costs.setdefault(link, []).append(StepCost(*times))
        return {link: StepCost.of_members(times) for link, times in costs.items()}

    def settle(self, timeout: float) -> None:
        """After a failure, wait for the calls that are still in progress, so that the slots can be used again."""
        self._group.wait(timeout, rows=False)
        self._group.disarm()

    def _check(self, failures: list[tuple[int, int, str]] | None) -> None:
        self._note(failures or ())
        if len(self.failures) == len(self._link_rows) and not self.goes_on:
            # A raised exception holds this frame. If the frame or `failures` held the exception too, this cycle would
            # keep the regions mapped until the garbage collector runs.
            errors, self.failures = list(self.failures.values()), {}
            raise errors.pop(0)

    def _note(self, failures: Iterable[tuple[int, int, str]]) -> None:
        for member, status, message in failures:
            link, failed = self._members[member]
            error = failed.failure(status, message)
            error.link = link  # which may be a team that `failed` is a member of
            if link not in self.failures or isinstance(error, LinkDown):
                self.failures[link] = error


class RowExchange(Protocol):
    """The tensors of a step's rows, and the calls that ask the R-nodes for a layer and wait for them; see Exchange."""

    q: torch.Tensor
    kv: torch.Tensor
    o: torch.Tensor

    def post(self, layer: int, timeout: float) -> None: ...
    def wait(self, timeout: float) -> None: ...


class StepExchange(RowExchange, Protocol):
    """The exchange of a step that the host drives; see Exchange."""

    @property
    def failures(self) -> dict[DataPath, TransportError]: ...
    @property
    def pending(self) -> Pending: ...
    @property
    def ready(self) -> bool: ...
    def arm(self, n_layers: int = 0) -> None: ...
    def finish(self) -> None: ...
    def finished(self) -> None: ...
    def settle(self, timeout: float) -> None: ...
    def disarm(self) -> dict[DataPath, StepCost]: ...


class Exchange(StepLinks):
    """A step whose layers the host rings, and the tensors `q`, `kv` and `o` of its rows. The O rows of a link that has
    failed are zeros."""

    q: torch.Tensor
    kv: torch.Tensor
    o: torch.Tensor
    _layer = 0  # that was asked for last

    @property
    def pending(self) -> Pending:
        """The answers that `wait` waits for; None: there are none."""
        return self._group if self._link_rows else None

    def post(self, layer: int, timeout: float) -> None:
        """Ask every link for a layer. `q` and `kv` must not be written before `wait`.

        The first layer waits up to `timeout` seconds for the R-nodes' verdicts on the step.
        """
        self.judge(timeout)
        self._send_rows()
        self._layer = layer
        self._check(self._group.ring(layer))

    @property
    def alone(self) -> bool:
        """True if no other step can be in progress on these links, and `run_layers` may run this one."""
        links = [rows.views.link for rows in self._link_rows]
        return self._merged is None and all(link.geometry.n_slots == 1 for link in links)

    def run_layers(
        self, layers: object, from_layer: int, to_layer: int, timeout: float
    ) -> tuple[npt.NDArray[np.float64], bool]:
        """`post` and `wait` for each layer from `from_layer` to before `to_layer`, on a CPU. `layers` is what the
        S-Part computes in C in and after each wait (StepGroup.run_layers). No other step can run meanwhile.

        Returns when the wait for each layer began and when its reply had come, float64 [layers, 2] in seconds of
        time.perf_counter. The second result is False if a link has failed: then the S-Part's work after the last of
        these layers is still to be done.
        """
        self.judge(timeout)
        failures, times = self._group.run_layers(layers, from_layer, to_layer, timeout)
        self._check(failures)
        return np.frombuffer(times).reshape(-1, 2), failures is None

    def wait(self, timeout: float) -> None:
        """Block until every link has answered; then `o` is filled. `timeout` is in seconds."""
        self._check(self._group.wait(timeout))
        if self._merged is not None:
            self._team.merge(self._layer, self._partial_o, self._merged)
        self._take_rows()

    @property
    def ready(self) -> bool:
        """False if the next call would wait for what `pending` stands for, although others may use the time."""
        return True

    def finish(self) -> None:
        """End the layers, after the device was given the whole step."""

    def finished(self) -> None:
        """Block until all work of the exchange has ended. Raises CallRefused or LinkDown if no link is left."""

    def _send_rows(self) -> None:
        """Bring `q` and `kv` to the host, before a layer is asked for."""

    def _take_rows(self) -> None:
        """Bring the O rows from the host to `o`, after all links have answered."""


def buffers(link_rows: list[LinkRows], device: torch.device) -> RowTensors:
    """New tensors for the rows of a step."""
    _, n_rows = row_counts(link_rows)
    link = link_rows[0].views.link
    y, dtype = link.layout, TORCH_DTYPES[link.geometry.act_dtype]
    sizes = y.q_row_bytes, y.kv_row_bytes, y.o_row_bytes
    return RowTensors._make(torch.empty(n_rows, n // dtype.itemsize, device=device, dtype=dtype) for n in sizes)


def pinned(rows: RowTensors, n_q_rows: int) -> RowTensors:
    """New tensors in pinned memory for copies of `rows`, of `q` and `o` for the first `n_q_rows` rows."""
    some = rows.q[:n_q_rows], rows.kv, rows.o[:n_q_rows]
    return RowTensors._make(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in some)


def row_counts(link_rows: list[LinkRows]) -> tuple[int, int]:
    """The numbers of a step's attending rows and of all its rows."""
    return sum(rows.n_attend for rows in link_rows), sum(rows.n_rows for rows in link_rows)
