"""Giver: computes prompts for S-nodes that decode, and lets their R-nodes have the pages (prefill_client.py)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Protocol

from fastdecode.engine.state.pages import blocks_for
from fastdecode.engine.state.request import EngineError, GenerationFailed, SamplingParams, TokenEvent
from fastdecode.region.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastdecode.engine.migration.prefill_client import Order
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.prefixes import Handle
    from fastdecode.engine.state.request import Output
    from fastdecode.engine.state.sequence import Sequence

#: PUSHes at the same time. An R-node takes 16 of a link (transports/server.py), and moves need one.
_TOGETHER = 8
#: How long a sequence's progress is waited for before it is looked at again.
_LOOK_SECONDS = 1.0


class PromptEngine(Protocol):
    """The Engine, as far as prompts for other S-nodes use it. Its module imports this folder."""

    def submit_choices(
        self, prompt_ids: list[int], params: SamplingParams, outputs: Mapping[str, Output]
    ) -> list[Sequence]: ...
    def cancel(self, seq: Sequence) -> None: ...
    async def change(self, seconds: float) -> None: ...


class Giver:
    """Computes the K and V of prompts and gives them away. Belongs to the engine's event loop."""

    def __init__(self, engine: PromptEngine):
        self.given = 0  # prompts
        self._engine = engine
        self._pushing = asyncio.Semaphore(_TOGETHER)

    async def give(self, order: Order) -> None:
        """Compute a prompt and push its pages. A caller that is cancelled withdraws the order.

        Whole pages are pushed while the rest of the prompt is computed. The sequence stays in this S-node's prefix
        cache. Raises EngineError, TransportError.
        """
        engine, n_tokens = self._engine, len(order.tokens)
        computed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def output(event: TokenEvent | EngineError) -> None:
            if computed.done():
                return
            if isinstance(event, EngineError):
                computed.set_exception(event)
            else:
                computed.set_result(None)

        # The sampled token goes nowhere, and a second one, which would end the sequence, is never computed.
        params = SamplingParams(
            max_tokens=2,
            temperature=0.0,
            ignore_eos=True,
            adapter=order.adapter,
            cache_salt=order.cache_salt,
            client=order.client,
            priority=order.priority,
        )
        [seq] = engine.submit_choices(order.tokens, params, {f"prefill-{secrets.token_hex(8)}": output})
        seq.held = seq.prefill_here = True
        place: tuple[RNodeLedger, Handle] | None = None
        sent = 0
        try:
            while not computed.done():
                if seq.node is not None and (whole := min(seq.cached, n_tokens) // PAGE_TOKENS) > sent:
                    place = self._same_place(seq, place)
                    await self._push(place, range(sent, whole), 0, order)
                    sent = whole
                else:
                    await self._progress(computed)
            computed.result()
            await self._push(self._same_place(seq, place), range(sent, blocks_for(n_tokens)), n_tokens, order)
            self.given += 1
        finally:
            engine.cancel(seq)
            if computed.done() and not computed.cancelled():
                computed.exception()  # it has been seen to

    async def _push(self, place: tuple[RNodeLedger, Handle], pages: range, length: int, order: Order) -> None:
        node, handle = place
        async with self._pushing:
            await node.link.migrate(handle, pages, length, order.url, order.token)

    async def _progress(self, computed: asyncio.Future[None]) -> None:
        """Wait until steps have been computed."""
        change = asyncio.ensure_future(self._engine.change(_LOOK_SECONDS))
        try:
            await asyncio.wait({change, computed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await change

    @staticmethod
    def _same_place(seq: Sequence, place: tuple[RNodeLedger, Handle] | None) -> tuple[RNodeLedger, Handle]:
        """Where the sequence is cached. Raises GenerationFailed if that has changed since its first page was pushed."""
        if seq.node is None or not seq.node.alive or (place is not None and place != (seq.node, seq.handle)):
            raise GenerationFailed("the R-node of the prefill S-node was lost, or had no more room")
        return seq.node, seq.handle
