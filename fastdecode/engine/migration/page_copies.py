"""Copies of KV pages between the S-Part's device and R-nodes. Callers have taken the pages in the accounts of both."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, cast

from fastdecode.region.contract import blocks_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.prefixes import Handle
    from fastdecode.spart.resident.link import ResidentLink


async def copy_to_r_node(
    device: RNodeLedger, handle: Handle, first: int, r_node: RNodeLedger, new: Handle, length: int
) -> None:
    """Let the sequence `new` of an R-node, which has the first `first` blocks, have `length` tokens of the sequence
    `handle` of the device. Raises CallRefused, LinkDown."""
    token = secrets.token_hex(32)
    await r_node.link.admit_migration(new, length, token)
    url = r_node.link.peer_url or r_node.url
    await device.link.migrate(handle, range(first, blocks_for(length)), length, url, token)


async def copy_to_device(
    r_node: RNodeLedger,
    handle: Handle,
    pages: range,
    device: RNodeLedger,
    new: Handle,
    length: int,
    pause: Callable[[], Awaitable[None]],
) -> None:
    """Let the sequence `new` of the device have `length` tokens, the last ones in copies of `pages` of the sequence
    `handle` of an R-node. `pause` is awaited between two pieces. Raises CallRefused, LinkDown, and what `pause`
    raises."""
    token, link = secrets.token_hex(32), cast("ResidentLink", device.link)
    await r_node.link.offer(handle, token)
    link.receive(new, length)
    url = r_node.link.peer_url or r_node.url
    await link.fetch(new.seq_index, pages, url, token, pause, blocks_for(length) - len(pages))
