"""/v1/messages, Anthropic's Messages API, and its count_tokens: a body is translated into a chat, and the answer is a
message with its content blocks, whole or as Anthropic's events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import orjson

from fastdecode.api.answers import Event, ItemAnswer
from fastdecode.api.choices import Piece
from fastdecode.api.defaults import NO_DEFAULTS, SamplingDefaults
from fastdecode.api.errors import ApiError
from fastdecode.api.fields import (
    Fields,
    Test,
    invalid,
    is_boolean,
    is_integer,
    is_object,
    is_objects,
    is_one_of,
    is_string,
    read_objects,
)
from fastdecode.api.origins import Origins
from fastdecode.api.protocol import HINTS, ChatRequest, parse_translated, read_hint
from fastdecode.api.response_tools import drop_hosted_tool
from fastdecode.text.output.deltas import CallDelta, OutputParser
from fastdecode.text.tokenizer import Tokenizer

#: Fields that a chat has under the same names.
_SAME = ("model", "stream", "temperature", "top_p", "top_k")
_ROLES = ("user", "assistant", "system")
_CACHE: Mapping[str, Test] = {"cache_control": is_object}  # every prompt is cached
_NEUTRAL = {
    **_CACHE,
    "container": is_one_of(),
    "mcp_servers": is_one_of([]),
    "service_tier": is_one_of("auto", "standard_only"),
    "speed": is_one_of("standard"),
    "user_profile_id": is_string,  # a label
    "workspace_id": is_string,  # a label
}
_LEFT_OUT = {"context_management": is_object, "diagnostics": is_object, "speed": is_string}
_NEUTRAL_OF_TOOLS = {
    **_CACHE,
    "allowed_callers": is_one_of(["direct"]),
    "defer_loading": is_one_of(False),
    "eager_input_streaming": is_boolean,  # arguments are streamed as the model writes them
}
_LEFT_OUT_OF_TOOLS = {"defer_loading": is_boolean, "input_examples": is_objects}
_LEFT_OUT_OF_THINKING = {"budget_tokens": is_integer, "display": is_string}
#: What the types of tools that run at Anthropic begin with.
_HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "mcp_toolset", "advisor")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse_message(
    body: Any, defaults: SamplingDefaults = NO_DEFAULTS, *, drop_hosted_tools: bool = False, counts: bool = False
) -> ChatRequest:
    """Check a decoded JSON body, and return the chat that it means. Raises ApiError (400).

    `counts`: the client asks for the number of the prompt's tokens, and for no answer.
    """
    fields = Fields(body)
    chat: dict[str, Any] = {name: value for name in _SAME if (value := fields.take(name)) is not None}
    most = fields.integer("max_tokens", 1, 2**31 - 1, None)
    if most is None and not counts:
        raise invalid("max_tokens", "this field is required")
    chat["max_completion_tokens"] = most
    chat["stop"] = fields.take("stop_sequences")
    origins = Origins(_ORIGINS)
    chat["messages"] = messages = _messages(fields, origins)
    last = messages[-1]
    chat["continue_final_message"] = last["role"] == "assistant" and "tool_calls" not in last
    chat["tools"] = _tools(fields.take("tools", []), origins, drop_hosted=drop_hosted_tools)
    chat |= _tool_choice(fields.object("tool_choice", {"type": "auto"}))
    output = fields.object("output_config")
    chat["reasoning_effort"] = read_hint(output, "effort", HINTS["reasoning_effort"])
    chat |= _thinking(fields.object("thinking", {"type": "adaptive"}))
    if (form := output.take("format")) is not None:
        chat["response_format"] = _format(Fields(form, "output_config.format"))
    output.refuse_others()
    metadata = fields.object("metadata")
    chat["user"] = metadata.string("user_id")
    metadata.refuse_others()
    fields.refuse_others(_NEUTRAL, _LEFT_OUT)
    return parse_translated(chat, defaults, origins)


#: Where fields of the chat come from. Entries for calls and tools are added.
_ORIGINS = {
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
    "tool_choice.function": "tool_choice",
}


def _messages(fields: Fields, origins: Origins) -> list[dict[str, Any]]:
    """The messages of the chat, the system prompt included."""
    messages: list[dict[str, Any]] = []
    if (system := fields.take("system")) is not None:
        _add_turn(messages, "system", _blocks(system, "system"))
    given = read_objects(fields.required("messages"), "messages", "messages")
    if not given:
        raise invalid("messages", "must be a list of at least one message")
    for message in given:
        role = message.required("role")
        if role not in _ROLES:
            raise invalid(message.param("role"), f"must be one of {', '.join(_ROLES)}")
        blocks = _blocks(message.required("content"), message.param("content"))
        message.refuse_others()
        if role == "assistant":
            _add_answer(messages, blocks, origins)
        else:
            _add_turn(messages, role, blocks)
    if not messages:
        raise invalid("messages", "no message has content")
    return messages


def _blocks(content: Any, param: str) -> list[Fields]:
    """The content blocks of a message. A text stands for a block with this text."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return read_objects(content, param, "content blocks")


def _add_turn(messages: list[dict[str, Any]], role: str, blocks: list[Fields]) -> None:
    """Add text of a user or of the system, and the results of tools. Turns of the same role are one message."""
    known = ("text", "tool_result") if role == "user" else ("text",)
    for block in blocks:
        if _kind(block, *known) == "tool_result":
            messages.append(_result(block))
        else:
            _open(messages, role)["content"].append(_text_part(block))


def _add_answer(messages: list[dict[str, Any]], blocks: list[Fields], origins: Origins) -> None:
    """Add blocks that the assistant has written."""
    for block in blocks:
        kind = _kind(block, "text", "tool_use", "thinking", "redacted_thinking")
        if kind == "redacted_thinking":
            block.refuse_others(left_out={"data": is_string})
            continue
        message = _open(messages, "assistant")
        match kind:
            case "text":
                message["content"].append(_text_part(block))
            case "tool_use":
                function = {"name": block.required("name"), "arguments": block.required("input")}
                call = {"type": "function", "id": block.string("id"), "function": function}
                calls = message.setdefault("tool_calls", [])
                name = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}].function"
                origins |= {name: block.prefix, f"{name}.arguments": block.param("input")}
                calls.append(call)
                block.refuse_others({**_CACHE, "caller": is_one_of({"type": "direct"})})
            case "thinking":
                before = message.get("reasoning_content")
                thought = block.required_string("thinking")
                message["reasoning_content"] = thought if before is None else f"{before}\n{thought}"
                block.refuse_others({"signature": is_string})


def _open(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The last message if it has this role, else a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    return messages[-1]


def _kind(block: Fields, *known: str) -> str:
    kind: str = block.required("type")
    if kind not in known:
        message = f"must be {' or '.join(known)}, not {kind!r}"
        raise invalid(block.param("type"), message, code="unsupported_value")
    return kind


def _text_part(block: Fields) -> dict[str, Any]:
    part = {"type": "text", "text": block.required_string("text")}
    block.refuse_others({**_CACHE, "citations": is_one_of([])})
    return part


def _result(block: Fields) -> dict[str, Any]:
    """The message with the result of a tool. A result that is an error says so in its first line."""
    parts = [{"type": "text", "text": "Error:"}] if block.boolean("is_error") else []
    for part in _blocks(block.take("content") or "", block.param("content")):
        _kind(part, "text")
        parts.append(_text_part(part))
    message = {"role": "tool", "tool_call_id": block.required_string("tool_use_id"), "content": parts or ""}
    block.refuse_others(_CACHE)
    return message


def _tools(tools: Any, origins: Origins, *, drop_hosted: bool) -> list[dict[str, Any]]:
    """The functions of the chat."""
    functions: list[dict[str, Any]] = []
    for tool in read_objects(tools, "tools", "tools"):
        kind = tool.string("type") or "custom"
        if kind.startswith(_HOSTED):
            drop_hosted_tool(tool.param("type"), kind, allowed=drop_hosted)
            continue
        if kind != "custom":
            message = f"only tools with an input_schema are supported, not {kind!r}"
            raise invalid(tool.param("type"), message, code="unsupported_value")
        function = {name: tool.take(name) for name in ("name", "description", "strict")}
        function["parameters"] = tool.required("input_schema")
        name = f"tools[{len(functions)}].function"
        origins |= {name: tool.prefix, f"{name}.parameters": tool.param("input_schema")}
        tool.refuse_others(_NEUTRAL_OF_TOOLS, _LEFT_OUT_OF_TOOLS)
        functions.append({"type": "function", "function": function})
    return functions


def _tool_choice(fields: Fields) -> dict[str, Any]:
    """The chat's fields about the choice of tools."""
    kind = fields.required("type")
    chat: dict[str, Any] = {"parallel_tool_calls": not fields.boolean("disable_parallel_tool_use")}
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": fields.required_string("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat["tool_choice"] = _CHOICES[kind]
    else:
        raise invalid(fields.param("type"), f"must be tool, {', '.join(_CHOICES)}, not {kind!r}")
    fields.refuse_others()
    return chat


def _thinking(fields: Fields) -> dict[str, Any]:
    """The chat's fields about its reasoning. "adaptive" and "between_tools" leave it to the model."""
    chat: dict[str, Any] = {}
    match fields.required("type"):
        case "disabled":
            chat["reasoning_effort"] = "none"
        case "enabled":
            chat["chat_template_kwargs"] = {"enable_thinking": True}
        case "adaptive" | "between_tools":
            pass
        case kind:
            known = "disabled, enabled, adaptive or between_tools"
            raise invalid(fields.param("type"), f"must be {known}, not {kind!r}", code="unsupported_value")
    fields.refuse_others(left_out=_LEFT_OUT_OF_THINKING)
    return chat


def _format(fields: Fields) -> dict[str, Any]:
    """The response_format of the chat."""
    kind, schema = fields.required("type"), fields.required("schema")
    fields.refuse_others()
    return {"type": kind, "json_schema": {"name": "answer", "schema": schema}}


#: For each kind of content block, its field that grows, and the delta and the delta's field by which it does.
_TEXTS = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}


class _ContentBlock:
    """A content block that is being written."""

    def __init__(self, message: str, kind: str, index: int, name: str | None):
        """`message` is the message's id, from which the id of a call follows: another S-node may end the block."""
        self.kind, self.index, self.text = kind, index, ""
        self._head: dict[str, Any] = {"type": kind}
        if kind == "tool_use":
            # An id of nine digits, because the templates of Mistral take no other.
            digest = blake2b(f"{message} {index}".encode(), digest_size=8).hexdigest()[:9]
            self._head |= {"id": digest, "name": name}
        elif kind == "thinking":
            self._head["signature"] = ""

    @property
    def shown(self) -> dict[str, Any]:
        """The block as the message shows it."""
        text: Any = self.text
        if self.kind == "tool_use":
            text = self.text or "{}"
            try:
                orjson.loads(text)
            except orjson.JSONDecodeError:  # of a call that is cut off
                text = "{}"
            text = orjson.Fragment(text)  # orjson writes objects of up to 254 levels, and reads 1,024
        return self._head | {_TEXTS[self.kind][0]: text}


class AnthropicAnswer(ItemAnswer):
    """The answer of /v1/messages. Its items are content blocks."""

    id_prefix = "msg"
    object = "message"
    prompt_param = "messages"
    kinds = ("thinking", "text", "tool_use")

    def __init__(self, model: str, tokenizer: Tokenizer, *, parser: Callable[[], OutputParser]):
        super().__init__(model, tokenizer, parser=parser)
        self._blocks: list[_ContentBlock] = []
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def begin(self, usage: dict[str, Any]) -> list[Event]:
        return [{"type": "message_start", "message": self._body(usage)}]

    def deltas(self, index: int, piece: Piece) -> list[Event]:
        events = super().deltas(index, piece)
        if piece.finish_reason:
            self._stop = {"stop_reason": self._stop_reason(piece), "stop_sequence": piece.stop_string}
        return events

    def _stop_reason(self, piece: Piece) -> str:
        if piece.finish_reason == "length":
            return "max_tokens"
        if piece.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if any(block.kind == "tool_use" for block in self._blocks) else "end_turn"

    def _begin(self, kind: str, call: CallDelta | None = None) -> list[Event]:
        if self._blocks and self._blocks[-1].kind == kind and call is None:
            return []
        events = self._end_block()
        block = _ContentBlock(self.id, kind, len(self._blocks), call.name if call else None)
        self._blocks.append(block)
        return [*events, {"type": "content_block_start", "index": block.index, "content_block": block.shown}]

    def _end_block(self) -> list[Event]:
        return [{"type": "content_block_stop", "index": self._blocks[-1].index}] if self._blocks else []

    def _text(self, text: str) -> Event:
        block = self._blocks[-1]
        block.text += text
        _, kind, name = _TEXTS[block.kind]
        return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def end(self, usage: dict[str, Any], *, wanted: bool) -> list[Event]:
        ended = {"type": "message_delta", "delta": self._stop, "usage": _usage(usage)}
        return [*self._end_block(), ended, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> Event:
        return error.anthropic_body

    def _body(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": [block.shown for block in self._blocks],
            **self._stop,
            "usage": _usage(usage),
        }


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    """The token counts. `input_tokens` leaves out the tokens found in the prefix cache."""
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
