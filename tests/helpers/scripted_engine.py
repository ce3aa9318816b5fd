"""An engine that follows a test's script, for events that a real engine does not produce on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from fastdecode.engine.request import EngineError, SamplingParams, TokenEvent
from fastdecode.engine.stats import EngineStats, NodeStats, NullObserver, StepPart

#: A stream's next action: yield a token, wait for the test, or fail.
Act = int | TokenEvent | asyncio.Event | Exception


class ScriptedStream:
    """The stream of one request. Its last token gets finish_reason "length" unless the script gives another."""

    def __init__(self, acts: Iterable[Act]):
        self._acts = list(acts)
        self.cancelled = asyncio.Event()

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> TokenEvent:
        await asyncio.sleep(0)  # the event loop runs between two tokens
        while self._acts:
            act = self._acts.pop(0)
            if isinstance(act, Exception):
                raise act
            if isinstance(act, asyncio.Event):
                await act.wait()
                continue
            event = TokenEvent(act) if isinstance(act, int) else act
            if not self._acts and event.finish_reason is None:
                event.finish_reason = "length"
            return event
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled.set()


class ScriptedEngine:
    """Each submit takes the next script. Once all scripts are used, submit raises `refusal`."""

    max_model_len = 4096
    longest_sequence = 4096
    max_queued = 1024
    end_tokens = frozenset({1})

    def __init__(self, *scripts: Iterable[Act], refusal: EngineError | None = None):
        self.scripts = list(scripts)
        self._refusal = refusal
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.streams: list[ScriptedStream] = []
        self.observer = NullObserver()
        self.ready = True
        self.stalled_seconds = 0.0
        self.alive = True

    def submit(self, prompt_ids: list[int], params: SamplingParams, request_id: str | None = None) -> ScriptedStream:
        if not self.scripts:
            raise self._refusal or AssertionError("one request more than there are scripts")
        self.prompts.append(prompt_ids)
        self.params.append(params)
        self.streams.append(ScriptedStream(self.scripts.pop(0)))
        return self.streams[-1]

    async def refresh(self) -> None:
        """Does nothing: the counters are always up to date."""

    def timeline(self, n: int) -> list[StepPart]:
        """Two parts of one step: the S-Part computes, waits, and computes again."""
        return [(0, 0, 1.0, 1.0, 1.001), (0, 1, 1.001, 1.003, 1.004)][-n:]

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
