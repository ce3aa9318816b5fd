"""The channels of gpt-oss (OpenAI's harmony format): `analysis` is reasoning, `final` is content, and a message to
functions.NAME is a tool call.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from fastdecode.text.output import lark
from fastdecode.text.output.calls import CallEmitter, CallScanner
from fastdecode.text.output.deltas import AllowedCalls, MessageDelta, OutputParser, Tool, ToolForm

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TOKEN = re.compile("|".join(map(re.escape, (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS))))
_LONGEST = max(map(len, (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)))
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyForm(ToolForm):
    name = "gpt-oss"
    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> OutputParser:
        return HarmonyParser(parallel)

    def grammar(self, calls: AllowedCalls, *, opened: bool = False) -> str:
        literal = calls.literal

        def call(name: str, arguments: str) -> str:
            header = lark.text(f"commentary to=functions.{name} ")
            return f'{literal(CHANNEL)} {header} {literal(CONSTRAIN)} "json" {literal(MESSAGE)} {arguments}'

        # The token <|call|> behind a call ends the generation.
        return "\n".join([f"calls: {_thought(literal)} call", *lark.rules(calls.tools, call)])

    def plain(self, literal: Callable[[str], str]) -> str | None:
        return f"plain: {final_channel(literal)} PLAIN\nPLAIN: /(.|\\n)*/"


def final_channel(literal: Callable[[str], str]) -> str:
    """The part of a rule that stands for the text before the answer of a message."""
    return f'{_thought(literal)} {literal(CHANNEL)} "final" {literal(MESSAGE)}'


def _thought(literal: Callable[[str], str]) -> str:
    thought = f'{literal(CHANNEL)} "analysis" {literal(MESSAGE)} /(.|\\n)*/ {literal(ENDS[0])}'
    return f'({thought} {literal(START)} "assistant")?'


class HarmonyParser(OutputParser):
    """The text begins behind `<|start|>assistant`, with which the prompt ends."""

    def __init__(self, parallel: bool = True):
        self._emitter = CallEmitter(parallel)
        self._held = ""  # text that may be the beginning of a token
        self._header: str | None = ""  # of the message that follows; None: in the body
        self._scanner: CallScanner | None = None  # of the call whose arguments are the body
        self._hidden = False  # the body is reasoning

    def push(self, text: str) -> MessageDelta:
        delta = MessageDelta()
        text, self._held = self._held + text, ""
        while text:
            found = _TOKEN.search(text)
            if found is None:
                cut = _safe_length(text)
                self._text(text[:cut], delta)
                self._held, text = text[cut:], ""
            else:
                self._text(text[: found.start()], delta)
                self._token(found[0])
                text = text[found.end() :]
        return delta

    def _token(self, token: str) -> None:
        if token == START or token in ENDS:
            self._header, self._scanner = "", None
        elif token == MESSAGE:
            header, self._header = self._header or "", None
            recipient = _RECIPIENT.search(header)
            self._scanner = CallScanner.for_arguments(recipient[1]) if recipient else None
            self._hidden = "analysis" in header and recipient is None
        elif self._header is not None:
            self._header += token

    def _text(self, text: str, delta: MessageDelta) -> None:
        if not text:
            return
        if self._header is not None:
            self._header += text
        elif self._scanner is not None:
            self._scanner.push_arguments(text)
            self._emitter.emit(self._scanner, delta)
        elif self._hidden:
            delta.reasoning += text
        else:
            delta.content += text

    def finish(self) -> MessageDelta:
        delta = MessageDelta()
        held, self._held = self._held, ""
        self._text(held, delta)
        if self._header and CHANNEL not in self._header and not self._emitter.n:
            # No channel was ever named: this is text of a model that does not know the format.
            delta.content += self._header
        return delta


def _safe_length(text: str) -> int:
    """How much of the text cannot be the beginning of a token."""
    tail = text[-_LONGEST:]
    start = tail.rfind("<")
    if start < 0 or not any(t.startswith(tail[start:]) for t in (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)):
        return len(text)
    return len(text) - len(tail) + start
