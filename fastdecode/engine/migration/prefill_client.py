"""Disaggregated prefill (DistServe, arXiv 2401.09670) on the S-node that decodes: another S-node computes the prompt.

A sequence is admitted, gets its pages, and then waits as it does for a FORK. RECEIVE lets its R-node accept the pages
from the R-node that presents a secret drawn for this prompt. The prefill S-node gets the prompt and the secret,
computes all of the prompt but its last token, and lets its own R-node PUSH the pages (prefill_worker.py), or copy them
if both S-nodes use one R-node. Then this S-node computes the last token, as after a shared prefix. So the prefill
S-node needs no sampling parameters, and no generated token passes through it.

The secret admits one migration into one empty sequence, and only the S-node that leases pages can PUSH them. So no
S-node can read pages of another, or write where no RECEIVE waits.

If anything fails, the sequence is queued again, and this S-node computes its prompt.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fastdecode.region.contract import blocks_for
from fastdecode.transports.base import CallRefused, LinkDown, TransportError

if TYPE_CHECKING:
    from fastdecode.engine.migration.callbacks import Callbacks
    from fastdecode.engine.scheduling.placement import Placement
    from fastdecode.engine.scheduling.scheduler import Scheduler
    from fastdecode.engine.state.sequence import Sequence

log = logging.getLogger(__name__)

#: Shorter prompts are computed here: they delay a step by less than a migration takes.
LEAST_TOKENS = 256
#: Seconds between two checks that the client of a waiting sequence is still there.
_CHECK_SECONDS = 0.25


class PrefillOrder(NamedTuple):
    """A prompt for a prefill S-node, and where its pages go."""

    tokens: list[int]
    adapter: str | None  # the name of its LoRA adapter
    cache_salt: str
    client: str
    priority: int
    url: str  # the R-node that waits for the pages
    token: str  # the secret of the RECEIVE, 64 hexadecimal digits


class PrefillNodes(Protocol):
    """The prefill S-nodes of an S-node that decodes."""

    def ready(self) -> bool:
        """True if one of them may take an order."""
        ...

    async def prefill(self, order: PrefillOrder) -> None:
        """Let one of them compute a prompt. Returns once the R-node at `order.url` has all of its pages; a caller that
        is cancelled withdraws the order. Raises TransportError."""
        ...


class PrefillClient:
    """Lets prefill S-nodes compute long prompts. Belongs to the engine's event loop."""

    def __init__(self, nodes: PrefillNodes, scheduler: Scheduler, engine: Callbacks):
        self._nodes, self._scheduler, self._engine = nodes, scheduler, engine

    def wants(self, seq: Sequence, placement: Placement) -> bool:
        """True if a prefill S-node is to compute the prompt of a sequence that starts at `placement`."""
        n_blocks, node = blocks_for(len(seq.tokens)), placement.node
        return (
            len(seq.tokens) > LEAST_TOKENS
            and placement.source is None
            and not (seq.prefill_locally or seq.long or seq.params.prompt_logprobs is not None)
            and len(node.link.links) == 1
            and all(n_blocks <= group.most for group in node.groups.groups)  # all of its pages are needed at once
            and self._nodes.ready()
        )

    async def prefill(self, seq: Sequence) -> None:
        """Let a prefill S-node compute the prompt of a sequence that was admitted, and let the sequence continue."""
        node, n_tokens, succeeded = seq.placed_on, len(seq.tokens) - 1, False
        order = PrefillOrder(
            tokens=seq.tokens[:n_tokens],
            adapter=seq.params.adapter,
            cache_salt=seq.params.cache_salt,
            client=seq.params.client,
            priority=seq.params.priority,
            url=node.link.peer_url or node.url,
            token=secrets.token_hex(32),
        )
        try:
            await node.link.admit_migration(seq.handle, n_tokens, order.token)
            succeeded = await self._completed(seq, order) and node.alive
        except LinkDown as error:
            self._engine.lost(node, error)
        except CallRefused as error:
            log.warning("R-node %s refused to take a prompt from another S-node: %s", node.url, error)
        self._scheduler.cluster.totals.remote_prefills += succeeded
        if not succeeded:
            seq.prefill_locally = True
        self._scheduler.kv_came(seq, succeeded)
        self._engine.changed()

    async def _completed(self, seq: Sequence, order: PrefillOrder) -> bool:
        """Wait for the pages of a sequence. False: they will not come, or the sequence needs them no more."""
        work = asyncio.ensure_future(self._nodes.prefill(order))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=_CHECK_SECONDS)
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
