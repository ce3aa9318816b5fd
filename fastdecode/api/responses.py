"""The body of /v1/responses, OpenAI's Responses API: it is translated into a chat.

A request holds its whole conversation: `previous_response_id` and the like are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastdecode.api.defaults import NO_DEFAULTS, SamplingDefaults
from fastdecode.api.fields import Fields, invalid, is_integer, is_one_of, is_string, read_objects
from fastdecode.api.protocol import HINTS, LEFT_OUT, LEFT_OUT_OF_STREAMS, ChatRequest, parse_chat, read_hint
from fastdecode.api.response_tools import ResponseTools, flat_name

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
    given = fields.required("input")
    messages = _messages(given)
    instructions = fields.string("instructions")
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    chat["messages"] = messages
    reasoning = Fields(fields.take("reasoning") or {}, "reasoning")
    chat["reasoning_effort"] = effort = read_hint(reasoning, "effort", HINTS["reasoning_effort"])
    reasoning.refuse_others(left_out=_LEFT_OUT_OF_REASONING)
    most = fields.integer("max_output_tokens", 1, 2**31 - 1, None)
    if most is not None:
        chat["max_completion_tokens"] = most
    tools = ResponseTools.read(fields.take("tools") or [], drop_hosted=drop_hosted_tools)
    choice = fields.take("tool_choice")
    chat["tools"], chat["tool_choice"] = tools.functions, tools.choice(choice)
    text = Fields(fields.take("text") or {}, "text")
    form = text.take("format")
    if form is not None:
        chat["response_format"] = _format(Fields(form, "text.format"))
    chat["verbosity"] = verbosity = read_hint(text, "verbosity", HINTS["verbosity"])
    text.refuse_others()
    background = fields.boolean("background", default=False)
    if background and not fields.boolean("store", default=True):
        raise invalid("store", "a response in the background is stored for 10 minutes")
    fields.refuse_others(_NEUTRAL, _LEFT_OUT)
    request = parse_chat(chat, defaults)
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


def _messages(given: Any) -> list[dict[str, Any]]:
    """The messages that `input` means: a text, or a list of messages, calls and their outputs."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid("input", "must be a text or a list of at least one item")
    messages: list[dict[str, Any]] = []
    thought = ""  # before the next item
    for item in read_objects(given, "input", "items"):
        thought = _add_item(messages, item, thought)
    if not messages:
        raise invalid("input", "has no message")
    return messages


def _add_item(messages: list[dict[str, Any]], fields: Fields, thought: str) -> str:
    """Add an item to the messages, with the reasoning before it. Returns the reasoning that the item is itself."""
    kind = fields.string("type") or "message"
    fields.take("id"), fields.take("status")  # of an earlier answer
    reasoning = {"reasoning_content": thought} if thought else {}
    thought = ""
    match kind:
        case "message":
            role, content = fields.required("role"), fields.required("content")
            added = {"role": role, "content": _text(content, fields.param("content"))}
            messages.append(added | (reasoning if role == "assistant" else {}))
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant" or reasoning:
                messages.append({"role": "assistant", "content": None, **reasoning})
            name = flat_name(fields.string("namespace"), fields.required("name"))
            function = {"name": name, "arguments": fields.required("arguments")}
            call = {"type": "function", "id": fields.string("call_id"), "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            fields.take("name"), fields.take("namespace")  # the call has them
            output = _text(fields.required("output"), fields.param("output"))
            messages.append({"role": "tool", "tool_call_id": fields.string("call_id"), "content": output})
        case "reasoning":
            fields.take("encrypted_content")
            content, summary = fields.take("content"), fields.take("summary")
            thought = _thought(content, fields.param("content")) or _thought(summary, fields.param("summary"))
        case _:
            message = f"must be message, function_call, function_call_output or reasoning, not {kind!r}"
            raise invalid(fields.param("type"), message, code="unsupported_value")
    fields.refuse_others(left_out=_LEFT_OUT_OF_ITEMS)
    return thought


def _thought(parts: Any, param: str) -> str:
    """The text of a reasoning item's content or summary."""
    texts = []
    for part in read_objects(parts or [], param, "text parts"):
        part.require_type("reasoning_text", "summary_text", "text", kind="text parts")
        texts.append(part.required_string("text"))
        part.refuse_others()
    return "\n".join(texts)


def _text(content: Any, param: str) -> Any:
    """A text, or a list of text parts as a chat has it."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in read_objects(content, param, "text parts"):
        part.require_type("input_text", "output_text", "text", kind="text parts")
        parts.append({"type": "text", "text": part.required("text")})
        part.refuse_others({"annotations": is_one_of([]), "logprobs": is_one_of([])})
    return parts


def _format(fields: Fields) -> dict[str, Any]:
    """A response_format of a chat."""
    kind = fields.required("type")
    found: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        found["json_schema"] = {name: fields.take(name) for name in ("name", "description", "schema", "strict")}
    fields.refuse_others()
    return found
