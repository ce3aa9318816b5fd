"""LocalEngine: an engine in this process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fastdecode.engine.state.request import InvalidGrammar, Outlet, OutletChoice, Output
from fastdecode.service.client import Cancel, EngineStatus, Report, Request
from fastdecode.service.metrics import Metrics
from fastdecode.text.grammar import GrammarCompiler, GrammarError, GrammarSpec, GrammarsUnavailable, LLGrammar
from fastdecode.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastdecode.engine.engine import Engine
    from fastdecode.engine.state.sequence import KVSource, Sequence


class LocalEngine:
    """An EngineClient over an engine of this process. It compiles the grammars, whose masks the sampler needs here."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, model: str):
        """Makes the metrics of the model named `model` the engine's observer."""
        self._engine = engine
        self.max_model_len, self.max_queued = engine.max_model_len, engine.max_queued
        self._grammars = GrammarCompiler(tokenizer, engine.end_tokens)
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._metrics = Metrics(model, lambda: engine.stats)
        engine.observer = self._metrics

    async def submit(self, request: Request, outlet: Outlet, first: int) -> Cancel:
        params, spec = request.params, request.grammar
        if spec is not None:
            compiling = partial(self._compile, spec, [tokens for tokens in request.generated if tokens])
            try:
                grammar = await asyncio.get_running_loop().run_in_executor(self._compiling, compiling)
            except GrammarError as error:
                raise InvalidGrammar(str(error), isinstance(error, GrammarsUnavailable)) from None
            params = replace(params, grammar=grammar)
        choices: list[Sequence | None] = []

        def cancel(choice: int, keep_seconds: float = 0.0) -> None:
            if (seq := choices[choice]) is not None:
                self._engine.cancel(seq, keep_seconds)

        try:
            for prompt in request.prompts:
                numbers = range(len(choices), len(choices) + request.n)
                outputs: dict[str, Output] = {f"{request.id}-{i}": OutletChoice(outlet, first + i) for i in numbers}
                past = request.generated or [[]] * request.n
                sources: list[KVSource | None] = []
                if request.adopts is not None:
                    sources = await self._engine.find_kv(prompt, params, past, request.adopts)
                queued = iter(self._engine.submit_choices(prompt, params, outputs, past, request.stream_key, sources))
                choices += [None if tokens is None else next(queued) for tokens in past]
        except BaseException:
            for i in range(len(choices)):
                cancel(i)
            raise
        return cancel

    def _compile(self, spec: GrammarSpec, pasts: list[list[int]]) -> LLGrammar:
        """A grammar for texts that begin with these tokens. Raises GrammarError."""
        return self._grammars.compile(spec).continuing(pasts)

    def choice_ended(self, reason: str, seconds: float) -> None:
        self._metrics.choice_ended(reason, seconds)

    async def status(self) -> EngineStatus:
        engine = self._engine
        return EngineStatus(engine.ready, engine.stalled_seconds, engine.longest_sequence, engine.stats)

    async def metrics(self) -> bytes:
        await self._engine.r_nodes.refresh()
        return self._metrics.render()

    async def report(self, n: int) -> Report:
        await self._engine.r_nodes.refresh()
        return Report(await self.status(), list(self._engine.spart.timeline.last(n)), self._metrics.latencies())
