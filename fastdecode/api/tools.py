"""The fields about tools: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from fastdecode.api.fields import Fields, invalid, read_objects
from fastdecode.text.output.deltas import Tool

MAX_TOOLS = 256
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how the answer may use them.

    `tools` is empty for a request without tools or with tool_choice "none".
    """

    tools: tuple[Tool, ...] = ()
    definitions: list[dict[str, Any]] = field(default_factory=list)  # of `tools`, for the chat template
    must_call: bool = False  # tool_choice is "required" or names a function
    callable_tools: tuple[Tool, ...] = ()  # the tools that tool_choice allows
    parallel: bool = True


def read_tools(fields: Fields) -> ToolUse:
    """Read the fields about tools. Raises ApiError (400)."""
    parallel = fields.boolean("parallel_tool_calls", True)
    value, choice = fields.take("tools"), fields.take("tool_choice")
    entries = [] if value is None else read_objects(value, "tools", "tools")
    if len(entries) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS} tools")
    pairs = [_tool(entry) for entry in entries]
    tools = tuple(tool for tool, _ in pairs)
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise invalid("tools", f"two tools are called {twice}")
    if choice in (None, "auto", "none"):
        if choice == "none" or not tools:
            return ToolUse()
        return ToolUse(tools, [definition for _, definition in pairs], False, tools, parallel)
    if not tools:
        raise invalid("tool_choice", "there are no tools to choose from")
    chosen = tools
    if choice != "required":
        named = _named(choice)
        if named not in names:
            raise invalid("tool_choice", f"there is no tool {named!r}")
        chosen, parallel = (tools[names.index(named)],), False
    return ToolUse(tools, [definition for _, definition in pairs], True, chosen, parallel)


def _tool(fields: Fields) -> tuple[Tool, dict[str, Any]]:
    fields.require_type("function", kind="functions")
    function = fields.required_object("function")
    name = function.string("name")
    if name is None or not _NAME.fullmatch(name):
        raise invalid(function.param("name"), "must be a name of at most 128 letters, digits, _, . and -")
    definition: dict[str, Any] = {"name": name}
    if (description := function.string("description")) is not None:
        definition["description"] = description
    parameters = function.take("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(function.param("parameters"), "must be a JSON schema: an object")
    definition["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    strict = function.boolean("strict")
    function.refuse_others()
    fields.refuse_others()
    return Tool(name, parameters, strict, function.param("parameters")), {"type": "function", "function": definition}


def _named(choice: Any) -> str:
    """The function that a tool_choice names."""
    if not isinstance(choice, dict):
        raise invalid("tool_choice", 'must be "none", "auto", "required" or name a function')
    fields = Fields(choice, "tool_choice")
    fields.require_type("function", kind="functions")
    function = fields.required_object("function")
    name = function.required_string("name")
    function.refuse_others()
    fields.refuse_others()
    return name
