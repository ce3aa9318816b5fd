"""/v1/responses, OpenAI's Responses API: a body is translated into a chat, and the answer is a response with its output
items, whole or as OpenAI's events.

A request holds its whole conversation: `previous_response_id` and the like are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from fastdecode.api.answers import Event, ItemAnswer
from fastdecode.api.choices import Piece
from fastdecode.api.defaults import NO_DEFAULTS, SamplingDefaults
from fastdecode.api.errors import ApiError
from fastdecode.api.fields import Fields, invalid, is_integer, is_one_of, is_string, read_objects, read_texts
from fastdecode.api.origins import Origins
from fastdecode.api.protocol import HINTS, LEFT_OUT, LEFT_OUT_OF_STREAMS, ChatRequest, parse_translated, read_hint
from fastdecode.api.response_tools import ResponseTools, flat_name
from fastdecode.text.output.deltas import CallDelta, OutputParser
from fastdecode.text.tokenizer import Tokenizer

#: Fields that a chat has under the same names.
_SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "safety_identifier", "metadata"),
    *("prompt_cache_key", "top_k", "min_p", "seed", "repetition_penalty", "chat_template_kwargs"),
)
_NEUTRAL = {
    "context_management": is_one_of([]),
    "conversation": is_one_of(),
    "include": is_one_of([]),
    "previous_response_id": is_one_of(),
    "prompt": is_one_of(),
    "service_tier": is_one_of("auto", "default"),
    "store": is_one_of(False),
    "stream_options": is_one_of({"include_obfuscation": False}, {}),
    "top_logprobs": is_one_of(0),
    "truncation": is_one_of("disabled"),
}
_LEFT_OUT_OF_ITEMS = {"phase": is_string}
_LOGPROBS = "message.output_text.logprobs"


def _is_left_out(include: Any) -> bool:
    """Whether a value of `include` names nothing that this server could give."""
    return isinstance(include, list) and all(map(is_string, include)) and _LOGPROBS not in include


_LEFT_OUT = LEFT_OUT | {
    "include": _is_left_out,
    "max_tool_calls": is_integer,  # of hosted tools
    "stream_options": lambda value: isinstance(value, dict) and value.keys() <= LEFT_OUT_OF_STREAMS.keys(),
}
_LEFT_OUT_OF_REASONING = {"summary": is_string, "generate_summary": is_string}  # no summary is written


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A body of /v1/responses.

    Attributes:
        chat: the chat that it means.
        shown: the fields that its answer repeats.
        tools: its tools.
        background: it is generated whether or not a client reads it (stored.py).
    """

    chat: ChatRequest
    shown: dict[str, Any]
    tools: ResponseTools
    background: bool


def parse_response(
    body: Any, defaults: SamplingDefaults = NO_DEFAULTS, *, drop_hosted_tools: bool = False
) -> ResponseRequest:
    """Check a decoded JSON body. Raises ApiError (400)."""
    fields = Fields(body)
    chat: dict[str, Any] = {name: value for name in _SAME if (value := fields.take(name)) is not None}
    origins = Origins(_ORIGINS)
    instructions = fields.string("instructions")
    chat["messages"] = _messages(fields.required("input"), instructions, origins)
    reasoning = fields.object("reasoning")
    chat["reasoning_effort"] = effort = read_hint(reasoning, "effort", HINTS["reasoning_effort"])
    reasoning.refuse_others(left_out=_LEFT_OUT_OF_REASONING)
    most = fields.integer("max_output_tokens", 1, 2**31 - 1, None)
    if most is not None:
        chat["max_completion_tokens"] = most
    tools = ResponseTools.read(fields.take("tools", []), origins, drop_hosted=drop_hosted_tools)
    choice = fields.take("tool_choice")
    chat["tools"], chat["tool_choice"] = tools.functions, tools.choice(choice)
    text = fields.object("text")
    form = text.take("format")
    if form is not None:
        chat["response_format"] = _format(Fields(form, "text.format"))
    chat["verbosity"] = verbosity = read_hint(text, "verbosity", HINTS["verbosity"])
    text.refuse_others()
    background = fields.boolean("background", default=False)
    if background and not fields.boolean("store", default=True):
        raise invalid("store", "a response in the background is stored for 10 minutes")
    fields.refuse_others(_NEUTRAL, _LEFT_OUT)
    request = parse_translated(chat, defaults, origins)
    sampling = request.generation.sampling
    shown = {
        "background": background,
        "instructions": instructions,
        "max_output_tokens": most,
        "metadata": chat.get("metadata") or {},
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
        "reasoning": {"effort": effort, "summary": None},
        "store": background,
        "temperature": sampling.temperature,
        "text": {"format": form or {"type": "text"}, **({"verbosity": verbosity} if verbosity else {})},
        "tool_choice": choice or "auto",
        "tools": tools.shown,
        "top_p": sampling.top_p,
    }
    return ResponseRequest(request, shown, tools, background)


def _messages(given: Any, instructions: str | None, origins: Origins) -> list[dict[str, Any]]:
    """The messages that `instructions` and `input` mean. The latter is a text, or a list of messages, calls and their
    outputs."""
    head = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*head, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid("input", "must be a text or a list of at least one item")
    messages: list[dict[str, Any]] = list(head)
    thought = ""  # before the next item
    for item in read_objects(given, "input", "items"):
        thought = _add_item(messages, item, thought, origins)
    if len(messages) == len(head):
        raise invalid("input", "has no message")
    return messages


def _add_item(messages: list[dict[str, Any]], fields: Fields, thought: str, origins: Origins) -> str:
    """Add an item to the messages, with the reasoning before it. Returns the reasoning that the item is itself."""
    kind = fields.string("type") or "message"
    fields.take("id"), fields.take("status")  # of an earlier answer
    reasoning = {"reasoning_content": thought} if thought else {}
    thought = ""
    match kind:
        case "message":
            origins[f"messages[{len(messages)}]"] = fields.prefix
            role, content = fields.required("role"), fields.required("content")
            added = {"role": role, "content": _text(content, fields.param("content"))}
            messages.append(added | (reasoning if role == "assistant" else {}))
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant" or reasoning:
                messages.append({"role": "assistant", "content": None, **reasoning})
            name = flat_name(fields.string("namespace"), fields.required("name"))
            function = {"name": name, "arguments": fields.required("arguments")}
            call = {"type": "function", "id": fields.string("call_id"), "function": function}
            calls = messages[-1].setdefault("tool_calls", [])
            origins[f"messages[{len(messages) - 1}].tool_calls[{len(calls)}].function"] = fields.prefix
            calls.append(call)
        case "function_call_output":
            fields.take("name"), fields.take("namespace")  # the call has them
            origins[f"messages[{len(messages)}].content"] = fields.param("output")
            output = _text(fields.required("output"), fields.param("output"))
            messages.append({"role": "tool", "tool_call_id": fields.string("call_id"), "content": output})
        case "reasoning":
            fields.take("encrypted_content")
            kinds = ("reasoning_text", "summary_text", "text")
            for name in ("content", "summary"):
                parts = fields.take(name) or []
                thought = thought or "\n".join(read_texts(parts, fields.param(name), *kinds))
        case _:
            message = f"must be message, function_call, function_call_output or reasoning, not {kind!r}"
            raise invalid(fields.param("type"), message, code="unsupported_value")
    fields.refuse_others(left_out=_LEFT_OUT_OF_ITEMS)
    return thought


def _text(content: Any, param: str) -> Any:
    """A text, or a list of text parts as a chat has it."""
    if not isinstance(content, list):
        return content
    neutral = {"annotations": is_one_of([]), "logprobs": is_one_of([])}
    texts = read_texts(content, param, "input_text", "output_text", "text", neutral=neutral)
    return [{"type": "text", "text": text} for text in texts]


def _format(fields: Fields) -> dict[str, Any]:
    """A response_format of a chat."""
    kind = fields.required("type")
    found: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        found["json_schema"] = {name: fields.take(name) for name in ("name", "description", "schema", "strict")}
    fields.refuse_others()
    return found


#: Where fields of the chat come from. Entries for messages and tools are added.
_ORIGINS = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}


class _Item:
    """An output item that is being written: a message, a reasoning or a function call."""

    def __init__(self, response: str, kind: str, index: int, called: dict[str, str] | None = None):
        """`response` is the response's id, from which the item's ids follow: another S-node may end the item. `called`
        are the fields that name the function of a call."""
        self.kind, self.index, self.text = kind, index, ""
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        digest = blake2b(f"{response} {index}".encode(), digest_size=16).hexdigest()
        self.id = f"{prefix}_{digest}"
        self._head = called | {"call_id": f"call_{digest[:24]}"} if called else {}

    def part(self, text: str) -> dict[str, Any]:
        """The item's only content part."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def shown(self, status: str) -> dict[str, Any]:
        """The item as the response shows it."""
        item: dict[str, Any] = {"type": self.kind, "id": self.id, "status": status}
        if self.kind == "function_call":
            return item | self._head | {"arguments": self.text}
        content = [self.part(self.text)] if self.text or status != "in_progress" else []
        if self.kind == "reasoning":
            return item | {"summary": [], "content": content}
        return item | {"role": "assistant", "content": content}


class ResponseAnswer(ItemAnswer):
    """The answer of /v1/responses. Its items are output items."""

    id_prefix = "resp"
    object = "response"
    prompt_param = "input"
    kinds = ("reasoning", "message", "function_call")

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        parser: Callable[[], OutputParser],
        shown: dict[str, Any],
        namespaces: Mapping[str, tuple[str, str]],
    ):
        """`shown` are fields of the request that the answer repeats. `namespaces`: see ResponseTools."""
        super().__init__(model, tokenizer, parser=parser)
        self._shown, self._namespaces = shown, namespaces
        self._items: list[_Item] = []
        self._n_events = 0
        self._finish_reason: str | None = None
        self._last: dict[str, Any] | None = None  # the response after its last event

    def begin(self, usage: dict[str, Any]) -> list[Event]:
        response = self._body(None, "in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def deltas(self, index: int, piece: Piece) -> list[Event]:
        self._finish_reason = piece.finish_reason
        return super().deltas(index, piece)

    def _begin(self, kind: str, call: CallDelta | None = None) -> list[Event]:
        if self._items and self._items[-1].kind == kind and call is None:
            return []
        events = self._end_item("completed") if self._items else []
        item = _Item(self.id, kind, len(self._items), self._called(call.name or "") if call else None)
        self._items.append(item)
        events.append(self._event("output_item.added", output_index=item.index, item=item.shown("in_progress")))
        if kind != "function_call":
            events.append(self._of_item("content_part.added", item, content_index=0, part=item.part("")))
        return events

    def _called(self, name: str) -> dict[str, str]:
        """The fields that name a called function."""
        if name not in self._namespaces:
            return {"name": name}
        namespace, name = self._namespaces[name]
        return {"name": name, "namespace": namespace}

    def _text(self, text: str) -> Event:
        item = self._items[-1]
        item.text += text
        if item.kind == "function_call":
            return self._of_item("function_call_arguments.delta", item, delta=text)
        if item.kind == "reasoning":
            return self._of_item("reasoning_text.delta", item, content_index=0, delta=text)
        return self._of_item("output_text.delta", item, content_index=0, delta=text, logprobs=[])

    def _end_item(self, status: str) -> list[Event]:
        item = self._items[-1]
        match item.kind:
            case "function_call":
                name = item.shown("completed")["name"]
                events = [self._of_item("function_call_arguments.done", item, name=name, arguments=item.text)]
            case "reasoning":
                events = [self._of_item("reasoning_text.done", item, content_index=0, text=item.text)]
            case _:
                events = [self._of_item("output_text.done", item, content_index=0, text=item.text, logprobs=[])]
        if item.kind != "function_call":
            events.append(self._of_item("content_part.done", item, content_index=0, part=item.part(item.text)))
        return [*events, self._event("output_item.done", output_index=item.index, item=item.shown(status))]

    def end(self, usage: dict[str, Any], *, wanted: bool) -> list[Event]:
        events = self._end_item(self._status) if self._items else []
        self._last = self._body(usage)
        return [*events, self._event(self._status, response=self._last)]

    def failure(self, error: ApiError) -> Event:
        self._last = self._body(None, "failed")
        self._last["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("failed", response=self._last)

    def cancel(self) -> None:
        """Be a response that its client has cancelled, unless it has ended."""
        self._last = self._last or self._body(None, "cancelled")

    @property
    def so_far(self) -> dict[str, Any]:
        """The response as it is now."""
        return self._last or self._body(None, "in_progress")

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _event(self, kind: str, /, **fields: Any) -> Event:
        self._n_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._n_events - 1, **fields}

    def _of_item(self, kind: str, item: _Item, /, **fields: Any) -> Event:
        return self._event(kind, item_id=item.id, output_index=item.index, **fields)

    def _body(self, usage: dict[str, Any] | None, status: str | None = None) -> dict[str, Any]:
        status = status or self._status
        last = len(self._items) - 1
        of_last = "incomplete" if status in ("cancelled", "failed") else status
        items = [item.shown(of_last if item.index == last else "completed") for item in self._items]
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._head["model"],
            "output": items,
            "previous_response_id": None,
            "truncation": "disabled",
            "usage": usage and self._usage(usage),
            **self._shown,
        }

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        thoughts = [item.text for item in self._items if item.kind == "reasoning"]
        # The reasoning is encoded again, which gives about as many tokens as the model wrote.
        n_reasoning = sum(map(len, self.tokenizer.encode_all(thoughts, add_special_tokens=False)))
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": n_reasoning},
            "total_tokens": usage["total_tokens"],
        }
