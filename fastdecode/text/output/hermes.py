"""Tool calls of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them.

A chat template without tools gets them by a system message, with calls of this form (GenericForm)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastdecode.text.output import lark
from fastdecode.text.output.calls import CallScanner, MarkedCallParser
from fastdecode.text.output.deltas import AllowedCalls, MessageDelta, OutputParser, Tool, ToolForm

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesForm(ToolForm):
    name = "hermes"
    markers = (OPEN, CLOSE)
    opening = OPEN

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> OutputParser:
        return _HermesParser(OPEN, parallel)

    def grammar(self, calls: AllowedCalls, *, opened: bool = False) -> str:
        first = "" if opened else calls.literal(OPEN)
        more = f'("\\n" {calls.literal(OPEN)} body)*' if calls.parallel else ""
        return "\n".join(
            [
                f"calls: {first} body {more}",
                f'body: "\\n" call "\\n" {calls.literal(CLOSE)}',
                *lark.rules(calls.tools, lark.json_call("arguments")),
            ]
        )


class _HermesParser(MarkedCallParser):
    def _call(self, text: str, delta: MessageDelta) -> str:
        if self._scanner is None:
            self._scanner = CallScanner()
        if not self._scanner.done:
            return self._object(self._scanner, text, delta)
        behind = (self._held + text).lstrip()
        if CLOSE.startswith(behind) and behind != CLOSE:
            self._held = behind
            return ""
        self._held, self._scanner, self._state = "", None, "prose"
        return behind.removeprefix(CLOSE)


_INSTRUCTIONS = f"""You may call functions to help with the user's request. These are the functions, as JSON:
%s
For each call, write a JSON object with the function's name and its arguments between {OPEN} and {CLOSE}:
{OPEN}
{{"name": "NAME", "arguments": {{}}}}
{CLOSE}
The result follows between <tool_response> and </tool_response>. Without a need to call a function, answer as usual."""


class GenericForm(HermesForm):
    name = "generic"

    def shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Calls and results become text, and turns of the same role one message, because many templates want users and
        assistants to take turns."""
        shown: list[dict[str, Any]] = []
        if not tools and not any(message["role"] == "tool" or "tool_calls" in message for message in messages):
            return messages, tools
        if tools:
            functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
            shown.append({"role": "system", "content": _INSTRUCTIONS % functions})
        for message in messages:
            role, content = message["role"], message.get("content") or ""
            calls = [_call(call) for call in message.get("tool_calls") or ()]
            if role == "tool":
                role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            text = "\n".join(filter(None, (content, *calls)))
            if shown and shown[-1]["role"] == role:
                shown[-1]["content"] += "\n\n" + text
            else:
                kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
                shown.append({**kept, "role": role, "content": text})
        return shown, []


def _call(call: Mapping[str, Any]) -> str:
    function = {name: call["function"][name] for name in ("name", "arguments")}
    return f"{OPEN}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE}"
