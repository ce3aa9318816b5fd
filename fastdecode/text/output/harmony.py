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
from fastdecode.text.output.deltas import AllowedCalls, MessageDelta, OutputParser, Tool, ToolForm, rest_of

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_TOKEN = re.compile("|".join(map(re.escape, (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS))))
_LONGEST = max(map(len, (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)))
#: A header as it should be, or its beginning. Anything else is text of the model. Clients can write headers, too (in a
#: message that is continued), so the pattern gives nothing back once it has matched: its time is linear.
_HEADER = re.compile(
    r"\s*+\w*?(\s*+to=[\w.:-]*+)?\s*+"
    r"(<\|channel\|>(\s*+(?!to=)\w++)?+(\s++to=[\w.:-]*+)?+\s*+(<\|constrain\|>)?+\s*+[\w/+.-]*+\s*+)?"
)
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
        self._has_role = False  # the header begins with a role
        self._name: str | None = None  # of the function whose arguments are the body
        self._body = ""  # of a call, before its arguments have begun
        self._scanner: CallScanner | None = None  # of the call whose arguments have begun
        self._behind_call = False  # the body has text behind its arguments
        self._hidden = False  # the body is reasoning

    def push(self, text: str) -> MessageDelta:
        delta = MessageDelta()
        text, end = self._held + text, 0
        for found in _TOKEN.finditer(text):
            self._text(text[end : found.start()], delta)
            self._token(found[0], delta)
            end = found.end()
        cut = end + _safe_length(text[end:])
        self._text(text[end:cut], delta)
        self._held = text[cut:]
        return delta

    def _token(self, token: str, delta: MessageDelta) -> None:
        if token == START or token in ENDS:
            self._end_message(delta)
            self._header, self._has_role = "", token == START
        elif token == MESSAGE:
            header, self._header = self._header or "", None
            if not _HEADER.fullmatch(header):
                delta.content += header
            recipient = _RECIPIENT.search(header)
            self._name, self._body, self._scanner = recipient and recipient[1], "", None
            self._hidden, self._behind_call = "analysis" in header and recipient is None, False
        elif self._header is not None:
            self._header += token

    def _end_message(self, delta: MessageDelta) -> None:
        if self._scanner is not None:
            self._emitter.finish(self._scanner, delta)
        elif self._name is not None and "null".startswith(self._body.strip()):
            self._emitter.finish(CallScanner.for_arguments(self._name), delta)
        elif self._name is not None:
            delta.content += self._body
        elif self._header and not _HEADER.fullmatch(self._header):
            delta.content += self._header
        self._name, self._scanner, self._hidden = None, None, False

    def _text(self, text: str, delta: MessageDelta) -> None:
        if not text:
            return
        if self._header is not None:
            text = self._header + text
            begin = "" if self._has_role or CHANNEL in text else text.lstrip()[:3]
            if "to=".startswith(begin):
                self._header = text
                return
            # No header begins like this: it is text of a model that does not know the format.
            self._header = None
        if self._name is not None:
            self._arguments(self._name, text, delta)
        elif self._hidden:
            delta.reasoning += text
        else:
            delta.content += text

    def _arguments(self, name: str, text: str, delta: MessageDelta) -> None:
        """Take text of a call's body. Text that is no JSON object is content."""
        if self._scanner is None:
            self._body += text
            if not (text := self._body.lstrip()).startswith("{"):
                return
            self._scanner = CallScanner.for_arguments(name)
        rest = self._scanner.push_arguments(text)
        self._emitter.emit(self._scanner, delta)
        rest = rest if self._behind_call else rest.lstrip()
        self._behind_call |= bool(rest)
        delta.content += rest

    def finish(self, *, cut: bool = False) -> MessageDelta:
        delta = MessageDelta()
        held, self._held = rest_of(self._held, cut), ""
        self._text(held, delta)
        if self._header and CHANNEL not in self._header and not self._has_role:
            delta.content += self._header
        else:
            self._end_message(delta)
        return delta


def _safe_length(text: str) -> int:
    """How much of the text cannot be the beginning of a token."""
    tail = text[-_LONGEST:]
    start = tail.rfind("<")
    if start < 0 or not any(t.startswith(tail[start:]) for t in (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)):
        return len(text)
    return len(text) - len(tail) + start
