"""The scheduler in virtual time: its real code, R-nodes that only count pages, and steps that take computed times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from fastdecode.engine.cluster import Cluster
from fastdecode.engine.request import SamplingParams
from fastdecode.engine.scheduler import Scheduler
from fastdecode.engine.scheduling.plan import Plan, SchedulerLimits
from fastdecode.engine.sequence import Sequence
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.spart.batch import Sampled

_WORD, _END = 0, 1

#: Bound on an output without max_tokens.
_LONGEST = 4096


class Request(NamedTuple):
    """A request of a simulation. `max_tokens` is the bound on `n_output` that the scheduler knows; None: none."""

    arrival: float  # seconds
    n_prompt: int
    n_output: int
    max_tokens: int | None = None


@dataclass(slots=True)
class Run:
    """The course of a simulation. Times are in seconds of virtual time."""

    seconds: float = 0.0
    tokens: int = 0  # generated
    preemptions: int = 0
    step_seconds: list[float] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)  # tokens that the decoding rows of each step attended to
    batches: list[int] = field(default_factory=list)  # running sequences at each step
    gaps: list[float] = field(default_factory=list)  # between two tokens of a request
    first_tokens: list[float] = field(default_factory=list)  # from arrival to the first token

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class StepCost(NamedTuple):
    """The computed cost of a step. Steps in flight share the S-node; the R-Part of a step overlaps its S-Part."""

    s_seconds: float  # S-Part of a step, whatever its batch
    s_row_seconds: float  # and for each row of a prompt
    s_pair_seconds: float  # and for each key that such a row attends to
    r_token_seconds: float  # R-Part, for each cached token that a row attends to

    def s_part(self, plan: Plan) -> float:
        """Seconds of the S-Part of a step that has the S-node to itself."""
        return self.s_seconds + self.s_row_seconds * plan.prompts.rows + self.s_pair_seconds * plan.prompts.pairs

    def r_part(self, plan: Plan) -> float:
        """Seconds of the R-Part of a step."""
        return self.r_token_seconds * load_of(plan)


@dataclass(slots=True)
class _Flight:
    plan: Plan
    begun: float
    s_part: float  # seconds that it takes alone
    r_end: float
    left: float = 1.0  # part of the S-Part that is to come


def load_of(plan: Plan) -> int:
    """Cached tokens that the decoding rows of a step attend to."""
    return sum(chunk.seq.cached + 1 for chunk in plan.chunks if not chunk.seq.prefilling)


def simulate(
    requests: Iterable[Request],
    limits: SchedulerLimits,
    cost: StepCost,
    leases: Iterable[int] = (1_000_000,),
    **options: Any,
) -> Run:
    """Run `requests` to their end over R-nodes with `leases` pages. `options` go to Scheduler.

    Raises RuntimeError if there is work and nothing moves.
    """
    links = [
        SimpleNamespace(url=f"sim://{i}", lease=SimpleNamespace(n_pages=n, max_seqs=65536, page_bytes=PAGE_TOKENS))
        for i, n in enumerate(leases)
    ]
    cluster = Cluster(cast(Any, links))
    scheduler = Scheduler(cluster, limits, **options)
    todo = sorted(requests, key=lambda request: request.arrival)[::-1]
    outputs: dict[Sequence, int] = {}
    run, now, order = Run(), 0.0, 0
    flights: dict[int, _Flight] = {}
    while todo or scheduler.has_work:
        while todo and todo[-1].arrival <= now:
            request = todo.pop()
            prompt, bound = [_WORD] * request.n_prompt, request.max_tokens or _LONGEST
            seq = sequence(order, prompt, bound, [], request.max_tokens)
            seq.arrived = request.arrival
            outputs[seq] = request.n_output
            order += 1
            scheduler.add(seq)
        for mini_batch in range(limits.mini_batches):
            if mini_batch not in flights and (plan := scheduler.schedule(mini_batch)) is not None:
                flights[mini_batch] = _Flight(plan, now, cost.s_part(plan), now + cost.r_part(plan))
                run.loads.append(load_of(plan))
                run.batches.append(scheduler.n_running)
        freed = acknowledge(cluster)
        if not flights and not todo and not freed:
            raise RuntimeError("the simulated scheduler has work and plans no step")
        # The runner computes a layer of each step in turn, so all advance at the pace of one round.
        round_seconds = sum(flight.s_part for flight in flights.values() if flight.left)
        waits = [flight.left * round_seconds or flight.r_end - now for flight in flights.values()]
        if todo and not freed:
            waits.append(todo[-1].arrival - now)
        passed = max(0.0, min(waits, default=0.0))
        now += passed
        for mini_batch, flight in list(flights.items()):
            if flight.left:
                flight.left -= passed / round_seconds
                flight.left *= flight.left > 1e-9
            if not flight.left and flight.r_end <= now + 1e-12:
                del flights[mini_batch]
                run.step_seconds.append(now - flight.begun)
                _complete(scheduler, flight.plan, now - flight.begun, now, outputs, run)
        acknowledge(cluster)
    run.seconds, run.preemptions = now, scheduler.preemptions
    return run


def sequence(
    order: int, tokens: list[int], max_new: int, hashes: list[bytes], max_tokens: int | None = None
) -> Sequence:
    """A sequence as the engine would make it of a request."""
    return Sequence(
        request_id=str(order),
        order=order,
        tokens=tokens,
        n_prompt=len(tokens),
        max_new=max_new,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        end_tokens=frozenset({_END}),
        hashes=hashes,
    )


def _complete(
    scheduler: Scheduler, plan: Plan, seconds: float, now: float, outputs: dict[Sequence, int], run: Run
) -> None:
    sampled = []
    for chunk in plan.chunks:
        last = chunk.seq.n_generated + 1 >= outputs[chunk.seq]
        sampled.append(Sampled(_END if last else _WORD) if chunk.sample else None)
    for seq, _, _ in scheduler.complete(plan, sampled, seconds):
        run.tokens += 1
        if seq.last_token is None:
            run.first_tokens.append(now - seq.arrived)
        else:
            run.gaps.append(now - seq.last_token)
        seq.last_token = now


def acknowledge(cluster: Cluster) -> bool:
    """Acknowledge the release of all released sequences; True if there were any."""
    freed = False
    for node in cluster.nodes:
        if released := node.take_released():
            node.acknowledge_free(released)
            freed = True
    return freed
