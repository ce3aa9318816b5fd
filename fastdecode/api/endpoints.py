"""The handlers of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from fastdecode.api.answers import Answer, ChatAnswer, CompletionAnswer, usage
from fastdecode.api.errors import ApiError, from_engine, json_response
from fastdecode.api.generation import Choice, EngineClient, Piece, Run, submit
from fastdecode.api.metrics import Metrics
from fastdecode.api.preparation import Preparation, shutting_down_error, with_grammar
from fastdecode.api.protocol import ChatRequest, CompletionRequest, Generation, parse_chat, parse_completion
from fastdecode.api.sse import EventStream
from fastdecode.engine.request import EngineError
from fastdecode.text.output.deltas import ToolForm
from fastdecode.text.output.dialogue import Dialogue
from fastdecode.text.tokenizer import Detokenizer, Tokenizer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Generator:
    """The handlers of both endpoints, and the requests that are running."""

    engine: EngineClient
    tokenizer: Tokenizer
    model: str
    metrics: Metrics
    keep_alive_seconds: float
    tool_form: ToolForm | None = None  # how the model writes tool calls; None: it is not known
    reasoning: str | None = None  # how the model writes its reasoning (text/output/forms.py); None: as content
    closing: bool = False  # new requests are refused
    _runs: set[Run] = field(default_factory=set)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _preparation: Preparation = field(init=False)

    def __post_init__(self) -> None:
        self._idle.set()
        self._preparation = Preparation(self.engine, self.tokenizer)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body: CompletionRequest = parse_completion(await self._json(request))
        self._check_model(body.generation)
        prompts = (
            await self._preparation.encode(body.prompts, "prompt") if isinstance(body.prompts[0], str) else body.prompts
        )
        answer = CompletionAnswer(self.model, self.tokenizer, logprobs=body.generation.sampling.logprobs is not None)
        # The choice's text continues the prompt, so a leading space belongs to it.
        detokenizers = [lambda prompt=prompt: Detokenizer(self.tokenizer, prompt) for prompt in prompts]
        return await self._answer(request, body.generation, prompts, detokenizers, answer)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body: ChatRequest = parse_chat(await self._json(request))
        self._check_model(body.generation)
        dialogue = self._dialogue(body)
        text = await self._preparation.render(body)
        generation = with_grammar(body.generation, dialogue, text)
        [prompt] = await self._preparation.encode([text], "messages", add_special_tokens=False)
        answer = ChatAnswer(
            self.model,
            self.tokenizer,
            logprobs=generation.sampling.logprobs is not None,
            parser=lambda: dialogue.parser(text),
        )
        shown = dialogue.shown
        detokenizer = lambda: Detokenizer(self.tokenizer, shown=shown)  # noqa: E731
        return await self._answer(request, generation, [prompt], [detokenizer], answer)

    def _dialogue(self, body: ChatRequest) -> Dialogue:
        """How the answer to a chat is written and read. Raises ApiError (400) if tools cannot be used."""
        use = body.tool_use
        if use.tools and self.tool_form is None:
            message = "the model's chat template has no tools in a form that is known; --tool-parser can name one"
            raise ApiError(400, f"tools: {message}", param="tools", code="unsupported_value")
        form = self.tool_form if use.tools else None
        return Dialogue(self.tokenizer, form, use.callable_tools, use.must_call, use.parallel, self.reasoning)

    async def close(self, grace: float) -> None:
        """Refuse new requests, wait `grace` seconds for running requests to end, then end them with an error."""
        self.closing = self._preparation.closing = True
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            for run in self._runs:
                run.fail(shutting_down_error())
        self._preparation.close()

    async def _json(self, request: web.Request) -> Any:
        if request.content_type != "application/json":
            # A page of another site can make a browser post other content types without permission. For this type the
            # browser asks the server first, which does not permit it (Fetch standard, CORS-safelisted request header).
            raise ApiError(415, "Content-Type must be application/json", code="unsupported_media_type")
        try:
            return orjson.loads(await request.read())
        except web.RequestPayloadError as error:
            raise ApiError(400, f"the body cannot be read: {error}", code="invalid_body") from None
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None

    def _check_model(self, generation: Generation) -> None:
        if generation.model not in (None, self.model):
            raise ApiError(
                404,
                f"there is no model {generation.model!r} here, only {self.model!r}",
                param="model",
                code="model_not_found",
            )

    async def _answer(
        self,
        request: web.Request,
        generation: Generation,
        prompts: Sequence[list[int]],
        detokenizers: Sequence[Callable[[], Detokenizer]],
        answer: Answer,
    ) -> web.StreamResponse:
        if self.closing:
            raise shutting_down_error()
        n = generation.n
        if (choices := len(prompts) * n) > self.engine.max_queued:
            raise ApiError(
                400,
                f"{len(prompts)} prompt(s) times n={n} is {choices} choices; this server queues at most "
                f"{self.engine.max_queued} (--max-queued)",
                param="n" if n > 1 else answer.prompt_param,
                code="too_many_choices",
            )
        generation = await self._preparation.finish(generation)
        try:
            run = submit(
                self.engine,
                prompts,
                generation.sampling_of,
                n,
                request_id=answer.id,
                make_choice=lambda index, prompt: Choice(
                    index,
                    len(prompt),
                    detokenizers[index // n](),
                    generation.stop,
                    min_tokens=generation.sampling.min_tokens,
                ),
                on_choice_end=self.metrics.choice_ended,
            )
        except EngineError as error:
            raise from_engine(error, answer.prompt_param) from None
        self._runs.add(run)
        self._idle.clear()
        try:
            # Leaving this block cancels all choices that still run. aiohttp cancels this coroutine if the client goes
            # away.
            async with run:
                if generation.stream:
                    return await self._stream(request, generation, run, answer)
                return await self._whole(generation, run, answer)
        finally:
            self._runs.discard(run)
            if not self._runs:
                self._idle.set()

    async def _whole(self, generation: Generation, run: Run, answer: Answer) -> web.Response:
        whole: dict[int, Piece] = {choice.index: Piece() for choice in run.choices}
        while (ready := await run.pieces()) is not None:
            for index, pieces in ready.items():
                for piece in pieces:
                    whole[index].append(piece)
        return json_response(answer.whole(whole, run.choices, generation.n), headers={"x-request-id": answer.id})

    async def _stream(
        self, request: web.Request, generation: Generation, run: Run, answer: Answer
    ) -> web.StreamResponse:
        events = EventStream(request, {"x-request-id": answer.id})
        await events.open()
        with_usage = generation.include_usage or generation.continuous_usage
        try:
            while (ready := await run.pieces(self.keep_alive_seconds)) is not None:
                if not ready:
                    await events.keep_alive()
                    continue
                deltas = [d for index, pieces in ready.items() for piece in pieces for d in answer.deltas(index, piece)]
                so_far = usage(run.choices, generation.n) if generation.continuous_usage else None
                await events.send(answer.chunk(delta, so_far, with_usage=with_usage) for delta in deltas)
        except (EngineError, ApiError) as error:
            await events.fail((error if isinstance(error, ApiError) else from_engine(error)).body)
            return events.response
        except ConnectionError:
            raise
        except Exception:
            log.exception("a stream failed")
            await events.fail(ApiError(500, "internal error; the server's log says more", code="internal_error").body)
            return events.response
        if generation.include_usage:
            await events.send([answer.chunk(None, usage(run.choices, generation.n), with_usage=True)])
        await events.done()
        return events.response
