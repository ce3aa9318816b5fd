"""Runs the requests of all endpoints: submits their choices, and answers whole or as a stream."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from fastdecode.api.answers import Answer, usage
from fastdecode.api.choices import Choice, Echo, Piece, Run
from fastdecode.api.continuation import LEAVING, Resume, is_resumable, mark, not_resumable, resumable, token_mark
from fastdecode.api.delivery import FastPath, TokenDelivery
from fastdecode.api.errors import ApiError, from_engine, from_exception, json_response
from fastdecode.api.last_event import LastEvent
from fastdecode.api.middleware import log_error, notes, request_id
from fastdecode.api.preparation import shutting_down_error
from fastdecode.api.protocol import Generation
from fastdecode.api.sse import Events, EventStream, event
from fastdecode.api.stored import EventLog, StoredStream, StoredStreams
from fastdecode.api.structured import grammar_error
from fastdecode.engine.state.request import EngineError, InvalidGrammar
from fastdecode.service.client import EngineClient, Request
from fastdecode.text.detokenizer import ByteDetokenizer, Detokenizer

#: Tokens of a continued stream that are fed to its choice in one turn of the event loop.
_REPLAYED_AT_ONCE = 1000
#: An answer with the log-probabilities of more tokens is encoded in a thread.
_INLINE_SCORED = 256


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to be submitted."""

    generation: Generation
    prompts: Sequence[list[int]]
    detokenizers: Sequence[Callable[[], Detokenizer]]  # one for each prompt
    answer: Answer
    echoes: Sequence[Echo | None] = ()  # one for each prompt, or none at all
    background: bool = False  # the answer is generated whether or not a client reads it
    resume: Resume | None = None  # where the stream is to be continued


@dataclass(slots=True)
class Runs:
    """The requests that are running."""

    engine: EngineClient
    keep_alive_seconds: float
    stored: StoredStreams
    closing: bool = False  # new requests are refused
    _runs: set[Run] = field(default_factory=set)
    _delivery: TokenDelivery = field(default_factory=TokenDelivery)
    _texts: dict[int, bytes] = field(default_factory=dict)  # of tokens, in JSON; see FastPath
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _encoding: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "answers"))

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
        marked = notes().by_router and is_resumable(prepared.generation, n_prompts) and not any(prepared.echoes)
        if marked:
            prepared = replace(prepared, generation=resumable(prepared.generation, answer, resume), resume=resume)
        elif resume is not None:
            raise not_resumable()
        run = self._run(prepared)
        run.stream_key = secrets.token_hex(32) if marked else None
        stored = self._new_stored(prepared)
        run.joins = stored is None  # else the numbers of events would depend on how fast they are read
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._running(prepared, run, stored))
            if stored is not None:
                shown = stored.log.last_event, len(stored.log)  # the client has had them from another S-node
                stored.start(asyncio.create_task(self._generate(stack.pop_all(), stored, prepared, run)))
                self.stored.add(stored)
                return await self._show(request, stored, *shown, stream=prepared.generation.stream, marks=marked)
            if not prepared.generation.stream:
                return await self._whole(request, prepared, run)
            events = await self._open_stream(request, answer)
            await self._write(events, prepared, run)
            return events.response

    @asynccontextmanager
    async def _running(self, prepared: PreparedRequest, run: Run, stored: StoredStream | None) -> AsyncIterator[None]:
        """A run whose choices are submitted, if they have not ended elsewhere. Raises ApiError."""
        answer = prepared.answer
        self._runs.add(run)
        self._idle.clear()
        try:
            if prepared.resume is not None:
                await self._replay(prepared, run, prepared.resume, stored.log if stored is not None else None)
            if run.running:
                await self._submit(prepared, run)
            # Leaving this block cancels all choices that still run. aiohttp cancels the request's task if the client
            # goes away.
            with run:
                yield
        except (asyncio.CancelledError, ConnectionError):
            notes().handed_over = self.closing and run.leave is not None
            run.abort()  # choices that were not queued yet; the block above has ended all others
            raise
        finally:
            counts = usage(run.choices, prepared.generation.candidates)
            tokens = {name: counts[name] for name in ("prompt_tokens", "completion_tokens")}
            notes().logged |= {"id": answer.id, **tokens}
            if run.first_token_seconds is not None:
                notes().logged["first_token_seconds"] = round(run.first_token_seconds, 4)
            self._runs.discard(run)
            if not self._runs:
                self._idle.set()

    def _new_stored(self, prepared: PreparedRequest) -> StoredStream | None:
        """The stream that a request asks to store; None: it asks for none. Raises ApiError (429)."""
        event = notes().last_event if prepared.generation.stream else None
        if event is None and not prepared.background:
            return None
        digest = event.digest if event is not None else None
        return self.stored.new(prepared.answer, notes().client, background=prepared.background, digest=digest)

    async def _generate(
        self, running: AsyncExitStack, stored: StoredStream, prepared: PreparedRequest, run: Run
    ) -> None:
        """Write the events of a stored stream to its log. `running` is what ends with the run."""
        async with running:
            await self._write(stored.log, prepared, run)

    async def _show(
        self, request: web.Request, stored: StoredStream, event: int, entry: int, *, stream: bool, marks: bool
    ) -> web.StreamResponse:
        """Answer the request that has begun a stored stream. With `stream`: with the events after number `event`, and
        if `marks` with the marks from `entry` of the log on. Else with the answer so far."""
        if not stream:
            headers = {"X-Request-Id": request_id(request) or stored.answer.id}
            return json_response(stored.answer.so_far, headers=headers)
        if (last := notes().last_event) is not None:
            event = max(event, last.number)  # the router may not know that the client has had this one
        return await self.show_events(request, stored, event, marks_from=entry if marks else None)

    async def reconnect(self, request: web.Request, event: LastEvent, *, marks: bool) -> web.StreamResponse:
        """Answer a client that comes back with the events after its last one. `marks`: a router asks. Raises
        ApiError (400, 404)."""
        stored = self.stored.find(event, notes().client)
        if stored.log.ended and event.number == stored.log.last_event:
            return web.Response(status=204)  # by which the specification tells clients not to come back
        return await self.show_events(request, stored, event.number, marks_from=0 if marks else None)

    async def show_events(
        self, request: web.Request, stored: StoredStream, after: int, *, marks_from: int | None = None
    ) -> web.StreamResponse:
        """Answer with the events of a stored stream behind the number `after`, also those to come, and with the marks
        from an entry of its log on; None: without marks."""
        events = await self._open_stream(request, stored.answer)
        try:
            with self.stored.reading(stored):
                await stored.log.copy_to(events, after, self.keep_alive_seconds, comments_from=marks_from)
        except (asyncio.CancelledError, ConnectionError):
            if self.closing and marks_from is not None and not stored.readers:
                await stored.cancel()  # the router continues the stream at another S-node
                self.stored.remove(stored)
            raise
        await events.end()
        return events.response

    async def _open_stream(self, request: web.Request, answer: Answer) -> EventStream:
        headers = {"X-Request-Id": request_id(request) or answer.id, **notes().headers}
        events = EventStream(request, headers, named=answer.named_events)
        notes().stream = events.response
        await events.open()
        return events

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

    async def _replay(self, prepared: PreparedRequest, run: Run, resume: Resume, log: EventLog | None) -> None:
        """Bring a run to where its stream is to be continued. `log` gets the events that the client has had. Raises
        ApiError (400)."""
        answer = prepared.answer
        stream = (
            ChoiceStream(log, answer, prepared.generation, run, self._texts, self._encoding)
            if log is not None
            else None
        )
        longest = max((len(past.tokens) for past in resume.choices), default=0)
        if len(resume.choices) > len(run.choices) or longest >= self.engine.max_model_len:
            raise not_resumable()
        if resume.begun:
            begin = answer.begin(usage(run.choices, len(run.choices)))
            if log is not None:
                log.send(begin)
                log.write(mark([]))
        try:
            for i, (index, event) in enumerate(resume.events()):
                if not run.runs(index):
                    raise not_resumable()
                piece = run.feed(index, event)
                if stream is None:
                    answer.deltas(index, piece)
                else:
                    stream.write(index, piece)
                if i % _REPLAYED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except (ValueError, LookupError, OverflowError):  # of a token that the tokenizer does not know
            raise not_resumable() from None

    async def _submit(self, prepared: PreparedRequest, run: Run) -> None:
        """Queue a run's choices. Raises ApiError."""
        generation = prepared.generation
        params = replace(generation.sampling, client=notes().client)
        grammar = generation.grammar
        spec = None if grammar is None else grammar.spec
        prompts, n = list(prepared.prompts), generation.candidates
        request = Request(prepared.answer.id, prompts, params, n, spec, stream_key=run.stream_key)
        if (resume := prepared.resume) is not None:
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
        """Answer in one body, once all choices have ended. Raises ApiError and what ends the generation."""
        generation, answer = prepared.generation, prepared.answer
        whole: dict[int, Piece] = {choice.index: Piece() for choice in run.choices}
        try:
            while (ready := await run.pieces()) is not None:
                for index, pieces in ready.items():
                    for piece in pieces:
                        whole[index].append(piece)
        except EngineError as error:
            raise from_engine(error, answer.prompt_param, generation.mask_param) from None
        counts = usage(run.choices, generation.candidates)
        chosen = _best(run.choices, generation.candidates, generation.n)
        shown = {i: whole[choice.index] for i, choice in enumerate(chosen)}
        top = generation.prompt_logprobs

        def scores(i: int) -> dict[str, Any]:
            """The prompt's log-probabilities, which choice i has."""
            prompt = prepared.prompts[i // generation.n]
            return {"prompt_logprobs": answer.prompt_logprobs(chosen[i].prompt_scores, prompt, top or 0)}

        def encode() -> bytes:
            if top is None:
                return orjson.dumps(answer.whole(shown, counts))
            if answer.has_one_prompt:
                return orjson.dumps(answer.whole(shown, counts) | scores(0))
            return orjson.dumps(answer.whole(shown, counts, scores))

        n_scored = sum(len(piece.logprobs) for piece in shown.values()) + sum(len(c.prompt_scores) for c in chosen)
        if n_scored <= _INLINE_SCORED:
            body = encode()
        else:
            body = await asyncio.get_running_loop().run_in_executor(self._encoding, encode)
        headers = {"X-Request-Id": request_id(request) or answer.id}
        return web.Response(body=body, headers=headers, content_type="application/json")

    async def _write(self, events: Events, prepared: PreparedRequest, run: Run) -> None:
        """Write a stream to its end."""
        generation, answer = prepared.generation, prepared.answer
        stream = ChoiceStream(events, answer, generation, run, self._texts, self._encoding)
        if run.stream_key is not None:
            head = {"id": answer.id, "created": answer.created, "seed": generation.sampling.seed}
            events.write(mark(head | {"key": run.stream_key}))
            run.leave = partial(events.write, mark(LEAVING))
            if self.closing:
                run.leave()
        try:
            if not (prepared.resume is not None and prepared.resume.begun):
                events.send(answer.begin(usage(run.choices, generation.n)))
            if run.stream_key is not None:
                events.write(mark([]))
            await stream.write_all(self.keep_alive_seconds)
        except ConnectionError:
            raise
        except Exception as error:
            failure = from_exception(error, "a stream", generation.mask_param)
            log_error(failure)
            await events.fail(answer.failure(failure))
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


#: Stands for the text in the event that a template is made from. JSON writes the NUL as an escape sequence, which the
#: rest of an event does not have.
_TEXT = "\0text"


class ChoiceStream:
    """Writes the pieces of a run's choices to a stream, and opens a fast path to each choice that can take it.

    Most pieces are text and nothing else. Their events differ in the text alone, so they are made from a template,
    which is the event of a stand-in for the text.
    """

    def __init__(
        self,
        events: Events,
        answer: Answer,
        generation: Generation,
        run: Run,
        token_texts: dict[int, bytes],
        encoding: ThreadPoolExecutor,
    ):
        """`token_texts`: see FastPath. `encoding` encodes what takes long."""
        self._events, self._answer, self._generation, self._run = events, answer, generation, run
        self._token_texts, self._encoding = token_texts, encoding
        self._busy = False  # a piece is being encoded, which must not be overtaken
        self._templates: dict[int, tuple[bytes, bytes]] = {}  # by the choice's index: what stands around the text
        self._without_fast_path: dict[int, ByteDetokenizer] = {}
        if run.stream_key is None:  # else each event is followed by its token
            self._without_fast_path = {choice.index: direct for choice in run.choices if (direct := choice.direct)}

    async def write_all(self, keep_alive_seconds: float) -> None:
        """Write all pieces to come, and a comment after each `keep_alive_seconds` without one."""
        events, run = self._events, self._run
        run.offer_to(self._offer)
        while (ready := await run.pieces(keep_alive_seconds - events.quiet_seconds)) is not None:
            for index, pieces in ready.items():
                for piece in pieces:
                    if len(piece.logprobs) <= _INLINE_SCORED:
                        self.write(index, piece)
                        continue
                    self._busy = True  # with an echoed prompt, or with many unread tokens
                    loop = asyncio.get_running_loop()
                    events.write(await loop.run_in_executor(self._encoding, self._marked, index, piece))
                    self._busy = False
            if events.quiet_seconds >= keep_alive_seconds:
                events.keep_alive()
            await events.drain()

    def _offer(self, index: int, piece: Piece) -> bool:
        """Write a piece at once, unless the client leaves too much unread or this may take long: then this returns
        False."""
        if self._events.full or self._busy or len(piece.logprobs) > _INLINE_SCORED:
            return False
        self.write(index, piece)
        # If its events differ in the text alone from now on, a choice gets a fast path.
        steady = index in self._without_fast_path and not self._generation.continuous_usage
        if steady and self._answer.adds_text(index):
            around, detokenizer = self._template(index), self._without_fast_path.pop(index)
            fast_path = FastPath(self._events, around, detokenizer, self._token_texts, lambda: self._run.is_read)
            self._run.open_fast_path(index, fast_path)
        return True

    def write(self, index: int, piece: Piece) -> None:
        """Write the events of a piece of a choice, and the mark behind them."""
        self._events.write(self._marked(index, piece))

    def _marked(self, index: int, piece: Piece) -> bytes:
        events = self._events_of(index, piece)
        return events + token_mark(index, piece.tokens) if piece.tokens else events

    def _events_of(self, index: int, piece: Piece) -> bytes:
        """The events of a piece of a choice; b"" if there are none."""
        deltas = self._answer.deltas(index, piece)
        if not isinstance(deltas, str):
            return b"".join([self._events.encode(self._chunk(delta)) for delta in deltas])
        if self._generation.continuous_usage:
            return event(self._chunk(self._answer.text_delta(index, deltas)))
        return orjson.dumps(deltas).join(self._template(index))

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the JSON of the text, in the event of a piece that is text alone."""
        if (template := self._templates.get(index)) is None:
            before, _, behind = event(self._chunk(self._answer.text_delta(index, _TEXT))).partition(orjson.dumps(_TEXT))
            template = self._templates[index] = before, behind
        return template

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        generation = self._generation
        so_far = usage(self._run.choices, generation.n) if generation.continuous_usage else None
        with_usage = generation.include_usage or generation.continuous_usage
        return self._answer.chunk(delta, so_far, with_usage=with_usage)
