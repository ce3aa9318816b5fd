"""EngineClient: what the API asks of an engine, whether it runs in this process or in another one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from fastdecode.engine.state.request import Outlet, SamplingParams
from fastdecode.engine.stats import EngineStats, StepInterval
from fastdecode.text.grammar import GrammarSpec


@dataclass(frozen=True, slots=True)
class Request:
    """The choices of one request, in OpenAI's order: choice i belongs to prompt i // n."""

    id: str  # "-" and the number of a choice make the choice's id in the engine
    prompts: list[list[int]]
    params: SamplingParams  # of every prompt's first choice, without its grammar
    n: int = 1  # choices of each prompt
    grammar: GrammarSpec | None = None  # that every choice must follow
    #: With one prompt: the tokens that each choice has from another S-node; None: the choice has ended there.
    generated: list[list[int] | None] = field(default_factory=list)
    stream_key: str | None = None  # by which another S-node may adopt their K and V; None: none may
    adopts: str | None = None  # the stream's key at the S-node that it comes from

    @property
    def n_choices(self) -> int:
        return len(self.prompts) * self.n


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of an engine."""

    ready: bool  # it accepts requests
    stalled_seconds: float  # time since the last completed step, 0 without work
    longest_sequence: int  # tokens of the longest sequence that can be served now; fewer than the context if pages are
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Report:
    """What the page shows of an engine."""

    status: EngineStatus  # with the R-nodes' counters up to date
    timeline: list[StepInterval]  # the last intervals of steps
    latencies: dict[str, dict[str, list[float]]]  # Metrics.latencies


class Cancel(Protocol):
    """Ends the choices of a request."""

    def __call__(self, choice: int, keep_seconds: float = 0.0) -> None:
        """End a choice, counted from 0, before its time. Its K and V stay for `keep_seconds`, so that another S-node
        can adopt them. Tokens that are on their way may still come. Does nothing to a choice that has ended."""
        ...


class EngineClient(Protocol):
    """An engine. All of its methods belong to the event loop in which it was made."""

    max_model_len: int  # tokens of a sequence, prompt and output together
    max_queued: int  # the most requests that wait for others to end; one with more choices can never be queued

    async def submit(self, request: Request, outlet: Outlet, first: int) -> Cancel:
        """Queue the choices of a request, all or none; if the caller is cancelled, none.

        Choice i has the number first + i at `outlet`, which may get tokens before this returns. Raises an EngineError,
        e.g. PromptTooLong, Overloaded, InvalidGrammar.
        """
        ...

    def choice_ended(self, reason: str, seconds: float) -> None:
        """Count a choice that has ended, `seconds` after submit, for the metrics.

        The reason is the client's view: "stop" also for a stop string, which the engine sees as a cancelled request.
        """
        ...

    async def status(self) -> EngineStatus:
        """The state now. Raises NotReady if the engine does not answer."""
        ...

    async def metrics(self) -> bytes:
        """All metrics in Prometheus's text format. Raises NotReady if the engine does not answer."""
        ...

    async def report(self, n: int) -> Report:
        """The state now, with the last `n` intervals of steps. Raises NotReady if the engine does not answer."""
        ...
