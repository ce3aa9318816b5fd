"""CUDA kernels that move a step's rows straight between the S-Part's tensors and slots in mapped host memory.

rows.cu has the kernels, `row_addresses` the tables that they read, kernels/gpu/cupy_kernels.py loads them. Tests
compile them for every architecture and run them on a CPU; an earlier revision has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SOURCE = Path(__file__).with_name("rows.cu")
#: Threads of a block; the kernels are compiled with this FD_ROW_THREADS.
ROW_THREADS = 512
#: Bytes that a thread moves at once. Every row of Q, KV and O is a multiple of it, and every row starts at one.
CHUNK_BYTES = 16


@dataclass(frozen=True, slots=True)
class SlotRows:
    """One link's slot and the rows that it has in a step.

    `q`, `kv` and `o` are the addresses, as the device sees them, of the slot's first rows. Of the step's rows, those of
    `attending` come first in the slot, then those of `appended`, which have K and V only.
    """

    q: int
    kv: int
    o: int
    attending: slice[int, int, None]
    appended: slice[int, int, None]
    partial: tuple[slice[int, int, None], ...] = ()  # rows that attend to remote prefixes; see LinkRows


@dataclass(frozen=True, slots=True)
class RowAddresses:
    """Where each row of a step is in its slot, as the kernels' tables. 0: the row has no slot."""

    q: npt.NDArray[np.uint64]  # [attending rows]
    kv: npt.NDArray[np.uint64]  # [rows]
    o: npt.NDArray[np.uint64]  # [attending rows]
    counts: npt.NDArray[np.uint32]  # attending rows, rows
    answers: npt.NDArray[np.uint64]  # [attending rows]: the answer that a row's own is merged with; 0: none


def row_addresses(slots: Sequence[SlotRows], q_row_bytes: int, kv_row_bytes: int, o_row_bytes: int) -> RowAddresses:
    """The tables for a step whose rows are in `slots`. Raises ValueError if a row is not aligned to CHUNK_BYTES."""
    row_bytes = [q_row_bytes, kv_row_bytes, o_row_bytes]
    numbers = [*row_bytes, *(address for slot in slots for address in (slot.q, slot.kv, slot.o))]
    if any(number % CHUNK_BYTES for number in numbers):
        raise ValueError(f"rows must be aligned to {CHUNK_BYTES} bytes")
    n_attend = max(rows.stop for slot in slots for rows in (slot.attending, *slot.partial))
    n_rows = max(n_attend, *(slot.appended.stop for slot in slots))
    q, o = np.zeros(n_attend, np.uint64), np.zeros(n_attend, np.uint64)
    kv, answers = np.zeros(n_rows, np.uint64), np.zeros(n_attend, np.uint64)
    for slot in slots:
        n = slot.attending.stop - slot.attending.start
        more = slot.appended.stop - slot.appended.start
        rows = np.arange(n + more, dtype=np.uint64)
        q[slot.attending] = slot.q + rows[:n] * np.uint64(q_row_bytes)
        o[slot.attending] = slot.o + rows[:n] * np.uint64(o_row_bytes)
        kv[slot.attending] = slot.kv + rows[:n] * np.uint64(kv_row_bytes)
        kv[slot.appended] = slot.kv + rows[n:] * np.uint64(kv_row_bytes)
        for some in slot.partial:
            in_slot = n + 2 * np.arange(some.stop - some.start, dtype=np.uint64)
            q[some] = slot.q + in_slot * np.uint64(q_row_bytes)
            answers[some] = slot.o + in_slot * np.uint64(o_row_bytes)
            n += 2 * (some.stop - some.start)
    return RowAddresses(q, kv, o, np.array([n_attend, n_rows], np.uint32), answers)
