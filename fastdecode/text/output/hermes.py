"""Tool calls of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""

from __future__ import annotations

from collections.abc import Sequence

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
