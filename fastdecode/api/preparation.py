"""Prepares a request for the engine: checks its body, renders its chat and encodes its texts.

One thread does the work that may take long, one piece at a time, so that it does not delay the streams.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fastdecode.api.choices import Echo
from fastdecode.api.errors import ApiError
from fastdecode.api.fields import decode_json
from fastdecode.api.protocol import ChatRequest, Generation
from fastdecode.api.structured import GrammarField, grammar_error
from fastdecode.service.client import EngineClient
from fastdecode.text.chat_template import ChatTemplateError
from fastdecode.text.detokenizer import Detokenizer
from fastdecode.text.grammar import GrammarError
from fastdecode.text.log_once import log_once
from fastdecode.text.output.deltas import ToolForm
from fastdecode.text.output.dialogue import Dialogue
from fastdecode.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_INLINE_CHARACTERS = 8192  # longer text is encoded in a thread
_INLINE_TOKENS = 512  # a longer prompt is echoed by a thread
_INLINE_BYTES = 64 * 1024  # a longer body is decoded and checked in a thread
_MESSAGE_COST = 64  # characters that the tokenizer encodes in about the time that a template takes for a message

_T = TypeVar("_T")


class Preparation:
    """Prepares the requests of one server. All methods raise ApiError (400; 503 once it is closing)."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, form: ToolForm | None = None):
        """`form`: how the model writes tool calls; None: it is not known."""
        self._engine, self._tokenizer, self._form = engine, tokenizer, form
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self.closing = False

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def parse(self, body: bytes, check: Callable[[Any], _T]) -> _T:
        """The result of `check`, which gets the body's JSON."""

        def work() -> _T:
            decoded = decode_json(body)
            self._bound_messages(decoded)
            return check(decoded)

        return await self._do(work, quick=len(body) <= _INLINE_BYTES)

    def _bound_messages(self, body: Any) -> None:
        """Refuse a chat that cannot fit before its messages are checked and rendered, which takes seconds for many of
        them: a template writes a token or more for each."""
        limit = self._engine.max_model_len
        for param in ("messages", "input"):
            messages = body.get(param) if isinstance(body, dict) else None
            if isinstance(messages, list) and len(messages) >= limit:
                message = f"there are {len(messages)} messages; the context is {limit} tokens, output included"
                raise ApiError(400, message, param=param, code="context_length_exceeded")

    async def encode(self, texts: Sequence[str], param: str, *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text. `param` is the request's field with the texts, for a text that is too long."""
        if sum(map(len, texts)) <= _INLINE_CHARACTERS:
            return self._tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
        limit = self._engine.max_model_len
        if (fewest := max(map(self._tokenizer.fewest_tokens, texts))) >= limit:
            # Encoding megabytes takes seconds of a core, only to find the same.
            message = f"the prompt has at least {fewest} tokens; the context is {limit}, output included"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return await self._do(lambda: self._tokenizer.encode_all(texts, add_special_tokens=add_special_tokens))

    async def render(self, chat: ChatRequest) -> str:
        """The text of a chat."""
        self._check_hints(chat)

        def render() -> str:
            messages: Sequence[Mapping[str, Any]] = chat.messages
            tools: Sequence[Mapping[str, Any]] = chat.tool_use.definitions
            if self._form is not None:
                messages, tools = self._form.shown(messages, tools)
            return self._tokenizer.render_chat(
                messages,
                tools=tools,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **chat.template_variables,
            )

        try:
            cost = sum(len(message["content"] or "") + _MESSAGE_COST for message in chat.messages)
            return await self._do(render, quick=cost <= _INLINE_CHARACTERS)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages", code="chat_template_error") from None

    def _check_hints(self, chat: ChatRequest) -> None:
        """Say in the log which hints of a chat its template cannot follow."""
        if not chat.hints:
            return
        template = self._tokenizer.template_source(tools=bool(chat.tool_use.definitions))
        for name, value in chat.hints.items():
            if name not in template and not (value == "none" and "enable_thinking" in template):
                log_once(log, f"{name} {value} has no effect: the model's chat template does not read it")

    def truncate(self, prompt: list[int], generation: Generation) -> list[int]:
        """The last tokens of a prompt, as many as `truncate_prompt_tokens` asks for."""
        kept = generation.truncate
        if kept is None:
            return prompt
        if kept < 0:
            kept = max(1, self._engine.max_model_len - (generation.sampling.max_tokens or 1))
        return prompt[-kept:]

    async def echo(self, text: str | None, prompt: list[int], generation: Generation) -> Echo:
        """The echo of a prompt. `text` is its text as the client sent it; None: the client sent tokens."""
        skip, offsets_wanted = generation.skip_special_tokens, generation.logprobs

        def make() -> Echo:
            whole = self._tokenizer.decode(prompt, skip_special_tokens=skip) if text is None else text
            offsets, seen = [], 0
            if offsets_wanted:
                detokenizer = Detokenizer.make(self._tokenizer, skip_special_tokens=skip)
                for token in prompt:
                    offsets.append(seen)
                    seen += len(detokenizer.push(token))
            return Echo(whole, prompt, offsets)

        return await self._do(make, quick=len(prompt) <= _INLINE_TOKENS or not offsets_wanted)

    async def with_grammar(self, generation: Generation, dialogue: Dialogue, prompt: str) -> Generation:
        """`generation` with the grammar of an answer to `prompt`, whose form is `dialogue`."""
        asked = generation.grammar
        try:
            # Schemas of tools are compiled to see what of them can be followed.
            make = partial(dialogue.grammar, prompt, asked.spec if asked else None)
            spec = await self._do(make, quick=not dialogue.tools)
        except GrammarError as error:
            raise grammar_error(error.param or (asked.param if asked else "tools"), str(error)) from None
        if spec is None:
            return generation
        param = asked.param if asked else "tool_choice" if dialogue.must_call else "tools"
        return dataclasses.replace(generation, grammar=GrammarField(param, spec))

    async def finish(self, generation: Generation) -> Generation:
        """`generation` with encoded bad words, if it has some."""
        if not generation.bad_words:
            return generation
        # A word has other tokens at the start of a text than behind a space.
        words = [space + word.lstrip() for word in generation.bad_words for space in ("", " ")]
        encoded = await self.encode(words, "bad_words", add_special_tokens=False)
        bad_words = tuple({tuple(word) for word in encoded if word})
        return dataclasses.replace(generation, sampling=dataclasses.replace(generation.sampling, bad_words=bad_words))

    async def _do(self, work: Callable[[], _T], *, quick: bool = False) -> _T:
        """The result of work, which is done in the thread unless it is quick."""
        if quick:
            return work()
        if self.closing:
            raise shutting_down_error()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def shutting_down_error() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Connection": "close"})
