"""ResidentRows: the rows of one step that attend to pages of the S-Part's own device, or are appended to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fastdecode.region.contract import blocks_for
from fastdecode.spart.resident.kernels import ResidentTables
from fastdecode.spart.resident.link import ResidentLink
from fastdecode.spart.step.step_table import StepTable
from fastdecode.transports.base import refusals


class ResidentNumbers(NamedTuple):
    """The tables of a step, of which ResidentTables has the meanings, in the host's memory."""

    rows: npt.NDArray[np.int32]  # [rows, 4]
    counts: npt.NDArray[np.int32]  # [2]
    pages: npt.NDArray[np.int32]  # [sections, sequences, blocks]
    answers: npt.NDArray[np.uint64] | None = None  # [rows]; None: no sequence has a remote prefix


class ResidentRows:
    """The rows of a step on a ResidentLink, all of which attend, or none."""

    def __init__(self, link: ResidentLink, entries: np.ndarray, attending: bool, cuts: Sequence[int] = ()):
        """`entries` is their row table, ROW_DTYPE. `cuts`: see LinkRows."""
        self._link, self._arena = link, link.arena
        self._entries, self._attending, self._cuts = entries, attending, cuts
        self._copies = b""

    def arm(self) -> None:
        """Take pages for the rows. Raises CallRefused."""
        with refusals(self._link):
            self._copies = self._arena.lists.append(self._entries.view(np.uint8))

    def numbers(self, width: int | None = None, answers: npt.NDArray[np.uint64] | None = None) -> ResidentNumbers:
        """The tables of the step, with the pages of up to `width` blocks; None: as many as the longest sequence has.
        `answers`: see ResidentTables, for the first rows of the step or more."""
        rows = row_numbers(self._entries, self._cuts)
        width = width or blocks_for(self._longest)
        pages = np.full((self._arena.lists.n_sections, len(self._entries), width), -1, np.int32)
        self._arena.lists.tables(self._entries.view(np.uint8), pages, width)
        counts = np.array([len(rows) * self._attending, len(rows)], np.int32)
        return ResidentNumbers(rows, counts, pages, None if answers is None else answers[: len(rows)])

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence, with its rows."""
        return int((self._entries["pos"].astype(np.int64) + self._entries["n_rows"]).max())

    def upload(self, answers: npt.NDArray[np.uint64] | None = None) -> None:
        """Start the upload of the tables for `pass_layer`, and copy shared pages. `answers`: see ResidentTables."""
        numbers, table = self.numbers(answers=answers), StepTable()
        table.add("rows", numbers.rows.ravel())
        table.add("counts", numbers.counts)
        table.add("pages", numbers.pages.ravel())
        if numbers.answers is not None:
            table.add("answers", numbers.answers.view(np.int64))
        there = table.upload(self._arena.memory.device)
        paged = there["pages"].view(numbers.pages.shape)
        lse = None if numbers.answers is None else self._link.kernels.new_lse(len(numbers.rows))
        self._tables = ResidentTables(
            there["rows"], there["counts"], paged, self._longest, self._attending, None, there.get("answers"), lse
        )
        self.copy_shared()

    def copy_shared(self) -> None:
        """Copy the shared pages that rows are appended to, in the current stream."""
        if not self._copies:
            return
        moves = np.frombuffer(self._copies, np.uint32).astype(np.int64) * self._arena.lists.plane_bytes
        table = StepTable()
        table.add("moves", moves + self._arena.memory.data_ptr())
        table.add("count", np.array([len(moves) // 2], np.int32))
        self._moves = table.upload(self._arena.memory.device)
        self._link.kernels.copy(self._moves["moves"], self._moves["count"])

    def pass_layer(self, layer: int, q: torch.Tensor, kv: torch.Tensor, o: torch.Tensor) -> None:
        """Append K and V of a layer's rows, and attend to them."""
        self._link.kernels.pass_layer(layer, q, kv, o, self._tables)

    def merge(self, layer: int, o: torch.Tensor) -> None:
        """Merge a layer's answers `o` with those of R-nodes, which have come."""
        self._link.kernels.merge(layer, o, self._tables)

    def end(self) -> None:
        """End the step, whose copies of pages the device has made. Idempotent."""
        self._arena.lists.end_copies(self._copies)
        self._copies = b""


def row_numbers(entries: np.ndarray, cuts: Sequence[int] = ()) -> npt.NDArray[np.int32]:
    """Each row's entry, its position, its number within the entry, and the first position of its sequence that lies on
    the device: its cut, or 0. int32 [rows, 4], as PagedRows.rows."""
    n_rows = entries["n_rows"].astype(np.int64)
    rows = np.zeros((n_rows.sum(), 4), np.int32)
    rows[:, 0] = np.arange(len(entries)).repeat(n_rows)
    rows[:, 2] = np.arange(len(rows)) - (np.cumsum(n_rows) - n_rows).repeat(n_rows)
    rows[:, 1] = entries["pos"].astype(np.int64).repeat(n_rows) + rows[:, 2]
    if cuts:
        rows[:, 3] = np.array(cuts).repeat(n_rows)
    return rows
