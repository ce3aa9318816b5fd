"""Tool calls of Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or, of later models,
[TOOL_CALLS]name[ARGS]{...} once for each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdecode.text.output import lark
from fastdecode.text.output.calls import CallEmitter, CallScanner
from fastdecode.text.output.deltas import MessageDelta, OutputParser, Tool, ToolForm, split_marker
from fastdecode.text.output.prose import Prose

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralForm(ToolForm):
    name = "mistral"
    markers = (OPEN, ARGS, CALL_ID)
    opening = OPEN

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> OutputParser:
        return _MistralParser(parallel)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, literal: Callable[[str], str], opened: bool = False
    ) -> str:
        first = "" if opened else literal(OPEN)
        if literal(ARGS) == lark.text(ARGS):  # the tokenizer has no such token, so this is an earlier model
            more = '(", " call)*' if parallel else ""
            rules = lark.rules(tools, lark.json_call("arguments"))
            return "\n".join([f'calls: {first} "[" call {more} "]"', *rules])
        more = f"({literal(OPEN)} call)*" if parallel else ""
        rules = lark.rules(tools, lambda name, arguments: f"{lark.text(name)} {literal(ARGS)} {arguments}")
        return "\n".join([f"calls: {first} call {more}", *rules])


class _MistralParser(OutputParser):
    def __init__(self, parallel: bool):
        self._prose = Prose(OPEN)
        self._emitter = CallEmitter(parallel)
        self._state = "prose"  # then "form" behind the marker; then "list", or "name" and "arguments"
        self._held = ""
        self._scanner: CallScanner | None = None

    def push(self, text: str) -> MessageDelta:
        delta = MessageDelta()
        while text:
            match self._state:
                case "prose":
                    content, text, opened = self._prose.push(text)
                    delta.content += content
                    self._state = "form" if opened else "prose"
                case "form":
                    if text := text.lstrip():
                        self._state = "list" if text[0] in "[{" else "name"
                case "list":
                    text = self._list(text, delta)
                case "name":
                    name, text, found = split_marker(self._held + text, ARGS)
                    self._held = "" if found else name + text
                    if found:
                        name = name.partition(CALL_ID)[0].strip()
                        self._scanner, self._state = CallScanner.for_arguments(name), "arguments"
                        self._emitter.emit(self._scanner, delta)
                    else:
                        text = ""
                case "arguments":
                    text = self._arguments(text, delta)
        return delta

    def _list(self, text: str, delta: MessageDelta) -> str:
        if self._scanner is None:
            text = text.lstrip("[, \t\r\n")
            if text.startswith("{"):
                self._scanner = CallScanner()
            elif text:  # the list's end, or text that does not belong in a list
                self._state = "prose"
                return text.removeprefix("]")
            return text
        scanner = self._scanner
        rest = scanner.push(text)
        if scanner.broken:
            delta.content += self._emitter.unread(scanner, OPEN)
            self._scanner, self._state = None, "prose"
            return rest
        self._emitter.emit(scanner, delta)
        if scanner.done:
            self._scanner = None
        return rest

    def _arguments(self, text: str, delta: MessageDelta) -> str:
        scanner = self._scanner
        assert scanner is not None, "the name has made a scanner"
        rest = scanner.push_arguments(text)
        self._emitter.emit(scanner, delta)
        if scanner.ended:
            self._scanner, self._state = None, "prose"
        return rest

    def finish(self) -> MessageDelta:
        if self._state == "prose":
            return MessageDelta(content=self._prose.finish())
        scanner = self._scanner
        if scanner is None:
            return MessageDelta(content=OPEN + self._held if self._held else "")
        return MessageDelta(content=self._emitter.unread(scanner, OPEN))
