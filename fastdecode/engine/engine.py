"""The engine: requests in, tokens out.

Life of a request: `submit_choices` queues it. The driver of a mini-batch lets the scheduler plan a step, hands the step
to the runner's thread, records the result and puts the new tokens into the requests' streams. Each mini-batch has one
driver task, and so have the steps of prompts where these are apart (SchedulerLimits.prompts_apart); a driver with
nothing to do sleeps until something changes. All of this runs in the event loop; only the S-Part computes in the
runner's thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from itertools import compress
from typing import TYPE_CHECKING

from fastdecode.engine.checks import check_link
from fastdecode.engine.delivery import deliver
from fastdecode.engine.intake import Intake
from fastdecode.engine.migration.prefill_client import PrefillNodes
from fastdecode.engine.rnode_control import RNodeControl
from fastdecode.engine.runner import Runner, StepRunner
from fastdecode.engine.scheduling.cluster import Cluster
from fastdecode.engine.scheduling.options import EngineOptions
from fastdecode.engine.scheduling.plan import Outcome, Plan
from fastdecode.engine.scheduling.queue import StartRate
from fastdecode.engine.scheduling.scheduler import Scheduler
from fastdecode.engine.state.request import (
    GenerationFailed,
    NothingAllowed,
    NotReady,
    Output,
    Overloaded,
    SamplingParams,
)
from fastdecode.engine.state.sequence import KVSource, Sequence
from fastdecode.engine.stats import EngineObserver, EngineStats
from fastdecode.engine.step_batch import step_batch
from fastdecode.transports.base import CallRefused, LinkDown, TransportError

if TYPE_CHECKING:
    from fastdecode.spart import SPart
    from fastdecode.spart.step.batch import StepOutput
    from fastdecode.transports.base import DataPath, Link

log = logging.getLogger(__name__)


class Engine:
    """Iteration-level batching over one S-Part and its R-nodes. Belongs to the event loop in which it is started."""

    def __init__(
        self,
        spart: SPart,
        links: list[Link],
        options: EngineOptions,
        *,
        prefill_nodes: PrefillNodes | None = None,
        clock: Callable[[], float] = time.monotonic,
        start_runner: Callable[[], StepRunner] = Runner,
    ):
        """`prefill_nodes`: the S-nodes that compute long prompts; None: this one does. `clock` gives seconds, and
        `start_runner` starts the runner of the steps; plan/simulation.py replaces both.

        Raises ValueError if an option does not fit the model or a link."""
        if not links:
            raise ValueError("the engine needs at least one R-node")
        limits = options.limits
        for link in links:
            check_link(link, limits)
        if spart.state_slots is not None and prefill_nodes is not None:
            raise ValueError("a model whose layers keep states has no prefill S-nodes: R-nodes do not have its states")
        positions = spart.config.max_positions
        if options.max_model_len is not None and options.max_model_len > positions:
            raise ValueError(f"max_model_len {options.max_model_len} is more than the model's {positions} positions")
        self.max_model_len = options.max_model_len or positions
        self.max_queued = max(options.max_queued, 1)  # every request passes through the queue
        self.spart = spart
        self.cluster = Cluster(links, options, spart.config.reads, spart.state_slots)
        self.scheduler = Scheduler(self.cluster, options, mtp=spart.config.mtp > 0)
        self.observer = EngineObserver()
        self.totals = self.cluster.totals
        self._clock, self._start_runner = clock, start_runner
        self.last_progress = clock()  # when a step last completed, or work came after idleness
        own = spart.config.eos_token_ids
        self.end_tokens = frozenset(own if options.end_token_ids is None else options.end_token_ids)
        self.r_nodes = RNodeControl(self.scheduler, spart, options, self._spawn, self._on_change, prefill_nodes)
        self._intake = Intake(spart, self.cluster, self.r_nodes, self.max_model_len, self.end_tokens, clock)
        self._start_rate = StartRate()
        self._live: set[Sequence] = set()  # requests whose stream has not ended
        self._runner: StepRunner | None = None
        self._stopping = False
        self._broken = False
        self._wake = [asyncio.Event() for _ in range(limits.slots)]  # one for each driver
        self._plans: list[Plan | None] = [None] * limits.slots  # in flight
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the runner's thread and the drivers."""
        self._runner = self._start_runner()
        self.r_nodes.start()
        for slot in range(len(self._wake)):
            self._spawn(self._drive(slot))

    async def stop(self) -> None:
        """Stop at once: live requests fail. The links stay open, for their owner to close. Idempotent."""
        self._stopping = True
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
        """True if `submit_choices` would take a request that fits."""
        return self._why_not_ready() is None

    @property
    def longest_sequence(self) -> int:
        """Tokens, prompt and output together, of the longest sequence that the context and the R-nodes' pages hold."""
        return self._intake.longest_sequence

    @property
    def stalled_seconds(self) -> float:
        """Seconds since a step last completed while there is work; 0 when idle. For the watchdog of /health."""
        return self._clock() - self.last_progress if self._live else 0.0

    # -- requests -------------------------------------------------------------------------------------------------

    def submit_choices(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        outputs: Mapping[str, Output],
        generated: Iterable[Iterable[int] | None] = (),
        stream_key: str | None = None,
        sources: Iterable[KVSource | None] = (),
    ) -> list[Sequence]:
        """Queue the choices of a prompt, all or none. Returns the queued sequences.

        `outputs` maps the id of each choice to the function that takes its tokens. `params` are the parameters of the
        first choice; see SamplingParams.for_choice. `generated` has the tokens that each choice already has from
        another S-node; None: the choice has ended there and is not queued. Only later tokens go to the output.
        `stream_key`: the key by which another S-node may adopt their K and V; None: none may. `sources`: what each
        choice adopts, see `find_kv`.

        Raises NotReady, Overloaded, PromptTooLong, InvalidPrompt, InvalidParameter.
        """
        reason = self._why_not_ready()
        if reason is not None:
            raise NotReady(reason)
        queued: list[Sequence] = []
        for seq in self._intake.sequences(prompt_ids, params, outputs, generated, stream_key, sources):
            try:
                self._check_backlog(len(prompt_ids))
            except Overloaded:
                for other in queued:
                    self.cancel(other)
                raise
            self._queue(seq)
            queued.append(seq)
        return queued

    async def find_kv(
        self, prompt_ids: list[int], params: SamplingParams, generated: Iterable[list[int] | None], stream_key: str
    ) -> list[KVSource | None]:
        """Where R-nodes have the K and V of a stream's choices, which have generated these tokens at another S-node,
        for `submit_choices`; None: nowhere, or the choice has ended or has no token."""
        lengths = [len(prompt_ids) + len(tokens) - 1 if tokens else None for tokens in generated]
        keys = self._intake.keys(prompt_ids, params, stream_key, len(lengths))
        return await self.r_nodes.find_kv(zip(keys, lengths, strict=True))

    def _queue(self, seq: Sequence) -> None:
        self.totals.requests += 1
        if not self._live:
            self.last_progress = self._clock()
        self._live.add(seq)
        self.scheduler.add(seq)
        self._wake_drivers()

    def _why_not_ready(self) -> str | None:
        if self._broken:
            return "the engine broke; see the server's log"
        if self._stopping:
            return "the server is shutting down"
        if self._runner is None:
            return "the server has not started yet"
        return None if self.cluster.alive else "no R-node is connected"

    def _check_backlog(self, n_tokens: int) -> None:
        """Raise Overloaded if more than `max_queued` requests would wait for others to end."""
        n_waiting = len(self.scheduler.waiting)
        if n_waiting >= self.max_queued and self.scheduler.backlog(n_tokens) > self.max_queued:
            self.totals.rejected += 1
            seconds = self._start_rate.seconds_for(n_waiting, self._clock())
            raise Overloaded(f"{n_waiting} requests are waiting already; try again in {seconds} s", seconds)

    def cancel(self, seq: Sequence, keep_seconds: float = 0.0) -> None:
        """End a choice and free its pages, after `keep_seconds` in which it is in no new step, but another S-node can
        adopt its K and V. Its output gets nothing more. Does nothing to a choice that has ended."""
        if seq not in self._live:
            return
        if keep_seconds:
            seq.frozen = True
            asyncio.get_running_loop().call_later(keep_seconds, self.cancel, seq)
            return
        self.scheduler.cancel(seq)
        self._end_request(seq)
        self._apply_changes()

    def _fail(self, seq: Sequence, reason: str) -> None:
        if seq in self._live:
            if seq.constraints is not None and seq.constraints.allow_nothing:
                seq.output(NothingAllowed(": ".join(filter(None, (reason, seq.constraints.fault)))))
            else:
                seq.output(GenerationFailed(reason))
            self._end_request(seq)

    def _end_request(self, seq: Sequence) -> None:
        self._live.discard(seq)
        self.observer.finished(seq.n_prompt, seq.n_generated)

    # -- steps ----------------------------------------------------------------------------------------------------

    async def _drive(self, slot: int) -> None:
        """Run the steps of a slot, one after another. Does not return."""
        while True:
            await self.r_nodes.migrator.settle(slot)
            self._wake[slot].clear()
            plan = self.scheduler.schedule(slot)
            self._apply_changes()
            if plan is None:
                await self._wake[slot].wait()
                continue
            self._plans[slot] = plan
            await self._run_step(plan)
            self._plans[slot] = None
            self._install_replacements()
            self._on_change()

    async def _run_step(self, plan: Plan) -> None:
        """Run a planned step, and record its results or its failure."""
        assert self._runner is not None, "drivers run between start and stop"
        begun = self._clock()
        self._record_started(plan, begun)
        drafts = self.scheduler.drafts(plan)
        try:
            output = await self._runner.submit(self.spart.step(step_batch(plan, self.cluster.loads.n_layers, drafts)))
        except TransportError as error:
            self._handle_failure(plan, error)
        except Exception:
            log.exception("a step failed in the S-Part")
            self._fail_step(plan, "the step failed in the S-Part")
        else:
            self._record_step(plan, output, begun)

    def _record_step(self, plan: Plan, output: StepOutput, begun: float) -> None:
        """Record the results of a step that began at `begun`, and hand out its tokens."""
        self.last_progress = self._clock()
        self.totals.steps += 1
        self.totals.s_seconds += output.s_seconds
        self.totals.r_wait_seconds += output.r_wait_seconds
        self.totals.kv_bytes += output.kv_bytes
        self.cluster.observe(output.link_costs)
        self.observer.step(plan.n_tokens, self.last_progress - begun)
        for i, scores in output.scores.items():
            seq = plan.chunks[i].seq
            if seq.placed_on.link not in output.failures:
                seq.prompt_scores[seq.cached : seq.cached + len(scores)] = scores
        done, sampled = plan, output.sampled
        failed: list[tuple[Plan, TransportError]] = []
        if output.failures:  # the plan is split before `complete`, which takes ended sequences off their R-nodes
            links_of = [{node.link for node in chunk.seq.places} for chunk in plan.chunks]
            sound = [links.isdisjoint(output.failures) for links in links_of]
            done, sampled = _with_chunks(plan, sound), list(compress(sampled, sound))
            failed = [
                (_with_chunks(plan, [failed_link in links for links in links_of]), failure)
                for failed_link, failure in output.failures.items()
            ]
        outcomes = self.scheduler.complete(done, sampled, self.last_progress - begun, output.s_seconds)
        self._deliver(outcomes, self.last_progress)
        for failed_plan, failure in failed:
            self._handle_failure(failed_plan, failure)

    def _handle_failure(self, plan: Plan, error: TransportError) -> None:
        """Handle the failure of the only link that the chunks of `plan` use, or of the last link of a step."""
        if isinstance(error, LinkDown):
            self._lose_node(plan, error)
        else:
            log.error("an R-node refused a step: %s", error)
            link = error.link if isinstance(error, CallRefused) else None
            self._fail_step(plan, f"an R-node refused the step: {error}", link)

    def _record_started(self, plan: Plan, now: float) -> None:
        for chunk in plan.chunks:
            if chunk.seq.started is None:
                chunk.seq.started = now
                self._start_rate.started(now)
                self.totals.prompt_tokens += chunk.seq.n_prompt
                self.observer.started(now - chunk.seq.arrived)

    def _deliver(self, outcomes: list[Outcome], now: float) -> None:
        """Hand out the new tokens of a step."""
        self.totals.generated_tokens += len(outcomes)
        for seq in deliver(outcomes, now, self.observer):
            self._end_request(seq)

    def _lose_node(self, plan: Plan, error: LinkDown) -> None:
        """Requeue the sequences of a step whose link has ended. The R-node is lost, even if it still answers a
        STATS."""
        places = [node for chunk in plan.chunks for node in chunk.seq.places]
        lost = next((node for node in places if node.link is error.link), None)
        if lost is None:
            log.error("a step failed on a link that its transport does not name: %s", error)
            self._fail_step(plan, f"a link to an R-node failed: {error}")
            return
        self.r_nodes.mark_lost(lost, error)
        self.scheduler.recompute(plan)

    def _fail_step(self, plan: Plan, reason: str, link: DataPath | None = None) -> None:
        """Fail the sequences of a step on `link`, and recompute the others. None: fail all of them."""
        for seq in self.scheduler.fail(plan, link):
            self._fail(seq, reason)

    def _apply_changes(self) -> None:
        """Act on the decisions of the scheduler's last call: failed requests, FORKs, FREEs, work for other drivers."""
        for seq, reason in self.scheduler.running.take_failed():
            self._fail(seq, reason)
        self.r_nodes.send_pending()
        self.r_nodes.migrator.notice()
        if self.scheduler.take_changed():
            self._wake_drivers()

    def _on_change(self) -> None:
        self._apply_changes()
        self._wake_drivers()

    def _wake_drivers(self) -> None:
        for event in self._wake:
            event.set()

    # -- R-nodes --------------------------------------------------------------------------------------------------

    def replace_link(self, position: int, link: Link) -> None:
        """Use a new link to the R-node at `position`, whose link was lost. It takes effect once no step in flight uses
        the old link. Raises ValueError if the new link does not fit."""
        check_link(link, self.scheduler.limits)
        self.r_nodes.set_replacement(position, link)
        self._install_replacements()

    def add_link(self, link: Link) -> int:
        """Use one more R-node. Returns its position. Raises ValueError if the link does not fit."""
        check_link(link, self.scheduler.limits)
        return self.r_nodes.add(link)

    def _install_replacements(self) -> None:
        chunks = (chunk for plan in self._plans if plan for chunk in plan.chunks)
        in_flight = (chunk.seq for chunk in chunks if chunk.seq.in_flight)
        self.r_nodes.install_replacements(node.position for seq in in_flight for node in seq.places)

    @property
    def stats(self) -> EngineStats:
        """The engine's counters now; the R-nodes' counters are as of the last RNodeControl.refresh."""
        nodes = self.cluster.alive
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_usage=sum(n.pages_used for n in nodes) / max(1, sum(n.obtainable for n in nodes)),
            nodes=[stats for node in self.cluster.nodes if not node.retired for stats in self.r_nodes.stats(node)],
            cut_sequences=len(self.r_nodes.spiller.cut_sequences),
            exchange=str(self.spart.exchange),
            totals=self.totals,
            expert_load=self.spart.expert_load,
        )

    async def change(self, seconds: float) -> None:
        """Wait for the next change of the scheduler's state, at most `seconds`."""
        await self.r_nodes.migrator.change(seconds)

    # -- tasks ----------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        # A bug in the engine. Tell every client, because without a driver they would wait for ever.
        log.critical("the engine broke", exc_info=task.exception())
        self._broken = True
        for seq in list(self._live):
            self._fail(seq, "the engine broke; see the server's log")


def _with_chunks(plan: Plan, selected: list[bool]) -> Plan:
    """A step's plan with only the chunks whose entry in `selected` is True."""
    return dataclasses.replace(plan, chunks=list(compress(plan.chunks, selected)))
