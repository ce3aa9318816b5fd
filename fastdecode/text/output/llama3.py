"""Tool calls of Llama 3: the message is a JSON object, {"name": ..., "parameters": {...}}, maybe behind <|python_tag|>;
several are separated by semicolons."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdecode.text.output import lark
from fastdecode.text.output.calls import CallEmitter, CallScanner
from fastdecode.text.output.deltas import AllowedCalls, MessageDelta, OutputParser, Tool, ToolForm, rest_of

TAG = "<|python_tag|>"


class Llama3Form(ToolForm):
    name = "llama3"
    markers = (TAG,)

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> OutputParser:
        return _Llama3Parser({tool.name for tool in tools}, parallel)

    def grammar(self, calls: AllowedCalls, *, opened: bool = False) -> str:
        more = '("; " call)*' if calls.parallel else ""
        return "\n".join([f"calls: call {more}", *lark.rules(calls.tools, lark.json_call("parameters"))])

    def plain(self, literal: Callable[[str], str]) -> str | None:
        return "plain: PLAIN\nPLAIN: /[^{](.|\\n)*/"


class _Llama3Parser(OutputParser):
    def __init__(self, names: set[str], parallel: bool):
        self._names = names
        self._emitter = CallEmitter(parallel)
        self._scanner: CallScanner | None = None
        self._held = ""  # before an object: white space, separators, the tag
        self._lead = ""  # what stood before the object: content unless it is a call
        self._is_text = False  # the message is no call, or has gone on as text

    def push(self, text: str) -> MessageDelta:
        delta = MessageDelta()
        while text:
            if self._is_text:
                delta.content += text
                break
            if self._scanner is None:
                text = self._before(self._held + text, delta)
            else:
                text = self._read(self._scanner, text, delta)
        return delta

    def _before(self, text: str, delta: MessageDelta) -> str:
        """Look for the first object, or the next one."""
        self._held = ""
        stripped = text.lstrip("; \t\r\n" if self._emitter.n else None)
        if not stripped or (TAG.startswith(stripped) and stripped != TAG):
            self._held = text
            return ""
        behind = stripped.removeprefix(TAG).lstrip()
        if not behind:
            self._held = text
            return ""
        shown = stripped if self._emitter.n else text
        if behind.startswith("{"):
            self._scanner, self._lead = CallScanner(), shown[: len(shown) - len(behind)]
            return behind
        self._is_text = True
        return shown

    def _read(self, scanner: CallScanner, text: str, delta: MessageDelta) -> str:
        rest = scanner.push(text)
        unknown = scanner.is_call and scanner.name not in self._names
        if unknown or scanner.broken:
            self._is_text, self._scanner = True, None
            text = self._lead + scanner.raw if unknown else self._emitter.break_off(scanner, self._lead, delta)
            return text + rest
        self._emitter.emit(scanner, delta)
        if scanner.done:
            self._scanner = None
        return rest

    def finish(self, *, cut: bool = False) -> MessageDelta:
        delta, scanner = MessageDelta(), self._scanner
        if scanner is None:
            delta.content = rest_of(self._held.strip("; \t\r\n") if self._emitter.n else self._held, cut)
        elif scanner.is_call:
            self._emitter.finish(scanner, delta)
        elif not (cut and self._lead.strip()):  # without a tag before it, an object may be an answer
            delta.content = self._lead + scanner.raw
        return delta
