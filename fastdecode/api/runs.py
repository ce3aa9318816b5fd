"""Runs the requests of all endpoints: submits their choices, and answers whole or as a stream."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiohttp import web

from fastdecode.api.answers import Answer, usage
from fastdecode.api.choice_stream import ChoiceStream
from fastdecode.api.continuation import LEAVING, Resume, is_resumable, mark, not_resumable, resumable
from fastdecode.api.delivery import TokenDelivery
from fastdecode.api.errors import ApiError, from_engine, from_exception, json_response
from fastdecode.api.generation import Choice, Echo, Piece, Run
from fastdecode.api.middleware import notes, request_id
from fastdecode.api.preparation import shutting_down_error
from fastdecode.api.protocol import Generation
from fastdecode.api.sse import Events, EventStream
from fastdecode.api.stored import StoredResponse, StoredResponses
from fastdecode.api.structured import grammar_error
from fastdecode.engine.state.request import EngineError, InvalidGrammar
from fastdecode.service.client import EngineClient, Request
from fastdecode.text.detokenizer import Detokenizer

#: Tokens of a continued stream that are fed to its choice in one turn of the event loop.
_REPLAYED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to be submitted."""

    generation: Generation
    prompts: Sequence[list[int]]
    detokenizers: Sequence[Callable[[], Detokenizer]]  # one for each prompt
    answer: Answer
    echoes: Sequence[Echo | None] = ()  # one for each prompt, or none at all
    stored: StoredResponse | None = None  # the response is generated in the background


@dataclass(slots=True)
class Runs:
    """The requests that are running."""

    engine: EngineClient
    keep_alive_seconds: float
    closing: bool = False  # new requests are refused
    stored: StoredResponses = field(default_factory=StoredResponses)
    _runs: set[Run] = field(default_factory=set)
    _delivery: TokenDelivery = field(default_factory=TokenDelivery)
    _texts: dict[int, bytes] = field(default_factory=dict)  # of tokens, in JSON; see Lane
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    async def close(self, grace: float) -> None:
        """Refuse new requests, wait `grace` seconds for running requests to end, then end them with an error."""
        self.closing = True
        for run in self._runs:
            if run.leave is not None:
                run.leave()
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            for run in self._runs:
                run.fail(shutting_down_error())

    async def answer(self, request: web.Request, prepared: PreparedRequest) -> web.StreamResponse:
        """Generate the choices of a request, and answer. Raises ApiError."""
        if self.closing:
            raise shutting_down_error()
        resume, answer = notes().resume, prepared.answer
        n_prompts = len(prepared.prompts)
        marked = notes().by_router and is_resumable(prepared.generation, n_prompts, answer) and not any(prepared.echoes)
        if marked:
            prepared = replace(prepared, generation=resumable(prepared.generation, answer, resume))
        elif resume is not None:
            raise not_resumable()
        run = self._run(prepared)
        run.stream_key = secrets.token_hex(32) if marked else None
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._running(prepared, run, resume))
            if prepared.stored is not None:
                generating = self._generate(stack.pop_all(), prepared.stored, prepared, run, resume)
                prepared.stored.start(asyncio.create_task(generating))
                return await self._show(request, prepared, run, resume)
            if not prepared.generation.stream:
                return await self._whole(request, prepared, run)
            events = self._event_stream(request, answer)
            await events.open()
            await self._write(events, prepared, run, resume)
            return events.response

    @asynccontextmanager
    async def _running(self, prepared: PreparedRequest, run: Run, resume: Resume | None) -> AsyncIterator[None]:
        """A run whose choices are submitted, if they have not ended elsewhere. Raises ApiError."""
        answer = prepared.answer
        self._runs.add(run)
        self._idle.clear()
        try:
            if resume is not None:
                await self._replay(run, resume, answer, prepared.stored)
            if run.running:
                await self._submit(prepared, run, resume)
            # Leaving this block cancels all choices that still run. aiohttp cancels the request's task if the client
            # goes away.
            with run:
                yield
        except (asyncio.CancelledError, ConnectionError):
            notes().handed_over = self.closing and run.leave is not None
            raise
        finally:
            counts = usage(run.choices, prepared.generation.candidates)
            tokens = {name: counts[name] for name in ("prompt_tokens", "completion_tokens")}
            notes().logged = {"id": answer.id, **tokens}
            if run.first_token_seconds is not None:
                notes().logged["first_token_seconds"] = round(run.first_token_seconds, 4)
            self._runs.discard(run)
            if not self._runs:
                self._idle.set()

    async def _generate(
        self,
        running: AsyncExitStack,
        stored: StoredResponse,
        prepared: PreparedRequest,
        run: Run,
        resume: Resume | None,
    ) -> None:
        """Write the events of a response in the background to its log. `running` is what ends with the run."""
        async with running:
            await self._write(stored.log, prepared, run, resume)

    async def _show(
        self, request: web.Request, prepared: PreparedRequest, run: Run, resume: Resume | None
    ) -> web.StreamResponse:
        """Answer the request for a response in the background: with what there is, or with a stream of its events."""
        stored = prepared.stored
        assert stored is not None, "the response is generated in the background"
        shown = len(stored.log)  # the client has had these events from another S-node
        self.stored.add(stored)
        if not prepared.generation.stream:
            return json_response(
                stored.answer.so_far, headers={"X-Request-Id": request_id(request) or stored.answer.id}
            )
        try:
            return await self.show_events(request, stored, shown, marks=run.stream_key is not None)
        except asyncio.CancelledError:
            if self.closing and run.stream_key is not None:  # the router continues the stream at another S-node
                await stored.cancel()
                self.stored.remove(stored)
            raise

    async def show_events(
        self, request: web.Request, stored: StoredResponse, position: int, *, marks: bool = False
    ) -> web.StreamResponse:
        """Answer with the events of a response in the background from a position in its log on, also those to come."""
        events = self._event_stream(request, stored.answer)
        await events.open()
        await stored.log.copy_to(events, position, self.keep_alive_seconds, comments=marks)
        await events.end()
        return events.response

    def _event_stream(self, request: web.Request, answer: Answer) -> EventStream:
        headers = {"X-Request-Id": request_id(request) or answer.id, **notes().headers}
        return EventStream(request, headers, named=answer.named_events)

    def _run(self, prepared: PreparedRequest) -> Run:
        """The choices of a request, before they are submitted. Raises ApiError (400)."""
        generation, answer = prepared.generation, prepared.answer
        n = generation.candidates
        if (choices := len(prepared.prompts) * n) > self.engine.max_queued:
            asked = f"{len(prepared.prompts)} prompt(s) times n={n} is {choices} choices"
            message = f"{asked}; this server queues at most {self.engine.max_queued} (--max-queued)"
            raise ApiError(400, message, param="n" if n > 1 else answer.prompt_param, code="too_many_choices")

        def choice(index: int) -> Choice:
            p = index // n
            echo = prepared.echoes[p] if prepared.echoes else None
            return Choice(index, len(prepared.prompts[p]), prepared.detokenizers[p](), generation.text, echo)

        return Run([choice(index) for index in range(choices)], self.engine.choice_ended, self._delivery)

    async def _replay(self, run: Run, resume: Resume, answer: Answer, stored: StoredResponse | None) -> None:
        """Bring a run to where its stream is to be continued. `stored` gets the events that the client has had. Raises
        ApiError (400)."""
        had: list[dict[str, Any]] = []
        longest = max((len(past.tokens) for past in resume.choices), default=0)
        if len(resume.choices) > len(run.choices) or longest >= self.engine.max_model_len:
            raise not_resumable()
        if resume.begun:
            had += answer.begin(usage(run.choices, len(run.choices)))
        try:
            for index, past in enumerate(resume.choices):
                for i, event in enumerate(past.events()):
                    if not run.runs(index):
                        raise not_resumable()
                    deltas = answer.deltas(index, run.feed(index, event))
                    if stored is not None and not isinstance(deltas, str):
                        had += deltas
                    if i % _REPLAYED_AT_ONCE == 0:
                        await asyncio.sleep(0)
        except (ValueError, LookupError, OverflowError):  # of a token that the tokenizer does not know
            raise not_resumable() from None
        if stored is not None:
            stored.log.send(had)

    async def _submit(self, prepared: PreparedRequest, run: Run, resume: Resume | None) -> None:
        """Queue a run's choices. Raises ApiError."""
        generation = prepared.generation
        params = replace(generation.sampling, client=notes().client)
        grammar = generation.grammar
        spec = None if grammar is None else grammar.spec
        prompts, n = list(prepared.prompts), generation.candidates
        request = Request(prepared.answer.id, prompts, params, n, spec, stream_key=run.stream_key)
        if resume is not None:
            past = [list(choice.tokens) for choice in resume.choices]
            past += [[] for _ in run.choices[len(past) :]]
            generated = [tokens if run.runs(index) else None for index, tokens in enumerate(past)]
            request = replace(request, generated=generated, adopts=resume.key)
        try:
            await run.submit(self.engine, request)
        except InvalidGrammar as error:
            assert grammar is not None, "without a grammar, none is invalid"
            raise grammar_error(grammar.param, str(error), unavailable=error.unavailable) from None
        except EngineError as error:
            raise from_engine(error, prepared.answer.prompt_param) from None

    async def _whole(self, request: web.Request, prepared: PreparedRequest, run: Run) -> web.Response:
        generation, answer = prepared.generation, prepared.answer
        whole: dict[int, Piece] = {choice.index: Piece() for choice in run.choices}
        while (ready := await run.pieces()) is not None:
            for index, pieces in ready.items():
                for piece in pieces:
                    whole[index].append(piece)
        counts = usage(run.choices, generation.candidates)
        chosen = _best(run.choices, generation.candidates, generation.n)
        body = answer.whole({i: whole[choice.index] for i, choice in enumerate(chosen)}, counts)
        if (top := generation.prompt_logprobs) is not None:
            for i, choice in enumerate(chosen):
                prompt = prepared.prompts[i // generation.n]
                body["choices"][i]["prompt_logprobs"] = answer.prompt_logprobs(choice.prompt_scores, prompt, top)
        return json_response(body, headers={"X-Request-Id": request_id(request) or answer.id})

    async def _write(self, events: Events, prepared: PreparedRequest, run: Run, resume: Resume | None) -> None:
        """Write a stream to its end."""
        generation, answer = prepared.generation, prepared.answer
        stream = ChoiceStream(events, answer, generation, run, self._texts)
        if run.stream_key is not None:
            head = {"id": answer.id, "created": answer.created, "seed": generation.sampling.seed}
            events.write(mark(head | {"key": run.stream_key}))
            run.leave = partial(events.write, mark(LEAVING))
            if self.closing:
                run.leave()
        try:
            if not (resume is not None and resume.begun):
                events.send(answer.begin(usage(run.choices, generation.n)))
            if run.stream_key is not None:
                events.write(mark([]))
            await stream.write_all(self.keep_alive_seconds)
        except ConnectionError:
            raise
        except Exception as error:
            await events.fail(answer.failure(from_exception(error, "a stream")))
            return
        events.send(answer.end(usage(run.choices, generation.n), wanted=generation.include_usage))
        await events.done()


def _best(choices: Sequence[Choice], candidates: int, n: int) -> list[Choice]:
    """The `n` likeliest of every prompt's choices, by the mean log-probability of their tokens; all in order if there
    are no others."""
    if candidates == n:
        return list(choices)
    best: list[Choice] = []
    for start in range(0, len(choices), candidates):
        best += sorted(choices[start : start + candidates], key=lambda choice: -choice.mean_logprob)[:n]
    return best
