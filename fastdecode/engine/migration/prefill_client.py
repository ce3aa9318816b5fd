"""Prompts whose K and V another S-node computes (DistServe, arXiv 2401.09670): the end of the S-node that decodes.

A sequence is admitted, gets its pages, and then waits as it does for a FORK. Its R-node is told by RECEIVE to hold the
tokens for whoever presents a token that was drawn for this purpose. The prefill S-node gets the prompt and that token,
computes all of the prompt but its last token, and lets its own R-node push the pages (prefill_worker.py), or copy them
if both S-nodes use one R-node. Then the sequence computes the last token here, as after a shared prefix. So the prefill
S-node needs no sampling parameters, and no token passes through it.

The token admits one delivery into one empty sequence, and pages are only pushed by the S-node that leases them. So no
S-node can take pages that were not given to it, nor write where it was not asked to.

Whatever fails, the sequence is queued again, and its prompt is computed here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fastdecode.engine.state.pages import blocks_for
from fastdecode.transports.base import CallRefused, LinkDown, TransportError

if TYPE_CHECKING:
    from fastdecode.engine.scheduling.placement import Placement
    from fastdecode.engine.scheduling.scheduler import Scheduler
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.sequence import Sequence

log = logging.getLogger(__name__)

#: Prompts with fewer tokens are computed here: they hold up a step less than their way to another S-node takes.
LEAST_TOKENS = 256
#: How often a sequence that waits is looked at, whether its client is still there.
_LOOK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Order:
    """A prompt for a prefill S-node, and where its pages go."""

    tokens: list[int]
    adapter: str | None  # the name of its LoRA adapter
    cache_salt: str
    client: str
    priority: int
    url: str  # of the R-node that waits for the pages
    token: str  # of the RECEIVE, 64 hexadecimal digits
    at: str | None = None  # the URL of the S-node that has the K and V; None: any prefill S-node


class PrefillNodes(Protocol):
    """The prefill S-nodes of an S-node that decodes."""

    def ready(self, at: str | None) -> bool:
        """True if one of them, or the S-node at the URL `at`, may take an order."""
        ...

    async def prefill(self, order: Order) -> None:
        """Let one of them compute a prompt. Returns once the R-node at `order.url` has all of its pages; a caller that
        is cancelled withdraws the order. Raises TransportError."""
        ...


class Taker:
    """Gets the K and V of long prompts from prefill S-nodes. Belongs to the engine's event loop."""

    def __init__(
        self,
        nodes: PrefillNodes,
        scheduler: Scheduler,
        on_change: Callable[[], None],
        lost: Callable[[RNodeLedger, Exception], None],
    ):
        """`on_change` is called when the scheduler may have new work, `lost` for an R-node whose link is down."""
        self.taken = 0  # prompts
        self._nodes, self._scheduler, self._on_change, self._lost = nodes, scheduler, on_change, lost

    def wants(self, seq: Sequence, placement: Placement) -> bool:
        """True if a prefill S-node is to compute the prompt of a sequence that starts at `placement`."""
        n_blocks, node = blocks_for(len(seq.tokens)), placement.node
        return (
            len(seq.tokens) > LEAST_TOKENS
            and placement.source is None
            and not (seq.prefill_here or seq.long or seq.params.prompt_logprobs is not None)
            and len(node.link.members) == 1
            and all(n_blocks <= group.most for group in node.groups.groups)  # pages beyond windows are not given away
            and self._nodes.ready(seq.take_from)
        )

    async def take(self, seq: Sequence) -> None:
        """Get the pages of a sequence that was admitted, and let it go on."""
        node, n_tokens, taken = seq.placed_on, len(seq.tokens) - 1, False
        params, token = seq.params, secrets.token_hex(32)
        url = node.link.peer_url or node.url
        order = Order(
            seq.tokens[:n_tokens],
            params.adapter,
            params.cache_salt,
            params.client,
            params.priority,
            url,
            token,
            seq.take_from,
        )
        try:
            await node.link.admit_migration(seq.handle, n_tokens, token)
            taken = await self._ordered(seq, order) and node.alive
        except LinkDown as error:
            self._lost(node, error)
        except CallRefused as error:
            log.warning("R-node %s refused to take a prompt from another S-node: %s", node.url, error)
        self.taken += taken
        self._scheduler.taken(seq, taken)
        self._on_change()

    async def _ordered(self, seq: Sequence, order: Order) -> bool:
        """Wait for the pages of a sequence. False: they will not come, or nobody wants them any more."""
        work = asyncio.ensure_future(self._nodes.prefill(order))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_LOOK_SECONDS)
                if seq.cancelled or not seq.placed_on.alive:
                    return False
            work.result()
            return True
        except TransportError as error:
            log.warning("a prompt is computed here: %s", error)
            return False
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
