"""The tools of /v1/responses as a chat has them.

The functions of a namespace become functions whose names begin with it. Hosted tools, which OpenAI runs itself, are
refused or dropped.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from fastdecode.api.fields import Fields, invalid, is_boolean, is_object, is_one_of, read_objects
from fastdecode.api.origins import Origins
from fastdecode.text.log_once import log_once

log = logging.getLogger(__name__)

_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
_NEUTRAL = {"allowed_callers": is_one_of(["direct"]), "async": is_one_of(False), "defer_loading": is_one_of(False)}
#: Every function is loaded, and no output is checked.
_LEFT_OUT = {"defer_loading": is_boolean, "output_schema": is_object}


def is_hosted(kind: Any) -> bool:
    """Whether tools of this type run at OpenAI. Some types end in a date or in "_preview"."""
    return isinstance(kind, str) and kind.startswith(_HOSTED)


def drop_hosted_tool(param: str, kind: str, *, allowed: bool) -> None:
    """Drop a hosted tool, whose type is the request's field `param`. Raises ApiError (400) unless that is `allowed`."""
    if not allowed:
        message = f"only the vendor of {kind} runs such a tool; with --drop-hosted-tools, this server drops it"
        raise invalid(param, message, code="unsupported_value")
    log_once(log, f"a tool of type {kind} was dropped: only its vendor runs it")


def flat_name(namespace: str | None, name: Any) -> Any:
    """The name by which the model knows a function of a namespace."""
    return f"{namespace}.{name}" if namespace and isinstance(name, str) else name


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a request.

    Attributes:
        functions: the tools of the chat.
        shown: the tools that the answer repeats.
        namespaces: for each function of a namespace, by its name in the chat: the namespace, and its name there.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    shown: list[Any] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Any, origins: Origins, *, drop_hosted: bool) -> ResponseTools:
        """Read the value of `tools`, and add to `origins` those of the chat's tools. Raises ApiError (400)."""
        tools = cls()
        for entry, shown in zip(read_objects(given, "tools", "tools"), given, strict=True):
            kind = entry.required("type")
            if is_hosted(kind):
                drop_hosted_tool(entry.param("type"), kind, allowed=drop_hosted)
                continue
            tools.shown.append(shown)
            if kind == "namespace":
                tools._add_namespace(entry, origins)
            else:
                tools._add(entry, kind, origins)
        return tools

    def _add_namespace(self, fields: Fields, origins: Origins) -> None:
        namespace, description = fields.required_string("name"), fields.string("description")
        members = read_objects(fields.required("tools"), fields.param("tools"), "tools")
        for entry in members:
            self._add(entry, entry.required("type"), origins, namespace)
        if members and description:
            first = self.functions[-len(members)]["function"]
            first["description"] = "\n\n".join(filter(None, (description, first["description"])))
        fields.refuse_others()

    def _add(self, fields: Fields, kind: Any, origins: Origins, namespace: str | None = None) -> None:
        if kind != "function":
            raise invalid(fields.param("type"), f"only functions are supported, not {kind!r}", code="unsupported_value")
        function: dict[str, Any] = {name: fields.take(name) for name in ("parameters", "strict")}
        function["description"] = fields.string("description")
        name = fields.required_string("name")
        fields.refuse_others(_NEUTRAL, _LEFT_OUT)
        flat = flat_name(namespace, name)
        if namespace is not None:
            self.namespaces[flat] = namespace, name
        origins[f"tools[{len(self.functions)}].function"] = fields.prefix
        self.functions.append({"type": "function", "function": {"name": flat, **function}})

    def choice(self, given: Any) -> Any:
        """The tool_choice of the chat. Raises ApiError (400)."""
        if not isinstance(given, dict):
            return given
        fields = Fields(given, "tool_choice")
        name = flat_name(fields.string("namespace"), fields.string("name"))
        named = {"type": fields.required("type"), "function": {"name": name}}
        fields.refuse_others()
        return named
