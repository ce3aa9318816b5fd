"""A load on the engine in virtual time: the server's own engine and scheduler, over predicted times of the steps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from fastdecode.bench.serving.client import LoadRun, TimedAnswer
from fastdecode.bench.serving.workload import LoadRequest, Prompts
from fastdecode.engine.engine import Engine
from fastdecode.engine.scheduling.options import EngineOptions
from fastdecode.engine.scheduling.plan import SchedulerLimits
from fastdecode.engine.state.request import EngineError, SamplingParams, TokenEvent
from fastdecode.plan.equations import System
from fastdecode.plan.virtual_system import WORD, StepRecord, VirtualLink, VirtualRunner, VirtualSPart
from fastdecode.spart.exchange.graph_table import size_class

#: The engine's gauges are sampled every 0.3 seconds, or 1000 times over the arrivals if that is less often.
_SAMPLE_SECONDS, _SAMPLES = 0.3, 1000
_PENALTY = 0.5


@dataclass(frozen=True, slots=True)
class Served:
    """The course of a load on the engine."""

    run: LoadRun  # as the client of `fastdecode-bench serve` records it
    preemptions: int
    recomputed_tokens: int  # of sequences that lost their cache

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.output_tokens for answer in self.run.answers) / self.run.seconds


@dataclass(frozen=True, slots=True)
class Simulated(Served):
    """The course of a simulation, in virtual time."""

    steps: list[StepRecord]

    @property
    def longest_step(self) -> float:
        """Seconds."""
        return max(step.seconds for step in self.steps)


def simulate(
    requests: Sequence[LoadRequest],
    system: System,
    limits: SchedulerLimits,
    memory: float,
    *,
    gpu_kv: float = 0.0,
    users: int | None = None,
    bounds: Sequence[int | None] | None = None,
    history: Iterable[int] = (),
    **options: Any,
) -> Simulated:
    """Serve `requests` over R-nodes with `memory` bytes each and `gpu_kv` bytes for resident KV. A system without
    R-nodes has resident KV alone. `users`: a request is sent when it arrives and fewer requests are unanswered; None:
    whenever it arrives. `bounds`: each request's max_tokens; default: none. `history`: lengths of outputs
    that the scheduler has seen before. `options`: of EngineOptions.

    Raises RuntimeError if there is work and nothing moves, ValueError for what the engine refuses.
    """
    return run(_simulate(requests, system, limits, memory, gpu_kv, users, bounds, history, options))


async def _simulate(
    requests: Sequence[LoadRequest],
    system: System,
    limits: SchedulerLimits,
    memory: float,
    gpu_kv: float,
    users: int | None,
    bounds: Sequence[int | None] | None,
    history: Iterable[int],
    options: dict[str, Any],
) -> Simulated:
    loop = asyncio.get_running_loop()
    n, rows = limits.mini_batches, limits.max_batch_tokens
    n_sequences = 2 * n * limits.max_batch_size
    sizes, more = (system.model, system.kv_dtype), (n_sequences, rows + limits.max_batch_size, limits.slots)
    links = [VirtualLink(f"{i}", *sizes, memory, *more) for i in range(system.r_nodes)]
    for link in links:
        link.bytes_per_second = system.kv_bytes_per_second
    if gpu_kv:
        links.insert(0, VirtualLink("gpu", *sizes, gpu_kv, *more, resident=True, gbps=system.link.gbps))
        links[0].bytes_per_second = system.gpu_bytes_per_second
        # As Bypass.prepare measures them.
        sizes_of_steps = {size_class(n) for n in range(1, limits.max_batch_size + 1)}
        options = {"s_part_seconds": {n: system.s_part.seconds(n) for n in sizes_of_steps}} | options
    spart = VirtualSPart(system, links, [r.output_tokens for r in requests for _ in range(r.choices)])
    runner = VirtualRunner(system.in_turns)
    options = {"max_queued": len(spart.outputs), "prefix_cache": any(request.blocks for request in requests)} | options
    parts: tuple[Any, Any] = spart, links
    chosen = EngineOptions(limits, rebalance=False, **options)
    engine = Engine(*parts, chosen, clock=loop.time, start_runner=lambda: cast(Any, runner))
    for length in history:
        engine.scheduler.admission.lengths.observe("", length, ended=True)
    await engine.start()
    samples: list[dict[str, float]] = []
    sampling = loop.create_task(_sample(engine, samples, max(_SAMPLE_SECONDS, requests[-1].arrival / _SAMPLES)))
    sender = RequestSender(engine, sum(request.choices for request in requests), loop.time, users)
    await sender.send_all(requests, Prompts(WORD, WORD, seed=0), bounds or [None] * len(requests))
    if sampling.done():
        await sampling  # it never ends but with an error
    sampling.cancel()
    scheduler = engine.scheduler
    run = LoadRun(sender.answers, loop.time(), samples)
    return Simulated(run, engine.totals.preemptions, scheduler.recomputed_tokens, runner.records)


class RequestSender:
    """Sends requests to an engine in this process and records when their tokens come. Belongs to the running event
    loop."""

    def __init__(self, engine: Engine, n_answers: int, clock: Callable[[], float], users: int | None = None):
        """`users`: most answers under way when a request is sent; None: any number."""
        self.answers: list[TimedAnswer] = []
        self._idle_users = asyncio.Semaphore(n_answers if users is None else users)
        self._all_ended = asyncio.Event()
        self._engine, self._to_end = engine, n_answers
        self._clock, self._begun = clock, 0.0

    async def send_all(self, requests: Sequence[LoadRequest], prompts: Prompts, bounds: Sequence[int | None]) -> None:
        """Send each request when it arrives, with its bound as max_tokens, and wait until all answers have ended."""
        self._begun = self._clock()
        for i, (request, bound) in enumerate(zip(requests, bounds, strict=True)):
            if (wait := request.arrival - self._time()) > 0:
                await asyncio.sleep(wait)
            await self._idle_users.acquire()
            self._send(request, prompts.make(i, request), bound)
        await self._all_ended.wait()

    def _time(self) -> float:
        """Seconds since the first request."""
        return self._clock() - self._begun

    def _send(self, request: LoadRequest, prompt: list[int], max_tokens: int | None) -> None:
        """Send a request. Each of its choices has an answer of its own; a choice's seed is the index of its answer.
        A request of several choices has a penalty, so that it costs as much as a request of its size can."""
        first = len(self.answers)
        answers = [TimedAnswer(request, self._time()) for _ in range(request.choices)]
        self.answers += answers
        outputs = {str(first + k): partial(self._take, answer) for k, answer in enumerate(answers)}
        try:
            penalty = _PENALTY if request.choices > 1 else 0.0
            params = SamplingParams(max_tokens=max_tokens, seed=first, presence_penalty=penalty)
            self._engine.submit_choices(prompt, params, outputs)
        except EngineError as error:
            for answer in answers:
                self._end(answer, error)

    def _take(self, answer: TimedAnswer, event: TokenEvent | EngineError) -> None:
        if isinstance(event, TokenEvent):
            answer.chunks.append(self._time())
            answer.output_tokens += 1
            if event.finish_reason is None:
                return
        self._end(answer, event if isinstance(event, EngineError) else None)

    def _end(self, answer: TimedAnswer, error: EngineError | None) -> None:
        answer.finished = self._time()
        if error is not None:
            answer.error = f"{type(error).__name__}: {error}"
        self._idle_users.release()
        self._to_end -= 1
        if not self._to_end:
            self._all_ended.set()


async def _sample(engine: Engine, samples: list[dict[str, float]], every: float) -> None:
    """Record the engine's gauges by the names that /metrics gives them."""
    while True:
        stats = engine.stats
        gauges = {"num_requests_running": float(stats.running), "num_requests_waiting": float(stats.waiting)}
        samples.append({"t": asyncio.get_running_loop().time(), "kv_cache_usage_perc": stats.kv_usage} | gauges)
        await asyncio.sleep(every)


_T = TypeVar("_T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0 seconds. Nothing may wait for threads, files or sockets."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits in virtual time, and no timer is set")
        self._loop.now += max(0.0, timeout)
        return []


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end in virtual time. Raises RuntimeError if nothing can move any more."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
