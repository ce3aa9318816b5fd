"""The ways in which a step's rows pass between the decoder and the links' slots.

base         the contract of an exchange, and the rows of a step that belong to each link
direct       on a CPU: the decoder's rows are the slot's
staged       on every other device: copies in pinned memory, and events
bypass       on CUDA: captured decode steps, whose stream rings the R-nodes and waits for them
stream_rows  the operations of such a stream, and links' regions that are mapped into the device
graph        CUDA streams and graphs of torch
driver       the functions of the CUDA driver that torch lacks
choice       choose_exchange: the exchange of an S-Part, and the check at start
"""

from __future__ import annotations

import torch

from fastdecode.spart.exchange.base import Exchange, LinkRows, RowExchange, SlotViews, link_rows
from fastdecode.spart.exchange.direct import Direct
from fastdecode.spart.exchange.staged import Staged

__all__ = ["Exchange", "LinkRows", "RowExchange", "SlotViews", "link_rows", "make_exchange"]


def make_exchange(slot: int, rows: list[LinkRows], device: torch.device) -> Exchange:
    """The exchange of one step whose S-Part runs on `device`."""
    return Direct(slot, rows) if device.type == "cpu" else Staged(slot, rows, device)
