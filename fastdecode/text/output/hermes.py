"""Tool calls of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.text.output import lark
from fastdecode.text.output.calls import CallScanner, MarkedCallParser
from fastdecode.text.output.deltas import AllowedCalls, MessageDelta, OutputParser, Tool, ToolForm, split_marker

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
    def _prose(self, text: str, delta: MessageDelta) -> str:
        rest = super()._prose(text, delta)
        if self._state == "opened":
            self._scanner = CallScanner()
        return rest

    def _call(self, text: str, delta: MessageDelta) -> str:
        assert self._scanner is not None, "the marker has made a scanner"
        if not self._scanner.done:
            return self._object(self._scanner, text, delta)
        before, rest, closed = split_marker(self._held + text, CLOSE)
        if not closed:
            self._held = before + rest
            return ""
        self._held, self._scanner, self._state = "", None, "prose"
        return rest
