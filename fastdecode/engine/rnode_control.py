"""RNodeControl: the engine's messages to R-nodes outside of steps (FREE, FORK, KEEP, RESIZE, STATS), and their loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from fastdecode.engine.migration.adopter import Adopter
from fastdecode.engine.migration.callbacks import Callbacks
from fastdecode.engine.migration.migrator import Migrator
from fastdecode.engine.migration.prefill_client import PrefillClient, PrefillNodes
from fastdecode.engine.migration.spiller import Spiller
from fastdecode.engine.state.ledger import RNodeLedger
from fastdecode.engine.stats import NodeStats
from fastdecode.transports.base import CallRefused, LinkDown, TransportError

if TYPE_CHECKING:
    from fastdecode.engine.scheduling.options import EngineOptions
    from fastdecode.engine.scheduling.scheduler import Scheduler
    from fastdecode.engine.state.prefixes import CachedSequence
    from fastdecode.engine.state.sequence import KVSource, Sequence
    from fastdecode.spart import SPart
    from fastdecode.transports.base import Link

log = logging.getLogger(__name__)

_REFRESH_SECONDS = 2.0
#: An R-node that had fewer pages than a lease was to grow by is asked again after this time at the earliest.
_REFUSED_SECONDS = 1.0


class RNodeControl:
    """Sends control messages to the R-nodes and keeps the scheduler's account of them true.

    Belongs to the engine's event loop. `spawn` starts a coroutine as one of the engine's tasks; `on_change` is called
    whenever the scheduler may have new work.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        spart: SPart,
        options: EngineOptions,
        spawn: Callable[[Coroutine[None, None, None]], None],
        on_change: Callable[[], None],
        prefill_nodes: PrefillNodes | None,
    ):
        """`prefill_nodes`: the S-nodes that compute long prompts; None: this one does."""
        #: Each R-node's answer to its last STATS, by the link to this one R-node.
        self.counters: WeakKeyDictionary[Link, dict[str, int]] = WeakKeyDictionary()
        self._scheduler, self._cluster, self._spart = scheduler, scheduler.cluster, spart
        self._spawn, self._on_change = spawn, on_change
        self._rebalance, self._patience = options.rebalance, options.patience
        scheduler.running.patient = options.patience > 0
        self._losses = 0  # how often the last R-node was lost
        self._replacements: dict[int, Link] = {}
        self._freeing: set[RNodeLedger] = set()  # R-nodes that a FREE is being sent to
        self._keeping: set[RNodeLedger] = set()  # R-nodes that a KEEP is being sent to
        callbacks = Callbacks(spawn, self.send_pending, on_change, self.mark_lost)
        self.migrator = Migrator(scheduler, callbacks)
        self.spiller = Spiller(scheduler, self.migrator, callbacks)
        scheduler.pauses.spill = self.spiller.spill
        self.prefill_client: PrefillClient | None = None
        if prefill_nodes is not None:
            self.prefill_client = PrefillClient(prefill_nodes, scheduler, callbacks)
            scheduler.wants_remote_prefill = self.prefill_client.wants
        self.adopter: Adopter | None = None
        if options.kv_digest is not None and spart.state_slots is None:  # R-nodes do not have states
            self.adopter = Adopter(scheduler, options.kv_digest, callbacks)

    def start(self) -> None:
        """Watch all R-nodes for the end of their links, and begin to rebalance them."""
        if self._rebalance:
            self._spawn(self.migrator.rebalance())
        for node in self._cluster.nodes:
            self._spawn(self._watch(node))

    # -- sequences ------------------------------------------------------------------------------------------------

    def keys(self, stream_key: str | None, salt: str, n: int) -> list[str | None]:
        """The keys of a stream's choices (Adopter.key); None if no S-node may adopt them."""
        if self.adopter is None or stream_key is None:
            return [None] * n
        return [self.adopter.key(stream_key, salt, choice) for choice in range(n)]

    async def find_kv(self, wanted: Iterable[tuple[str | None, int | None]]) -> list[KVSource | None]:
        """Where R-nodes have K and V for each of these keys and numbers of tokens; None: nowhere."""

        async def find(key: str | None, length: int | None) -> KVSource | None:
            if self.adopter is None or key is None or length is None:
                return None
            return await self.adopter.find(key, length)

        return await asyncio.gather(*(find(key, length) for key, length in wanted))

    def send_pending(self) -> None:
        """Start what the scheduler has asked for since the last call: FORKs, FREEs, KEEPs, RESIZEs, adoptions and
        remote prefills."""
        for seq in self._scheduler.take_forks():
            self._spawn(self._fork(seq))
        for seq in self._scheduler.take_awaiting_kv():
            if seq.adopts is not None and self.adopter is not None:
                self._spawn(self.adopter.adopt(seq, seq.adopts))
            elif self.prefill_client is not None:
                self._spawn(self.prefill_client.prefill(seq))
        for node in self._cluster.nodes:
            if node.released and node not in self._freeing:
                self._freeing.add(node)
                self._spawn(self._free(node))
            if node.keys and node not in self._keeping:
                self._keeping.add(node)
                self._spawn(self._keep(node))
            wanted = node.wanted_pages()
            if wanted > node.n_pages:
                node.resizing = True
                self._spawn(self._resize(node, wanted))
        self.spiller.keep_reserve()

    async def _free(self, node: RNodeLedger) -> None:
        """Free the released sequences, all that have accumulated in one frame, until none is left."""
        try:
            while sequences := node.take_released():
                self._drop_staged(node, sequences)
                if node.alive:
                    with self._failures(node, "a FREE"):
                        await node.link.free([sequence.handle for sequence in sequences])
                if node.alive:  # else its cache is gone anyway
                    node.acknowledge_free(sequences)
                    self._on_change()
        finally:
            self._freeing.discard(node)

    async def _keep(self, node: RNodeLedger) -> None:
        """Give sequences their keys, all that have accumulated in one frame, until none is left."""
        try:
            while (keys := node.take_keys()) and node.alive:
                with self._failures(node, "a KEEP"):
                    await node.link.keep(keys)
        finally:
            self._keeping.discard(node)

    async def _fork(self, seq: Sequence) -> None:
        """Let a placed sequence share the cached tokens of its source."""
        node, source, succeeded = seq.placed_on, seq.source, False
        assert source is not None, "a sequence without a source asks for no FORK"
        with self._failures(node, "a FORK"):
            await node.link.fork(source.cached.handle, seq.handle, seq.shared_tokens)
            succeeded = True
        self._scheduler.fork_done(seq, succeeded)
        self._on_change()

    async def _resize(self, node: RNodeLedger, wanted: int) -> None:
        """Ask for a lease of `wanted` pages. If the R-node has fewer, do not ask again for a while."""
        answer: Mapping[str, int] = {}
        with self._failures(node, "a RESIZE"):
            answer = await node.link.resize(wanted)
        if not node.alive:
            return
        node.resized(answer.get("pages_total", node.n_pages), answer.get("pages_max", node.n_pages))
        node.resizing = False
        node.refused = node.n_pages < wanted
        log.debug("R-node %s: the lease has %d of %d pages wanted", node.url, node.n_pages, wanted)
        self._on_change()
        if node.refused:
            await asyncio.sleep(_REFUSED_SECONDS)
            node.refused = False
            self._on_change()

    def _drop_staged(self, node: RNodeLedger, sequences: Iterable[CachedSequence]) -> None:
        """Drop the K and V that the S-Part has staged for unfinished prompts among `sequences`."""
        for sequence in sequences:
            self._spart.drop(node.position, *sequence.handle)

    @contextlib.contextmanager
    def _failures(self, node: RNodeLedger, request: str) -> Iterator[None]:
        """Record the loss of an R-node by a request, and log one that it refuses or does not answer in time."""
        try:
            yield
        except LinkDown as error:
            self.mark_lost(node, error)
        except CallRefused as error:
            log.warning("R-node %s refused %s: %s", node.url, request, error)
        except TimeoutError:
            log.warning("R-node %s has not answered %s in time", node.url, request)

    # -- loss and replacement -------------------------------------------------------------------------------------

    async def _watch(self, node: RNodeLedger) -> None:
        error = await node.link.closed()
        self.mark_lost(node, error or TransportError("the link was closed"))

    def mark_lost(self, node: RNodeLedger, error: Exception) -> None:
        """Requeue the sequences of a lost R-node. Does nothing if it was lost before."""
        if not node.alive:
            return
        log.error("R-node %s was lost: %s", node.url, error)
        self._requeue(node)

    def _requeue(self, node: RNodeLedger) -> None:
        self._scheduler.running.node_lost(node)
        if self._patience and self._cluster.lost:
            self._losses += 1
            self._spawn(self._lose_patience(node.url, self._losses))
        self._on_change()

    async def _lose_patience(self, url: str, loss: int) -> None:
        """Fail the sequences that wait for an R-node, unless an R-node connects in time. `url` names the lost R-node;
        its ledger would keep the dead link's region mapped. `loss` is the number of the loss: if the R-node that came
        is lost too, the later loss has a time of its own."""
        await asyncio.sleep(self._patience)
        if self._cluster.lost and loss == self._losses:
            self._scheduler.running.fail_unplaced(url)
            self._on_change()

    def set_replacement(self, position: int, link: Link) -> None:
        """Remember a new link for an R-node whose old link is lost, or is given up now."""
        self.mark_lost(self._cluster.nodes[position], TransportError("its link was replaced"))
        self._replacements[position] = link

    def install_replacements(self, busy: Iterable[int]) -> None:
        """Put new links to use, except at the positions `busy`, where a step in flight still uses the old link.

        `busy` is read only if there are new links: a step ends far more often than a link is replaced.
        """
        if not self._replacements:
            return
        in_use = set(busy)
        for position in [p for p in self._replacements if p not in in_use]:
            link, old = self._replacements.pop(position), self._cluster.nodes[position]
            self._drop_staged(old, old.take_released())
            self._spart.links[position] = link
            self._spawn(self._watch(self._cluster.replace_link(position, link)))
            self._on_change()

    # -- R-nodes that come and go ---------------------------------------------------------------------------------

    def add(self, link: Link) -> int:
        """Use one more R-node. Returns its position."""
        node = self._cluster.add_link(link)
        if node.position < len(self._spart.links):
            self._spart.links[node.position] = link
        else:
            self._spart.links.append(link)
        self._spawn(self._watch(node))
        self._on_change()
        return node.position

    async def drain(self, position: int) -> None:
        """Place no more sequences on an R-node, migrate its sequences, and wait until it has none or is lost."""
        node = self._cluster.nodes[position]
        node.drain()
        self._on_change()
        await self.migrator.empty(node)

    def end_drain(self, position: int) -> None:
        """Place sequences again on an R-node whose drain is called off."""
        self._cluster.nodes[position].draining = False
        self._on_change()

    async def retire(self, position: int) -> None:
        """Forget an R-node, whose link the caller then closes. Its sequences, if it has any, are recomputed."""
        node = self._cluster.nodes[position]
        if node.alive:
            self._requeue(node)
        while self._scheduler.running.with_kv_on(node):  # they are in steps that have not completed
            await self.migrator.change()
        self._drop_staged(node, node.take_released())
        self._replacements.pop(position, None)
        node.retired = True

    # -- counters -------------------------------------------------------------------------------------------------

    def stats(self, node: RNodeLedger) -> list[NodeStats]:
        """The counters of an R-node, or of each R-node of a team."""
        links = node.link.links
        if len(links) == 1:
            return [self._member_stats(node, links[0], "")]
        return [self._member_stats(node, link, f"{i}/{len(links)}") for i, link in enumerate(links, 1)]

    def _member_stats(self, node: RNodeLedger, link: Link, member: str) -> NodeStats:
        lease, counters = link.lease, self.counters.get(link, {})
        return NodeStats(
            url=link.url,
            node=lease.node,
            isa=lease.isa,
            threads=lease.threads,
            alive=node.alive,
            pages_total=node.n_pages,
            pages_max=node.obtainable,
            pages_used=node.pages_used,
            page_bytes=lease.page_bytes,
            region_bytes=link.region_bytes,
            sequences=node.n_sequences,
            load=node.load,
            calls=counters.get("calls", 0),
            attention_seconds=counters.get("busy_ns", 0) / 1e9,
            kv_bytes_read=counters.get("kv_bytes", 0),
            rows=counters.get("rows", 0),
            roofline=counters.get("roofline", 0),
            answer_seconds=node.answer_seconds,
            draining=node.draining,
            member=member,
        )

    async def refresh(self) -> None:
        """Ask the live R-nodes for their counters. An R-node that refuses or takes over 2 s keeps its last counters."""
        await asyncio.gather(*(self._refresh(node) for node in self._cluster.alive))

    async def _refresh(self, node: RNodeLedger) -> None:
        with self._failures(node, "a STATS"):
            async with asyncio.timeout(_REFRESH_SECONDS):
                asked = time.perf_counter()
                members = node.link.links
                answers = await asyncio.gather(*(link.stats() for link in members))
                node.answer_seconds = time.perf_counter() - asked
                self.counters.update(zip(members, answers, strict=True))
                if (roofline := sum(counters.get("roofline", 0) for counters in answers)) > 0:
                    node.link.bytes_per_second = float(roofline)
                node.record_obtainable(min(counters.get("pages_max", node.n_pages) for counters in answers))
