"""Tool calls of Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or, of later models,
[TOOL_CALLS]name[ARGS]{...} once for each call."""

from __future__ import annotations

from collections.abc import Sequence

from fastdecode.text.output import lark
from fastdecode.text.output.calls import CallScanner, MarkedCallParser
from fastdecode.text.output.deltas import AllowedCalls, MessageDelta, OutputParser, Tool, ToolForm, split_marker

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralForm(ToolForm):
    name = "mistral"
    markers = (OPEN, ARGS, CALL_ID)
    opening = OPEN

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> OutputParser:
        return _MistralParser(OPEN, parallel)

    def grammar(self, calls: AllowedCalls, *, opened: bool = False) -> str:
        first = "" if opened else calls.literal(OPEN)
        if calls.literal(ARGS) == lark.text(ARGS):  # the tokenizer has no such token, so this is an earlier model
            more = '(", " call)*' if calls.parallel else ""
            rules = lark.rules(calls.tools, lark.json_call("arguments"))
            return "\n".join([f'calls: {first} "[" call {more} "]"', *rules])
        more = f"({calls.literal(OPEN)} call)*" if calls.parallel else ""
        rules = lark.rules(calls.tools, lambda name, arguments: f"{lark.text(name)} {calls.literal(ARGS)} {arguments}")
        return "\n".join([f"calls: {first} call {more}", *rules])


class _MistralParser(MarkedCallParser):
    """Behind the marker, the state becomes "list", or "name" and then "arguments"."""

    def _call(self, text: str, delta: MessageDelta) -> str:
        match self._state:
            case "opened":
                if text := text.lstrip():
                    self._state = "list" if text[0] in "[{" else "name"
                return text
            case "list":
                return self._list(text, delta)
            case "name":
                return self._name(text, delta)
        return self._arguments(text, delta)

    def _list(self, text: str, delta: MessageDelta) -> str:
        if self._scanner is None:
            text = text.lstrip("[, \t\r\n")
            if text.startswith("{"):
                self._scanner = CallScanner()
            elif text:  # the list's end, or text that does not belong in a list
                self._state = "prose"
                return text.removeprefix("]")
            return text
        rest = self._object(self._scanner, text, delta)
        if self._scanner is not None and self._scanner.done:
            self._scanner = None
        return rest

    def _name(self, text: str, delta: MessageDelta) -> str:
        name, rest, found = split_marker(self._held + text, ARGS)
        if not found:
            self._held = name + rest
            return ""
        self._held, self._state = "", "arguments"
        self._scanner = CallScanner.for_arguments(name.partition(CALL_ID)[0].strip())
        self._emitter.emit(self._scanner, delta)
        return rest

    def _arguments(self, text: str, delta: MessageDelta) -> str:
        scanner = self._scanner
        assert scanner is not None, "the name has made a scanner"
        rest = scanner.push_arguments(text)
        self._emitter.emit(scanner, delta)
        if scanner.ended:
            self._scanner, self._state = None, "prose"
        return rest
