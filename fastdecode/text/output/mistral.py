"""Tool calls of Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or, of later models,
[TOOL_CALLS]name[ARGS]{...} once for each call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastdecode.text.output import lark
from fastdecode.text.output.calls import CallScanner, MarkedCallParser
from fastdecode.text.output.deltas import AllowedCalls, MessageDelta, OutputParser, Tool, ToolForm, split_marker

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.-]+")
_NOTHING = re.compile(rf"null(?!\w)|(?={re.escape(OPEN)})")  # in place of arguments


class MistralForm(ToolForm):
    name = "mistral"
    markers = (OPEN, ARGS, CALL_ID)
    opening = OPEN

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> OutputParser:
        return _MistralParser({tool.name for tool in tools}, parallel)

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

    def __init__(self, names: set[str], parallel: bool):
        """`names` are those of the tools."""
        super().__init__(OPEN, parallel)
        self._names = names
        self._name = ""  # of the call whose arguments follow

    def _call(self, text: str, delta: MessageDelta) -> str:
        match self._state:
            case "opened":
                behind = text.lstrip()
                self._lead += text[: len(text) - len(behind)]
                if behind:
                    self._state = "list" if behind[0] in "[{" else "name"
                return behind
            case "list":
                return self._list(text, delta)
            case "name":
                return self._named(self._held + text, delta)
        return self._arguments(self._held + text, delta)

    def _list(self, text: str, delta: MessageDelta) -> str:
        if self._scanner is None:
            behind = text.lstrip("[, \t\r\n")
            if self._lead:
                self._lead += text[: len(text) - len(behind)]
            if behind.startswith("{"):
                self._scanner = CallScanner()
            elif behind.startswith("]") and not self._lead:
                self._state = "prose"
                return behind[1:]
            elif behind:  # text that does not belong in a list, or the end of a list without a call
                self._not_a_call(delta)
            return behind
        rest = self._object(self._scanner, text, delta)
        if self._scanner is not None and self._scanner.done:
            self._scanner = None
        return rest

    def _named(self, text: str, delta: MessageDelta) -> str:
        before, behind, found = split_marker(text, ARGS)
        name = before.partition(CALL_ID)[0].strip()
        if found and _NAME.fullmatch(name):
            self._held, self._state, self._name = "", "arguments", name
            self._lead += before + ARGS
            return behind
        name, _, more = text.partition(OPEN)
        if more and name.strip() in self._names:  # the next call follows
            self._without_arguments(name.strip(), delta)
            return OPEN + more
        if found or more or "\n" in text or "{" in text:
            self._not_a_call(delta)
            return text
        self._held = text
        return ""

    def _arguments(self, text: str, delta: MessageDelta) -> str:
        if self._scanner is None:
            self._held, behind = "", text.lstrip()
            if "null".startswith(behind) or (OPEN.startswith(behind) and behind != OPEN):
                self._held = text
                return ""
            if nothing := _NOTHING.match(behind):
                self._without_arguments(self._name, delta)
                return behind[nothing.end() :]
            if not behind.startswith("{"):
                self._not_a_call(delta)
                return text
            self._scanner, text = CallScanner.for_arguments(self._name), behind
        rest = self._scanner.push_arguments(text)
        self._emit(self._scanner, delta)
        if self._scanner.ended:
            self._scanner, self._state = None, "prose"
        return rest

    def _without_arguments(self, name: str, delta: MessageDelta) -> None:
        self._emitter.finish(CallScanner.for_arguments(name), delta)
        self._lead, self._held, self._state = "", "", "prose"

    def finish(self, *, cut: bool = False) -> MessageDelta:
        delta, held = MessageDelta(), self._held.strip()
        if self._state == "name" and held in self._names:
            self._without_arguments(held, delta)
        elif self._state == "arguments" and self._scanner is None and "null".startswith(held):
            self._without_arguments(self._name, delta)
        else:
            delta = super().finish(cut=cut)
        return delta
