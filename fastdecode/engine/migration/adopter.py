"""Adoption: a sequence goes on with the K and V that its stream has on an R-node from another S-node.

A router that continues a stream knows its key. Each choice has a key of its own for R-nodes, made of the stream's key
and of all that its K and V depend on besides its tokens. So an S-node with another model or adapter finds nothing.

The last of the n tokens that the router knows was drawn from the row of the token before it, which had reached the
cache in all layers by then. So the K and V of the first n - 1 tokens are whole, whatever step was under way when the
S-node was lost; this S-node adopts those and computes the last token. But tokens of a prompt, and of a sequence that is
recomputed, may reach the cache in some layers only. So a sequence gets its key once its tokens are cached, and a choice
without a token is not adopted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING

from fastdecode.engine.state.sequence import KVSource
from fastdecode.transports.base import CallRefused, LinkDown

if TYPE_CHECKING:
    from fastdecode.engine.migration.callbacks import Callbacks
    from fastdecode.engine.scheduling.scheduler import Scheduler
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.sequence import Sequence

log = logging.getLogger(__name__)

#: Most ADOPTs at the same time. An R-node takes 16 of a link, PUSHes included (transports/server.py).
_MOST_ADOPTIONS = 8
#: Seconds that R-nodes have to answer FIND.
_FIND_SECONDS = 1.0


class Adopter:
    """Lets sequences adopt K and V. Belongs to the engine's event loop."""

    def __init__(self, scheduler: Scheduler, digest: str, engine: Callbacks):
        """`digest`: of what two S-nodes must have in common for one to use the other's pages."""
        self._scheduler, self._digest, self._engine = scheduler, digest, engine
        self._totals = scheduler.cluster.totals
        self._adopting = asyncio.Semaphore(_MOST_ADOPTIONS)

    def key(self, stream_key: str, salt: str, choice: int) -> str:
        """The key for R-nodes of a choice, 64 hexadecimal digits. `salt`: see Sequence."""
        text = f"{self._digest} {choice} {salt}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=bytes.fromhex(stream_key), digest_size=32).hexdigest()

    async def find(self, key: str, length: int) -> KVSource | None:
        """The R-node that has `length` tokens at a key; None: none has."""
        nodes = [node for node in self._scheduler.cluster.nodes if node.open]
        answers = await asyncio.gather(*(self._has(node, key, length) for node in nodes))
        node = next((node for node, has in zip(nodes, answers, strict=True) if has), None)
        self._totals.not_adopted += node is None
        return None if node is None else KVSource(node, key)

    async def _has(self, node: RNodeLedger, key: str, length: int) -> bool:
        try:
            async with asyncio.timeout(_FIND_SECONDS):
                return await node.link.find(key, length)
        except LinkDown as error:
            self._engine.lost(node, error)
        except TimeoutError:
            log.warning("R-node %s has not answered a FIND in time", node.url)
        return False

    async def adopt(self, seq: Sequence, source: KVSource) -> None:
        """Bring the K and V of a placed sequence, all tokens but the last, and let the sequence continue."""
        node, succeeded = seq.placed_on, False
        try:
            async with self._adopting:
                await node.link.adopt(seq.handle, len(seq.tokens) - 1, source.key)
            succeeded = node.alive
        except LinkDown as error:
            self._engine.lost(node, error)
        except CallRefused as error:
            log.warning("R-node %s: a stream is recomputed, its tokens may change: %s", node.url, error)
        self._totals.adopted += succeeded
        self._totals.not_adopted += not succeeded
        self._scheduler.kv_came(seq, succeeded)
        self._engine.changed()
