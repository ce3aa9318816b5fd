"""Tool calls of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdecode.text.output import lark
from fastdecode.text.output.calls import CallEmitter, CallScanner
from fastdecode.text.output.deltas import MessageDelta, OutputParser, Tool, ToolForm, split_marker
from fastdecode.text.output.prose import Prose

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesForm(ToolForm):
    name = "hermes"
    markers = (OPEN, CLOSE)
    opening = OPEN

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> OutputParser:
        return _HermesParser(parallel)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, literal: Callable[[str], str], opened: bool = False
    ) -> str:
        first = "" if opened else literal(OPEN)
        more = f'("\\n" {literal(OPEN)} body)*' if parallel else ""
        return "\n".join(
            [
                f"calls: {first} body {more}",
                f'body: "\\n" call "\\n" {literal(CLOSE)}',
                *lark.rules(tools, lark.json_call("arguments")),
            ]
        )


class _HermesParser(OutputParser):
    def __init__(self, parallel: bool):
        self._prose = Prose(OPEN)
        self._emitter = CallEmitter(parallel)
        self._scanner: CallScanner | None = None  # of the call that is being read
        self._held = ""  # behind a complete call, before its closing tag

    def push(self, text: str) -> MessageDelta:
        delta = MessageDelta()
        while text:
            if self._scanner is None:
                content, text, opened = self._prose.push(text)
                delta.content += content
                if opened:
                    self._scanner = CallScanner()
            elif self._scanner.done:
                _, rest, closed = split_marker(self._held + text, CLOSE)
                self._held, text = ("", rest) if closed else (self._held + text, "")
                if closed:
                    self._scanner = None
            else:
                text = self._read(self._scanner, text, delta)
        return delta

    def _read(self, scanner: CallScanner, text: str, delta: MessageDelta) -> str:
        rest = scanner.push(text)
        if scanner.broken:
            delta.content += self._emitter.unread(scanner, OPEN)
            self._scanner = None
            return rest
        self._emitter.emit(scanner, delta)
        return rest

    def finish(self) -> MessageDelta:
        scanner = self._scanner
        if scanner is None:
            return MessageDelta(content=self._prose.finish())
        return MessageDelta(content=self._emitter.unread(scanner, OPEN))
