"""An engine that follows a test's script, for events that a real engine does not produce on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fastdecode.engine.state.request import EngineError, Outlet, OutletChoice, SamplingParams, TokenEvent
from fastdecode.engine.stats import EngineStats, NodeStats
from fastdecode.service.client import Cancel, EngineStatus, Report, Request
from fastdecode.service.metrics import Metrics

#: A stream's next action: yield a token, wait for the test, or fail.
Act = int | TokenEvent | asyncio.Event | EngineError


class ScriptedChoice:
    """The tokens of one choice. Its last token gets finish_reason "length" unless the script gives another. An int that
    is neither the first nor the last token comes as an engine hands out tokens that have nothing else to say."""

    def __init__(self, acts: Iterable[Act], choice: OutletChoice):
        self._acts, self._choice = list(acts), choice
        self.cancelled = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        begun = False
        while self._acts:
            await asyncio.sleep(0)  # the event loop runs between two tokens
            act = self._acts.pop(0)
            if isinstance(act, asyncio.Event):
                await act.wait()
                continue
            if isinstance(act, int) and begun and self._acts:
                self._choice.outlet.tokens([self._choice.number], [act])
                continue
            begun = True
            event = TokenEvent(act) if isinstance(act, int) else act
            if isinstance(event, TokenEvent) and not self._acts and event.finish_reason is None:
                event.finish_reason = "length"
            self._choice(event)

    @property
    def ended(self) -> bool:
        """Whether the script has ended, or was cancelled."""
        return self._task.done()

    def cancel(self) -> None:
        self._task.cancel()
        self.cancelled.set()


class ScriptedEngine:
    """An EngineClient: each choice takes the next script. Once all scripts are used, submit raises `refusal`."""

    max_model_len = 4096
    longest_sequence = 4096
    max_queued = 1024

    def __init__(self, *scripts: Iterable[Act], refusal: EngineError | None = None):
        self.scripts = list(scripts)
        self._refusal = refusal
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.generated: list[list[int]] = []
        self.streams: list[ScriptedChoice] = []
        self._metrics = Metrics("scripted", lambda: self.stats)
        self.ready = True
        self.stalled_seconds = 0.0
        self.alive = True

    async def submit(self, request: Request, outlet: Outlet, first: int) -> Cancel:
        choices: dict[int, ScriptedChoice] = {}
        for i, past in enumerate(request.generated or [[]] * request.n_choices):
            if past is None:
                continue
            if not self.scripts:
                for choice in choices.values():
                    choice.cancel()
                raise self._refusal or AssertionError("one choice more than there are scripts")
            choices[i] = ScriptedChoice(self.scripts.pop(0), OutletChoice(outlet, first + i))
            self.prompts.append(request.prompts[i // request.n])
            self.generated.append(past)
            self.params.append(request.params.for_choice(i % request.n))
            self.streams.append(choices[i])

        def cancel(choice: int, keep_seconds: float = 0.0) -> None:
            if choice in choices:
                choices[choice].cancel()

        return cancel

    def choice_ended(self, reason: str, seconds: float) -> None:
        self._metrics.choice_ended(reason, seconds)

    async def metrics(self) -> bytes:
        return self._metrics.render()

    async def status(self) -> EngineStatus:
        return EngineStatus(self.ready, self.stalled_seconds, self.longest_sequence, self.stats)

    async def report(self, n: int) -> Report:
        """Its timeline has two parts of one step: the S-Part computes, waits, and computes again."""
        timeline = [(0, 0, 1.0, 1.0, 1.001), (0, 1, 1.001, 1.003, 1.004)]
        return Report(await self.status(), timeline[-n:], self._metrics.latencies())

    @property
    def stats(self) -> EngineStats:
        node = NodeStats(
            url="tcp://r1",
            node="r1",
            isa="avx2",
            threads=4,
            alive=self.alive,
            pages_total=100,
            pages_max=400,
            region_bytes=12345,
            pages_used=25,
            sequences=3,
            load=0,
            page_bytes=4096,
            attention_seconds=1.5,
            kv_bytes_read=7,
            calls=9,
            rows=18,
            roofline=10**10,
            answer_seconds=0.001,
        )
        return EngineStats(running=2, waiting=1, kv_usage=0.25, nodes=[node])
