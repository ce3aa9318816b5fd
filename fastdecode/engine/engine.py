"""The engine: requests in, tokens out.

Life of a request: `submit` queues it; a mini-batch's driver lets the scheduler plan a step, hands it to the runner's
thread, books what came back, and puts the tokens into the requests' streams. One driver task a mini-batch; a driver
with nothing to do sleeps until something changes. All of it runs in the event loop, the S-Part in the runner's thread.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from fastdecode.engine.batching import logit_rules, step_batch
from fastdecode.engine.cluster import Cluster, RNodeLedger
from fastdecode.engine.prefixes import Handle, page_hashes
from fastdecode.engine.request import (
    GenerationFailed,
    InvalidParameter,
    InvalidPrompt,
    NotReady,
    Overloaded,
    PromptTooLong,
    SamplingParams,
    TokenEvent,
)
from fastdecode.engine.runner import Runner
from fastdecode.engine.scheduler import Outcome, Plan, Scheduler, SchedulerLimits
from fastdecode.engine.sequence import Sequence
from fastdecode.engine.stats import EngineObserver, EngineStats, NodeStats, NullObserver, Totals
from fastdecode.transports.base import CallRefused, LinkDown, TransportError

if TYPE_CHECKING:
    from fastdecode.spart import SPart
    from fastdecode.transports.base import Link

log = logging.getLogger(__name__)

_PROBE_SECONDS = 5.0  # an R-node that has not answered a STATS by then is taken for lost
_REFRESH_SECONDS = 2.0


class RequestStream:
    """The tokens of one request as they come. Iterate once; raises GenerationFailed where it could not go on."""

    def __init__(self, engine: Engine, seq: Sequence):
        self._engine = engine
        self._seq = seq
        self._done = False

    @property
    def request_id(self) -> str:
        return self._seq.request_id

    @property
    def n_prompt(self) -> int:
        return self._seq.n_prompt

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._done:
            raise StopAsyncIteration
        event = await self._seq.output.get()
        if isinstance(event, TokenEvent):
            self._done = event.finish_reason is not None
            return event
        self._done = True
        if event is None:  # cancelled
            raise StopAsyncIteration
        raise event

    def cancel(self) -> None:
        """End the request wherever it stands and free its pages; the iteration ends after what is already there.
        Idempotent; does nothing to a request that has ended."""
        self._engine._cancel(self._seq)


class Engine:
    """Iteration-level batching over one S-Part and its R-nodes. Belongs to the event loop in which it is started."""

    def __init__(
        self,
        spart: SPart,
        links: list[Link],
        *,
        max_model_len: int | None = None,
        mini_batches: int = 2,
        max_batch_size: int = 256,
        max_batch_tokens: int = 512,
        max_queued: int = 1024,
        watermark: float = 0.01,
        prefix_cache: bool = False,
        max_uncached_suffix: int | None = None,
        end_token_ids: Iterable[int] | None = None,
        observer: EngineObserver | None = None,
    ):
        """`max_batch_size` counts the sequences of a mini-batch, `max_batch_tokens` the rows of a step. `max_model_len`
        None: all positions the model has. `end_token_ids` None: the model's own. `watermark`: see Cluster.place.
        `prefix_cache`: prompts that begin as other sequences take over their cache; it is kept (prefixes.py), as
        long as R-nodes have no more than `max_uncached_suffix` tokens (None: any number) of a prompt's rest to attend.
        Raises ValueError where these do not fit the model or the links."""
        if not links:
            raise ValueError("the engine needs at least one R-node")
        for link in links:
            _check_link(link, mini_batches, max_batch_tokens)
        positions = spart.config.max_positions
        if max_model_len is not None and max_model_len > positions:
            raise ValueError(f"max_model_len {max_model_len} is more than the model's {positions} positions")
        self.max_model_len = max_model_len or positions
        self.max_queued = max(max_queued, 1)  # who is admitted at once has waited, too
        self.spart = spart
        self.cluster = Cluster(links, watermark, prefix_cache)
        limits = SchedulerLimits(mini_batches, max_batch_tokens, max_batch_size, max_uncached_suffix)
        self.scheduler = Scheduler(self.cluster, limits)
        self.observer = observer or NullObserver()
        self.totals = Totals()
        self.last_progress = time.monotonic()  # a step was completed, or work began after none
        self.end_tokens = frozenset(spart.config.eos_token_ids if end_token_ids is None else end_token_ids)
        self._live: set[Sequence] = set()
        self._arrivals = 0
        self._counters: WeakKeyDictionary[RNodeLedger, dict] = WeakKeyDictionary()  # each node's last STATS
        self._replacements: dict[int, Link] = {}
        self._runner: Runner | None = None
        self._draining = False
        self._broken = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._wake = [asyncio.Event() for _ in range(mini_batches)]
        self._plans: list[Plan | None] = [None] * mini_batches  # in flight
        self._tasks: set[asyncio.Task] = set()
        self._freeing: set[RNodeLedger] = set()  # a FREE is on its way

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._runner = Runner()
        for node in self.cluster.nodes:
            self._spawn(self._watch(node))
        for mini_batch in range(len(self._wake)):
            self._spawn(self._drive(mini_batch))

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait until those there are have ended; False if `timeout` seconds were not enough."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """End at once: requests still there fail. The links stay open (who opened them closes them). Idempotent."""
        self._draining = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._runner is not None:
            await asyncio.to_thread(self._runner.stop)
            self._runner = None
        for seq in list(self._live):
            self._fail(seq, "the server is shutting down")

    @property
    def ready(self) -> bool:
        """True if `submit` would take a request that fits."""
        return self._why_not_ready() is None

    @property
    def stalled_seconds(self) -> float:
        """How long there has been work and no step completed; 0 when idle. For the watchdog of /health."""
        return time.monotonic() - self.last_progress if self._live else 0.0

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, prompt_ids: list[int], params: SamplingParams, request_id: str | None = None) -> RequestStream:
        """Queue a request. Raises NotReady, Overloaded, PromptTooLong, InvalidPrompt, InvalidParameter."""
        if (why := self._why_not_ready()) is not None:
            raise NotReady(why)
        max_new = self._room_for(prompt_ids)
        self._check_bias(params)
        if len(self.scheduler.waiting) >= self.max_queued:
            self.totals.rejected += 1
            raise Overloaded(f"{len(self.scheduler.waiting)} requests are waiting already")
        if params.max_tokens is not None:
            max_new = min(max_new, params.max_tokens)
        seq = Sequence(
            request_id=request_id or secrets.token_hex(12),
            order=self._arrivals,
            tokens=list(prompt_ids),
            n_prompt=len(prompt_ids),
            max_new=max_new,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            end_tokens=params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self.end_tokens,
            hashes=page_hashes(prompt_ids) if self.cluster.keeps else [],
            rules=logit_rules(params, prompt_ids),
        )
        self._arrivals += 1
        self.totals.requests += 1
        if not self._live:
            self.last_progress = time.monotonic()
        self._live.add(seq)
        self._idle.clear()
        self.scheduler.add(seq)
        self._wake_all()
        return RequestStream(self, seq)

    def _why_not_ready(self) -> str | None:
        if self._broken:
            return "the engine broke; see the server's log"
        if self._draining:
            return "the server is shutting down"
        if self._runner is None:
            return "the server has not started yet"
        return None if self.cluster.alive else "no R-node is connected"

    def _room_for(self, prompt_ids: list[int]) -> int:
        """How many tokens may follow a prompt. The last is never cached, so the cache may be one shorter."""
        if not prompt_ids:
            raise InvalidPrompt("the prompt is empty")
        vocabulary = self.spart.config.vocab_size
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
            raise InvalidPrompt(f"the prompt holds a token id outside the model's vocabulary (0 to {vocabulary - 1})")
        n, capacity = len(prompt_ids), self.cluster.capacity
        if n + 1 > self.max_model_len:
            raise PromptTooLong(f"the prompt has {n} tokens; the context is {self.max_model_len}, output included")
        if n > capacity:
            raise PromptTooLong(f"the prompt has {n} tokens; the KV-cache holds at most {capacity} of one sequence")
        return min(self.max_model_len, capacity + 1) - n

    def _check_bias(self, params: SamplingParams) -> None:
        vocabulary = self.spart.config.vocab_size
        for token, _ in params.logit_bias:
            if not 0 <= token < vocabulary:
                raise InvalidParameter("logit_bias", f"token {token} is outside the vocabulary (0 to {vocabulary - 1})")

    def _cancel(self, seq: Sequence) -> None:
        if seq not in self._live:
            return
        self.scheduler.cancel(seq)
        seq.output.put_nowait(None)
        self._ended(seq, "cancelled")
        self._after_change()

    def _fail(self, seq: Sequence, reason: str) -> None:
        if seq in self._live:
            seq.output.put_nowait(GenerationFailed(reason))
            self._ended(seq, "error")

    def _ended(self, seq: Sequence, reason: str) -> None:
        self._live.discard(seq)
        if not self._live:
            self._idle.set()
        self.observer.finished(reason, time.monotonic() - seq.arrived, seq.n_prompt, seq.n_generated)

    # -- steps ----------------------------------------------------------------------------------------------------

    async def _drive(self, mini_batch: int) -> None:
        while True:
            self._wake[mini_batch].clear()
            plan = self.scheduler.schedule(mini_batch)
            self._after_change()
            if plan is None:
                await self._wake[mini_batch].wait()
                continue
            self._plans[mini_batch] = plan
            await self._run(plan)
            self._plans[mini_batch] = None
            self._replace_dead()
            self._after_change()
            self._wake_all()

    async def _run(self, plan: Plan) -> None:
        begun = time.monotonic()
        self._note_started(plan, begun)
        try:
            output = await self._runner.submit(self.spart.step(step_batch(plan)))
        except LinkDown as error:
            await self._recover(plan, error)
        except CallRefused as error:
            log.error("an R-node refused a step: %s", error)
            self._fail_step(plan, f"an R-node refused the step: {error}")
        except Exception:
            log.exception("a step failed in the S-Part")
            self._fail_step(plan, "the step failed in the S-Part")
        else:
            self.last_progress = time.monotonic()
            self.totals.steps += 1
            self.totals.s_seconds += output.s_seconds
            self.totals.r_wait_seconds += output.r_wait_seconds
            self.totals.kv_bytes += output.kv_bytes
            self.observer.step(plan.n_tokens, self.last_progress - begun)
            for outcome in self.scheduler.complete(plan, output.sampled):
                self._deliver(outcome, self.last_progress)

    def _note_started(self, plan: Plan, now: float) -> None:
        for row in plan.rows:
            if row.seq.started is None:
                row.seq.started = now
                self.totals.prompt_tokens += row.seq.n_prompt
                self.observer.started(now - row.seq.arrived)

    def _deliver(self, outcome: Outcome, now: float) -> None:
        seq, sampled, reason = outcome
        seq.output.put_nowait(TokenEvent(sampled.token, sampled.logprob, sampled.top, reason, seq.reused))
        self.totals.generated_tokens += 1
        if seq.last_token is None:
            self.observer.first_token(now - seq.arrived)
        else:
            self.observer.inter_token(now - seq.last_token)
        seq.last_token = now
        if reason is not None:
            self._ended(seq, reason)

    def _fail_step(self, plan: Plan, reason: str) -> None:
        for seq in self.scheduler.fail(plan):
            self._fail(seq, reason)

    def _after_change(self) -> None:
        """Pass on what the scheduler's last call has brought about."""
        for seq, reason in self.scheduler.take_failed():
            self._fail(seq, reason)
        for seq in self.scheduler.take_forks():
            self._spawn(self._fork(seq))
        for node in self.cluster.nodes:
            if node.released and node not in self._freeing:
                self._freeing.add(node)
                self._spawn(self._free(node))
        if self.scheduler.changed:
            self.scheduler.changed = False
            self._wake_all()

    def _wake_all(self) -> None:
        for event in self._wake:
            event.set()

    # -- R-nodes --------------------------------------------------------------------------------------------------

    async def _free(self, node: RNodeLedger) -> None:
        """Send what was released, as many as have gathered in one frame, until there is no more."""
        try:
            while handles := node.take_released():
                self._drop_staged(node, handles)
                if not node.alive:
                    continue  # gone with the node
                try:
                    await node.link.free([(handle.index, handle.tag) for handle in handles])
                except LinkDown as error:
                    self._lost(node, error)
                    continue
                except CallRefused as error:
                    log.warning("R-node %s knows nothing of a sequence to free: %s", node.url, error)
                node.freed(handles)
                self._wake_all()
        finally:
            self._freeing.discard(node)

    async def _fork(self, seq: Sequence) -> None:
        """Let a prompt take over what is kept of another sequence."""
        node, source, done = seq.node, seq.source.handle, False
        try:
            await node.link.fork((source.index, source.tag), (seq.index, seq.tag), seq.shared)
            done = True
        except LinkDown as error:
            self._lost(node, error)
        except CallRefused as error:
            log.warning("R-node %s could not let a prompt share what it keeps: %s", node.url, error)
        self.scheduler.forked(seq, done)
        self._after_change()
        self._wake_all()

    def _drop_staged(self, node: RNodeLedger, handles: list[Handle]) -> None:
        for handle in handles:
            self.spart.drop(node.position, handle.index, handle.tag)

    async def _watch(self, node: RNodeLedger) -> None:
        error = await node.link.closed()
        self._lost(node, error or TransportError("the link was closed"))

    def _lost(self, node: RNodeLedger, error: Exception) -> None:
        if not node.alive:
            return
        log.error("R-node %s was lost: %s", node.url, error)
        self.scheduler.lost(node)
        self._after_change()
        self._wake_all()

    async def _recover(self, plan: Plan, error: LinkDown) -> None:
        """A link went down under a step: find out which, then let the step's sequences be recomputed."""
        nodes = {row.seq.node for row in plan.rows}
        await asyncio.gather(*(self._probe(node) for node in nodes if node.alive))
        if all(node.alive for node in nodes):
            log.error("a step failed: %s; yet all its R-nodes answer", error)
            self._fail_step(plan, f"a link to an R-node failed: {error}")
        else:
            self.scheduler.recompute(plan)

    async def _probe(self, node: RNodeLedger) -> None:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await node.link.stats()
        except (LinkDown, TimeoutError) as error:
            self._lost(node, error)

    def replace_link(self, position: int, link: Link) -> None:
        """Use a fresh link to an R-node that was lost. Takes effect once no step in flight uses the old one.
        Raises ValueError if it does not fit."""
        _check_link(link, len(self._wake), self.scheduler.limits.max_batch_tokens)
        self._lost(self.cluster.nodes[position], TransportError("its link was replaced"))
        self._replacements[position] = link
        self._replace_dead()

    def _replace_dead(self) -> None:
        busy = {row.seq.node.position for plan in self._plans if plan for row in plan.rows if row.seq.in_flight}
        for position in [p for p in self._replacements if p not in busy]:
            link = self._replacements.pop(position)
            self._drop_staged(self.cluster.nodes[position], self.cluster.nodes[position].take_released())
            self.spart.links[position] = link
            self._spawn(self._watch(self.cluster.replace_link(position, link)))
            self._wake_all()

    # -- numbers --------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Ask the live R-nodes for their counters, for `stats`. What does not come in time keeps its last value."""
        await asyncio.gather(*(self._refresh(node) for node in self.cluster.alive))

    async def _refresh(self, node: RNodeLedger) -> None:
        try:
            async with asyncio.timeout(_REFRESH_SECONDS):
                self._counters[node] = await node.link.stats()
        except LinkDown as error:
            self._lost(node, error)
        except TimeoutError:
            log.warning("R-node %s has not answered a STATS for %.0f s", node.url, _REFRESH_SECONDS)

    @property
    def stats(self) -> EngineStats:
        nodes = self.cluster.alive
        self.totals.preemptions = self.scheduler.preemptions
        self.totals.prefix_queries = self.scheduler.prompt_tokens if self.cluster.keeps else 0
        self.totals.prefix_hits = self.scheduler.reused_tokens
        return EngineStats(
            running=self.scheduler.n_running,
            waiting=len(self.scheduler.waiting),
            kv_usage=sum(n.pages_used for n in nodes) / max(1, sum(n.n_pages for n in nodes)),
            nodes=[self._node_stats(node) for node in self.cluster.nodes],
            totals=self.totals,
        )

    def _node_stats(self, node: RNodeLedger) -> NodeStats:
        lease, counters = node.link.lease, self._counters.get(node, {})
        return NodeStats(
            url=node.url,
            node=lease.node,
            isa=lease.isa,
            threads=lease.threads,
            alive=node.alive,
            pages_total=node.n_pages,
            pages_used=node.pages_used,
            page_bytes=lease.page_bytes,
            sequences=len(node.sequences),
            load=node.load,
            calls=counters.get("calls", 0),
            attention_seconds=counters.get("busy_ns", 0) / 1e9,
            kv_bytes_read=counters.get("kv_bytes", 0),
        )

    # -- tasks ----------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        # A defect: better to say so to every client than to leave them waiting for a driver that is gone.
        log.critical("the engine broke", exc_info=task.exception())
        self._broken = True
        for seq in list(self._live):
            self._fail(seq, "the engine broke; see the server's log")


def _check_link(link: Link, mini_batches: int, max_batch_tokens: int) -> None:
    slots, rows = link.geometry.n_slots, link.geometry.max_rows
    if slots < mini_batches:
        raise ValueError(f"{link.url} has {slots} slots for {mini_batches} mini-batches")
    if rows < max_batch_tokens:
        raise ValueError(f"{link.url} takes {rows} rows a call, fewer than max_batch_tokens {max_batch_tokens}")
