"""MessageDelta, by which a piece of text extends a message, and the interface of the parsers that make deltas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class CallDelta:
    """More of a tool call. The first delta of a call has its name, all others have None."""

    index: int  # of the call within the message
    name: str | None = None
    arguments: str = ""  # more of the JSON text of its arguments


@dataclass(slots=True)
class MessageDelta:
    """The content, reasoning and calls by which a piece of text extends a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __add__(self, other: MessageDelta) -> MessageDelta:
        return MessageDelta(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)


class OutputParser(ABC):
    """Parses one message as it is written. However the text is cut into pieces, the deltas add up to the same."""

    @abstractmethod
    def push(self, text: str) -> MessageDelta:
        """Take more text."""

    @abstractmethod
    def finish(self, *, cut: bool = False) -> MessageDelta:
        """The end of the text. Text that was held back is content unless it is a part of a call. If the text was `cut`
        off, the beginning of a marker is taken for a part of a call."""


class PlainParser(OutputParser):
    """All text is content."""

    def push(self, text: str) -> MessageDelta:
        return MessageDelta(content=text)

    def finish(self, *, cut: bool = False) -> MessageDelta:
        return MessageDelta()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema; None: an object of any kind."""

    name: str
    parameters: Mapping[str, Any] | bool | None = None
    strict: bool = False  # every keyword of the schema must be followed
    param: str = "tools"  # the request's field that has the parameters


@dataclass(frozen=True, slots=True)
class AllowedCalls:
    """What a grammar of calls is made from."""

    tools: Sequence[Tool]
    parallel: bool  # there may be several calls
    literal: Callable[[str], str]  # an added token or a text as it stands in a grammar


class ToolForm(ABC):
    """How a family of models writes tool calls."""

    name: str
    #: Special tokens of the tokenizer that the parser has to see in the text.
    markers: tuple[str, ...] = ()
    #: A call begins with this token; None: the form has no such token.
    opening: str | None = None

    @abstractmethod
    def parser(self, tools: Sequence[Tool], *, parallel: bool) -> OutputParser:
        """A parser for one message. Without `parallel`, calls after the first one are dropped."""

    @abstractmethod
    def grammar(self, calls: AllowedCalls, *, opened: bool = False) -> str:
        """The rule `calls` and those it needs, in llguidance's dialect of Lark: at least one call. With `opened`, the
        grammar begins behind the `opening` of the first call."""

    def plain(self, literal: Callable[[str], str]) -> str | None:
        """The rule `plain`: a message without a call; None if this form tells calls by their `opening` alone."""
        return None

    def shown(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """The messages and the definitions of tools as the chat template gets them."""
        return messages, tools


def rest_of(held: str, cut: bool) -> str:
    """Returns what to show of `held`, the text that a parser holds back when the answer ends. If max_tokens has `cut`
    the answer off, only white space is shown, because other text may be part of a marker."""
    return "" if cut and held.strip() else held


def split_marker(text: str, marker: str) -> tuple[str, str, bool]:
    """(the text before `marker`, the text behind it, True) if the marker is there; else (text, held, False), where
    `held` is the end of the text that could be the beginning of the marker."""
    before, found, behind = text.partition(marker)
    if found:
        return before, behind, True
    held = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)
    return text[: len(text) - held], text[len(text) - held :], False
