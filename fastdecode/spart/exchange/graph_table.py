"""GraphTable: the numbers that a captured step reads, in a buffer whose layout depends on its size and Kind alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fastdecode.spart.exchange_kernels import RowAddresses
from fastdecode.spart.resident.rows import ResidentNumbers
from fastdecode.spart.sampler.sampling import Sampler
from fastdecode.spart.sampler.sampling_kinds import KINDS, Kind
from fastdecode.spart.step.batch import SampleSpec
from fastdecode.spart.step.step_table import StepTable


def size_class(n_rows: int) -> int:
    """The rows of the graph that runs steps of `n_rows`: a power of two, or the middle between two of them."""
    power = 1 << (n_rows - 1).bit_length()
    return power * 3 // 4 if power >= 8 and n_rows <= power * 3 // 4 else power


class GraphTable:
    """The table of one step of up to `size` rows. The rows beyond the step's are of token 0, and nobody reads their
    results."""

    def __init__(
        self,
        size: int,
        kind: Kind | None,
        vocab_size: int,
        step: StepTable | None = None,
        addresses: RowAddresses | None = None,
        specs: Sequence[SampleSpec] = (),
        page_tables: tuple[int, int] = (0, 0),
        resident: ResidentNumbers | None = None,
    ):
        """`kind` None: the graph draws no tokens. Without `step`, `addresses`, `specs` and `resident` the table moves
        no row and asks for the likeliest tokens. `page_tables`: sections, and blocks of a sequence, in the tables of
        the device's own KV pages."""
        table = self._table = StepTable()
        for name in ("tokens", "positions", "last rows"):
            table.add(name, _padded(None if step is None else step[name], np.int64, size))
        for name in ("q", "kv", "o"):
            values = None if addresses is None else getattr(addresses, name).view(np.int64)
            table.add(name, _padded(values, np.int64, size))
        table.add("counts", _padded(None if addresses is None else addresses.counts.view(np.int32), np.int32, 2))
        sections, width = page_tables
        if sections:
            paged = np.full((sections, size, width), -1, np.int32)
            if resident is not None:
                paged[:, : resident.pages.shape[1]] = resident.pages
            table.add("resident rows", _padded(resident and resident.rows.ravel(), np.int32, 4 * size))
            table.add("resident counts", _padded(resident and resident.counts, np.int32, 2))
            table.add("resident pages", paged.ravel())
            answers = None if resident is None or resident.answers is None else resident.answers.view(np.int64)
            table.add("resident answers", _padded(answers, np.int64, size))
        self.sampler = None if kind is None else Sampler.of_kind(kind, size, specs, vocab_size, table)

    def upload(self, buffer: torch.Tensor) -> None:
        """Start a copy of the table into the beginning of `buffer`, uint8 on a device."""
        buffer[: self._table.nbytes].copy_(self._table.pinned(), non_blocking=True)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays of a table that is in the beginning of `buffer`."""
        return self._table.views(buffer[: self._table.nbytes])

    @staticmethod
    def most_bytes(size: int, vocab_size: int, page_tables: tuple[int, int] = (0, 0)) -> int:
        """Bytes of a buffer that holds every table of up to `size` rows."""
        return GraphTable(size, KINDS[0], vocab_size, page_tables=page_tables)._table.nbytes


def _padded(values: npt.NDArray[np.generic] | None, dtype: type[np.generic], size: int) -> npt.NDArray[np.generic]:
    padded = np.zeros(size, dtype)
    if values is not None:
        padded[: len(values)] = values
    return padded
