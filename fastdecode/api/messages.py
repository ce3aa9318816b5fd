"""The messages of a conversation, checked and made ready for a chat template."""

from __future__ import annotations

from typing import Any

from fastdecode.api.fields import Fields, decode_json, invalid, is_one_of, read_objects, read_texts
from fastdecode.text.chat_template import REASONING_FIELDS

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_NEUTRAL_MESSAGE = {
    "annotations": is_one_of([]),
    "audio": is_one_of(),
    "function_call": is_one_of(),
    "refusal": is_one_of(),
    "tool_calls": is_one_of([]),
}


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Check the value of `messages`. Every content becomes a string, and the arguments of tool calls become objects, as
    templates expect them. Raises ApiError (400)."""
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list of at least one message")
    return [_message(Fields(message, f"messages[{i}]")) for i, message in enumerate(messages)]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.string("role")
    if role not in _ROLES:
        raise invalid(fields.param("role"), f"must be one of {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = _calls(fields) if role == "assistant" else []
    reasoning = {name: text for name in REASONING_FIELDS if (text := fields.string(name)) is not None}
    if calls or (role == "assistant" and reasoning):
        message["content"] = _content(fields.take("content") or "", fields.param("content"))
    else:
        message["content"] = _content(fields.required("content"), fields.param("content"))
    if calls:
        message["tool_calls"] = calls
    message |= reasoning
    if role == "tool" and (call_id := fields.string("tool_call_id")) is not None:
        message["tool_call_id"] = call_id
    if (name := fields.string("name")) is not None:
        message["name"] = name
    fields.refuse_others(_NEUTRAL_MESSAGE)
    return message


def _calls(fields: Fields) -> list[dict[str, Any]]:
    calls = fields.take("tool_calls")
    if calls is None:
        return []
    return [_call(call) for call in read_objects(calls, fields.param("tool_calls"), "tool calls")]


def _call(fields: Fields) -> dict[str, Any]:
    call: dict[str, Any] = {"type": "function"}
    if (kind := fields.string("type")) not in (None, "function"):
        raise invalid(fields.param("type"), f"only functions are supported, not {kind!r}", code="unsupported_value")
    if (call_id := fields.string("id")) is not None:
        call["id"] = call_id
    fields.take("index")  # a client may send back the deltas of a stream
    function = fields.required_object("function")
    name = function.required_string("name")
    call["function"] = {"name": name, "arguments": _arguments(function.take("arguments"), function.param("arguments"))}
    function.refuse_others()
    fields.refuse_others()
    return call


def _arguments(value: Any, param: str) -> dict[str, Any]:
    if isinstance(value, str):
        value = decode_json(value.encode() or b"{}", param)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise invalid(param, "must be the text of a JSON object")
    return value


def _content(content: Any, param: str) -> str:
    """A message's text. The parts of a list of parts are joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(param, "must be a string or a list of text parts")
    return "\n".join(read_texts(content, param, "text"))
