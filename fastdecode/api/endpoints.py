"""The handlers of the endpoints that generate: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages;
and /tokenize and /detokenize, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from fastdecode.api.answers import Answer, ChatAnswer, CompletionAnswer
from fastdecode.api.anthropic import AnthropicAnswer, parse_message
from fastdecode.api.body import read_bytes
from fastdecode.api.choices import Echo
from fastdecode.api.continuation import Resume, is_from_router
from fastdecode.api.defaults import NO_DEFAULTS, SamplingDefaults
from fastdecode.api.errors import ApiError, json_response
from fastdecode.api.fields import Fields, invalid
from fastdecode.api.last_event import HEADER as LAST_EVENT_ID
from fastdecode.api.last_event import LastEvent
from fastdecode.api.middleware import Handler, notes
from fastdecode.api.preparation import Preparation
from fastdecode.api.protocol import ChatRequest, Generation, is_token_ids, parse_chat, parse_completion
from fastdecode.api.responses import ResponseAnswer, parse_response
from fastdecode.api.runs import PreparedRequest, Runs
from fastdecode.api.stored import Retrieval, StoredStream
from fastdecode.text.detokenizer import Detokenizer
from fastdecode.text.output.deltas import OutputParser, ToolForm
from fastdecode.text.output.dialogue import Dialogue
from fastdecode.text.tokenizer import Tokenizer

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ApiModel:
    """The model as the API shows it."""

    names: tuple[str, ...]  # the first one is the answer to a request that names none
    tool_form: ToolForm | None = None  # how the model writes tool calls; None: it is not known
    reasoning: str | None = None  # how the model writes its reasoning (text/output/forms.py); None: as content
    defaults: SamplingDefaults = NO_DEFAULTS
    adapters: tuple[str, ...] = ()  # the names of its LoRA adapters, each a model of its own to clients

    def name(self, asked: str | None) -> str:
        """The name in the answer to a request for the model `asked`. Raises ApiError (404)."""
        if asked is None:
            return self.names[0]
        known = self.names + self.adapters
        if asked not in known:
            message = f"there is no model {asked!r} here, only {', '.join(map(repr, known))}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return asked

    def adapted(self, generation: Generation) -> Generation:
        """The generation with the adapter that its `model` names, if it names one. Raises ApiError (404)."""
        name = self.name(generation.model)
        if name not in self.adapters:
            return generation
        return replace(generation, sampling=replace(generation.sampling, adapter=name))


class _PreparedChat(NamedTuple):
    """A chat that is ready to be encoded."""

    dialogue: Dialogue  # the forms of the answer
    text: str  # of the prompt
    generation: Generation  # with the answer's grammar
    model: str  # the name in the answer

    def parser(self) -> OutputParser:
        """A parser for one choice of the answer."""
        return self.dialogue.parser(self.text)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The handlers of the endpoints that generate, and of /v1/messages/count_tokens."""

    tokenizer: Tokenizer
    model: ApiModel
    preparation: Preparation
    runs: Runs
    router_secret: bytes | None = None
    drop_hosted_tools: bool = False  # drop tools that only their vendor runs from requests, which are refused otherwise
    #: One process serves the API. Of several none stores streams, because a client may come back to another one.
    one_process: bool = True

    def with_stored_streams(self, handler: Handler) -> Handler:
        """`handler`, but a request with a Last-Event-ID begins a stored stream or comes back to it (last_event.py)."""

        async def handle(request: web.Request) -> web.StreamResponse:
            given = request.headers.get(LAST_EVENT_ID)
            if given is None:
                return await handler(request)
            raw = notes().body = await read_body(request)
            event = await self.preparation.parse(raw, partial(LastEvent.read, given.strip(), request.path))
            by_router = is_from_router(self.router_secret, request.headers, raw)
            if event.stream and not (event.continues and by_router):
                return await self.runs.reconnect(request, event, marks=by_router)
            if self.one_process and self.runs.stored.resume_seconds:
                notes().last_event = event
            return await handler(request)

        return handle

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = await self._parse(request, parse_completion)
        generation = self.model.adapted(body.generation)
        answer = CompletionAnswer(self.model.name(generation.model), self.tokenizer, logprobs=generation.logprobs)
        texts: Sequence[str | None] = [None] * len(body.prompts)
        if isinstance(body.prompts[0], str):
            texts = [text for text in body.prompts if isinstance(text, str)]
            prompts = await self.preparation.encode(
                body.prompts, "prompt", add_special_tokens=generation.add_special_tokens
            )
        else:
            prompts = [ids for ids in body.prompts if isinstance(ids, list)]
        cut = [self.preparation.truncate(prompt, generation) for prompt in prompts]
        echoes: list[Echo | None] = []
        if body.echo:
            for text, prompt, whole in zip(texts, cut, prompts, strict=True):
                # The text as it was sent, unless tokens of it were dropped.
                echoes.append(await self.preparation.echo(text if prompt == whole else None, prompt, generation))
        # The choice's text continues the prompt, so a leading space belongs to it.
        skip = generation.skip_special_tokens
        detokenizers = [
            lambda prompt=prompt: Detokenizer.make(self.tokenizer, prompt, skip_special_tokens=skip) for prompt in cut
        ]
        generation = await self.preparation.finish(generation)
        return await self.runs.answer(request, PreparedRequest(generation, cut, detokenizers, answer, echoes))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        chat = await self._prepare(await self._parse(request, parse_chat))
        answer = ChatAnswer(chat.model, self.tokenizer, logprobs=chat.generation.logprobs, parser=chat.parser)
        return await self._answer(request, chat, answer)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        body = await self._parse(request, partial(parse_response, drop_hosted_tools=self.drop_hosted_tools))
        if body.background and not self.one_process:
            raise invalid("background", "this server would need --api-processes 1", code="unsupported_value")
        with body.chat.origins.named():
            chat, tokenizer, namespaces = await self._prepare(body.chat), self.tokenizer, body.tools.namespaces
            answer = ResponseAnswer(chat.model, tokenizer, parser=chat.parser, shown=body.shown, namespaces=namespaces)
            return await self._answer(request, chat, answer, background=body.background)

    async def one_response(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}: a response in the background, or a stream of its events."""
        stored, query = self._find_response(request), Retrieval.read(request.query)
        if not query.stream:
            return json_response(stored.answer.so_far)
        return await self.runs.show_events(request, stored, query.after)

    async def cancel_response(self, request: web.Request) -> web.Response:
        """POST /v1/responses/{id}/cancel."""
        stored = self._find_response(request)
        await stored.cancel()
        return json_response(stored.answer.so_far)

    async def delete_response(self, request: web.Request) -> web.Response:
        """DELETE /v1/responses/{id}."""
        stored = self._find_response(request)
        await stored.cancel()
        self.runs.stored.remove(stored)
        return json_response({"id": stored.answer.id, "object": "response", "deleted": True})

    def _find_response(self, request: web.Request) -> StoredStream:
        return self.runs.stored.find_response(request.match_info["id"], notes().client)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        body = await self._parse(request, partial(parse_message, drop_hosted_tools=self.drop_hosted_tools))
        with body.origins.named():
            chat = await self._prepare(body)
            return await self._answer(request, chat, AnthropicAnswer(chat.model, self.tokenizer, parser=chat.parser))

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens."""
        parse = partial(parse_message, drop_hosted_tools=self.drop_hosted_tools, counts=True)
        body = await self._parse(request, parse)
        with body.origins.named():
            chat = await self._prepare(body)
        prompt = await self._encode(chat, AnthropicAnswer.prompt_param)
        return json_response({"input_tokens": len(prompt)})

    async def _parse(self, request: web.Request, parse: Callable[[Any, SamplingDefaults], _T]) -> _T:
        raw = await read_body(request)
        by_router = notes().by_router = is_from_router(self.router_secret, request.headers, raw)

        def check(body: Any) -> tuple[Resume | None, _T]:
            resume = Resume.taken_from(body) if by_router else None
            return resume, parse(body, self.model.defaults)

        notes().resume, parsed = await self.preparation.parse(raw, check)
        return parsed

    async def _prepare(self, body: ChatRequest) -> _PreparedChat:
        """Render a chat, and make the grammar of its answer."""
        generation = self.model.adapted(body.generation)
        use = body.tool_use
        if use.tools and self.model.tool_form is None:
            message = (
                "the model's chat template has no tools in a form that is known; --tool-parser can name the form "
                "(generic suits any model), and --chat-template a template with tools"
            )
            raise ApiError(400, f"tools: {message}", param="tools", code="unsupported_value")
        form = self.model.tool_form if use.tools else None
        dialogue = Dialogue(
            self.tokenizer,
            form,
            use.callable_tools,
            use.must_call,
            use.parallel,
            self.model.reasoning,
            body.continue_final_message,
        )
        text = await self.preparation.render(body)
        generation = await self.preparation.with_grammar(generation, dialogue, text)
        return _PreparedChat(dialogue, text, generation, self.model.name(generation.model))

    async def _encode(self, chat: _PreparedChat, param: str) -> list[int]:
        """The tokens of a chat's prompt, which the field `param` holds."""
        special = chat.generation.add_special_tokens
        return (await self.preparation.encode([chat.text], param, add_special_tokens=special))[0]

    async def _answer(
        self, request: web.Request, chat: _PreparedChat, answer: Answer, *, background: bool = False
    ) -> web.StreamResponse:
        prompt = self.preparation.truncate(await self._encode(chat, answer.prompt_param), chat.generation)
        shown, skip = chat.dialogue.shown, chat.generation.skip_special_tokens
        detokenizer = partial(Detokenizer.make, self.tokenizer, shown=shown, skip_special_tokens=skip)
        generation = await self.preparation.finish(chat.generation)
        prepared = PreparedRequest(generation, [prompt], [detokenizer], answer, background=background)
        return await self.runs.answer(request, prepared)


async def read_body(request: web.Request) -> bytes:
    """The body, which should be JSON. Raises what read_bytes raises, and ApiError (415)."""
    if request.content_type != "application/json":
        # A page of another site can make a browser post other content types without permission. For this type the
        # browser asks the server first, which does not permit it (Fetch standard, CORS-safelisted request header).
        raise ApiError(415, "Content-Type must be application/json", code="unsupported_media_type")
    body = notes().body
    return await read_bytes(request) if body is None else body


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The handlers of /tokenize and /detokenize."""

    tokenizer: Tokenizer
    model: ApiModel
    preparation: Preparation
    max_model_len: int

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: the tokens of a `prompt`, or of the prompt that a chat's `messages` become."""
        asked, special, with_texts = await self.preparation.parse(await read_body(request), self._read)
        if isinstance(asked, ChatRequest):
            param, text = "messages", await self.preparation.render(asked)
        else:
            param, text = "prompt", asked
        [tokens] = await self.preparation.encode([text], param, add_special_tokens=special)
        texts = [self.tokenizer.token_text(token) for token in tokens] if with_texts else None
        return json_response(
            {"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens, "token_strs": texts}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize: the text of `tokens`, special ones included."""
        return json_response({"prompt": await self.preparation.parse(await read_body(request), self._decode)})

    def _read(self, body: Any) -> tuple[ChatRequest | str, bool, bool]:
        """The chat or the prompt of a /tokenize, whether special tokens are added, and whether the answer has the
        tokens' texts."""
        fields = Fields(body)
        self.model.name(fields.string("model"))
        with_texts = fields.boolean("return_token_strs")
        if isinstance(body, dict) and body.get("messages") is not None:
            chat = parse_chat({name: value for name, value in body.items() if name != "return_token_strs"})
            return chat, chat.generation.add_special_tokens, with_texts
        prompt = fields.required_string("prompt")
        special = fields.boolean("add_special_tokens", True)
        fields.refuse_others()
        return prompt, special, with_texts

    def _decode(self, body: Any) -> str:
        """The text of a /detokenize."""
        fields = Fields(body)
        self.model.name(fields.string("model"))
        tokens = fields.required("tokens")
        if tokens != [] and not is_token_ids(tokens):
            raise invalid("tokens", "must be a list of token ids")
        if len(tokens) > self.max_model_len:  # no other thread runs while they are decoded
            message = f"there are {len(tokens)}; the context is {self.max_model_len} tokens"
            raise invalid("tokens", message, code="context_length_exceeded")
        fields.refuse_others()
        return self.tokenizer.decode(tokens, skip_special_tokens=False)
