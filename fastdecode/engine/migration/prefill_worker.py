"""Disaggregated prefill on the prefill S-node: computes prompts for other S-nodes and migrates their pages; see
prefill_client.py."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, Protocol

from fastdecode.engine.state.request import EngineError, GenerationFailed, SamplingParams, TokenEvent
from fastdecode.region.contract import PAGE_TOKENS, blocks_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastdecode.engine.migration.prefill_client import PrefillOrder
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.prefixes import Handle
    from fastdecode.engine.state.request import Output
    from fastdecode.engine.state.sequence import Sequence

#: Most PUSHes at the same time. An R-node takes 16 of a link (transports/server.py), and migrations need one.
_MOST_PUSHES = 8
#: Seconds after which a sequence is checked again if no step has completed.
_CHECK_SECONDS = 1.0


class PromptEngine(Protocol):
    """The Engine, as far as prompts for other S-nodes use it. Its module imports this folder."""

    def submit_choices(
        self, prompt_ids: list[int], params: SamplingParams, outputs: Mapping[str, Output]
    ) -> list[Sequence]: ...
    def cancel(self, seq: Sequence) -> None: ...
    async def change(self, seconds: float) -> None: ...


class PrefillWorker:
    """Computes the K and V of prompts and migrates them. Belongs to the engine's event loop."""

    def __init__(self, engine: PromptEngine):
        self.prefilled = 0  # prompts
        self._engine = engine
        self._pushing = asyncio.Semaphore(_MOST_PUSHES)

    async def prefill(self, order: PrefillOrder) -> None:
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
        seq.frozen = seq.prefill_locally = True
        first: tuple[RNodeLedger, Handle] | None = None  # where the sequence was when its first page was pushed
        sent = 0
        try:
            while not computed.done():
                whole = min(seq.cached, n_tokens) // PAGE_TOKENS
                if seq.node is not None and whole > sent:
                    first = self._unchanged(seq, first)
                    await self._push(first, range(sent, whole), 0, order)
                    sent = whole
                else:
                    await self._progress(computed)
            computed.result()
            await self._push(self._unchanged(seq, first), range(sent, blocks_for(n_tokens)), n_tokens, order)
            self.prefilled += 1
        finally:
            engine.cancel(seq)
            if computed.done() and not computed.cancelled():
                computed.exception()  # asyncio logs an error that no code has read

    async def _push(self, source: tuple[RNodeLedger, Handle], pages: range, length: int, order: PrefillOrder) -> None:
        node, handle = source
        async with self._pushing:
            await node.link.migrate(handle, pages, length, order.url, order.token)

    async def _progress(self, computed: asyncio.Future[None]) -> None:
        """Wait until steps have been computed."""
        change = asyncio.ensure_future(self._engine.change(_CHECK_SECONDS))
        try:
            await asyncio.wait({change, computed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await change

    @staticmethod
    def _unchanged(seq: Sequence, first: tuple[RNodeLedger, Handle] | None) -> tuple[RNodeLedger, Handle]:
        """The R-node and handle of a sequence. Raises GenerationFailed if they differ from `first`."""
        if seq.node is None or not seq.node.alive or (first is not None and first != (seq.node, seq.handle)):
            raise GenerationFailed("the R-node of the prefill S-node was lost, or had no more room")
        return seq.node, seq.handle
