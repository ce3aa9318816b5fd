"""Reasoning that a model writes between <think> and </think> before its answer."""

from __future__ import annotations

from fastdecode.text.output.deltas import MessageDelta, OutputParser, rest_of, split_marker

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser(OutputParser):
    """Text up to </think> is reasoning, the rest goes to another parser.

    The message begins with reasoning if the prompt ended with <think> (`begun`), or if its own first word is <think>.
    """

    def __init__(self, inner: OutputParser, *, begun: bool):
        self._inner = inner
        self._state = "reasoning" if begun else "start"
        self._held = ""

    def push(self, text: str) -> MessageDelta:
        if self._state == "answer":
            return self._inner.push(text)
        text, self._held = self._held + text, ""
        if self._state == "start":
            stripped = text.lstrip()
            if not stripped or (OPEN.startswith(stripped) and stripped != OPEN):
                self._held = text
                return MessageDelta()
            if not stripped.startswith(OPEN):
                self._state = "answer"
                return self._inner.push(text)
            self._state, text = "reasoning", stripped[len(OPEN) :]
        if self._state == "reasoning":
            return self._reason(text)
        return self._answer(text)

    def _reason(self, text: str) -> MessageDelta:
        reasoning, rest, closed = split_marker(text, CLOSE)
        if not closed:
            self._held = rest
            return MessageDelta(reasoning=reasoning)
        self._state = "gap"
        return MessageDelta(reasoning=reasoning) + self._answer(rest)

    def _answer(self, text: str) -> MessageDelta:
        """The white space between </think> and the answer belongs to neither."""
        if not (text := text.lstrip()):
            return MessageDelta()
        self._state = "answer"
        return self._inner.push(text)

    def finish(self, *, cut: bool = False) -> MessageDelta:
        held, self._held = rest_of(self._held, cut), ""
        if self._state == "reasoning":
            return MessageDelta(reasoning=held) + self._inner.finish(cut=cut)
        return (self._inner.push(held) if held else MessageDelta()) + self._inner.finish(cut=cut)
