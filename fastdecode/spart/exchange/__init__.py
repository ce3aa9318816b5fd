"""The ways in which a step's rows pass between the decoder and the links' slots.

base         the contract of an exchange, and the rows of a step that belong to each link
direct       on a CPU: the decoder's rows are the slot's
staged       on every other device: decoding rows, by copies in pinned memory, and events
streamed     on every other device: prompts, whose K and V stream out behind the layers
resident     a step with rows whose KV pages lie on the S-Part's own device, around one of these two
bypass       on CUDA: captured decode steps, whose stream rings the R-nodes and waits for them
stream_rows  the operations of such a stream, and links' regions that are mapped into the device
graph        CUDA streams and graphs of torch
graph_table  GraphTable: the numbers that a captured step reads, in a fixed layout
driver       the functions of the CUDA driver that torch lacks
chosen       ChosenExchange: the exchange of an S-Part; choose_exchange, and the check at start
"""

from __future__ import annotations

import torch

from fastdecode.spart.exchange.base import (
    Exchange,
    LinkRows,
    RowExchange,
    RowTensors,
    SlotViews,
    StepExchange,
    buffers,
    link_rows,
    row_counts,
)
from fastdecode.spart.exchange.direct import Direct
from fastdecode.spart.exchange.resident import Resident
from fastdecode.spart.exchange.staged import Staged
from fastdecode.spart.exchange.streamed import Appender, Streamed

__all__ = ["Appender", "Exchange", "LinkRows", "RowExchange", "SlotViews", "StepExchange", "link_rows", "make_exchange"]


def make_exchange(slot: int, rows: list[LinkRows], device: torch.device, appender: Appender | None) -> StepExchange:
    """The exchange of one step whose S-Part runs on `device`, which has an `appender` unless it is a CPU.

    Raises ValueError for a step of decoding rows and prompts on a device that is not a CPU.
    """
    if appender is None:
        return Direct(slot, rows)
    n_attend, n_rows = row_counts(rows)
    if 0 < n_attend < n_rows:
        raise ValueError(f"a step on {device.type} has decoding rows or prompts, not both")

    def by_host(rows: list[LinkRows], tensors: RowTensors) -> Exchange:
        if n_attend:
            return Staged(slot, rows, device, tensors)
        return Streamed(slot, rows, device, tensors, appender)

    tensors = buffers(rows, device)
    return Resident(rows, tensors, by_host) if rows[0].views.link.resident else by_host(rows, tensors)
