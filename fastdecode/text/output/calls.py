"""A tool call written as a JSON object, {"name": ..., "arguments": {...}}, read while it is being written."""

from __future__ import annotations

import json
from abc import abstractmethod

from fastdecode.text.output.deltas import CallDelta, MessageDelta, OutputParser, rest_of, split_marker

_ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """Reads one JSON object, character by character.

    Attributes:
        name: the value of "name", once it is complete.
        raw: the object's text so far.
        done: the object is complete.
        broken: the text is no object, or one without a name, so `raw` is plain text.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._read: list[str] = []  # the characters of `raw`
        self._depth = 0  # of braces and brackets
        self._in_string = False
        self._escaped = False
        self._key: str | None = None  # the key at depth 1 whose value is being read
        self._start = 0  # where the string or the value begins in `raw`
        self._in_value = False
        self._next = "key"  # what follows at depth 1: then "colon", "value", maybe "scalar", "end"
        self._arguments: list[str] = []  # parts of the arguments' text that `take` has not returned
        self._begun = False  # the value is not white space alone
        self._streams = False  # the value is an object, whose text is returned as it comes
        self._has_arguments = False

    @classmethod
    def for_arguments(cls, name: str) -> CallScanner:
        """A scanner that stands before the arguments of a call of `name`; behind them it has `ended`."""
        scanner = cls()
        scanner.push(f'{{"name": {json.dumps(name)}, "arguments": ')
        return scanner

    @property
    def raw(self) -> str:
        return self._since(0)

    @property
    def ended(self) -> bool:
        """Whether the arguments have ended: their own object is complete, or the text cannot become such an object."""
        return self.done or self.broken or self._next == "end"

    @property
    def is_call(self) -> bool:
        """Whether the name is known."""
        return bool(self.name)

    def take(self) -> str:
        """The text of the arguments that has come since the last call."""
        taken, self._arguments = self._arguments, []
        return "".join(taken)

    def cut(self) -> None:
        """The text ends here, within the object or behind it. A call without arguments has `{}`."""
        if self._in_value and self._key in _ARGUMENTS and not self._streams:
            self._add(_told(self._since(self._start).strip()))
        if not self._has_arguments:
            self._add("{}")

    def push(self, text: str) -> str:
        """Take more text; returns what is left of it behind the object, or once the object is broken."""
        for i, character in enumerate(text):
            if self.done or self.broken:
                return text[i:]
            self._read.append(character)
            self._advance(character)
        return ""

    def push_arguments(self, text: str) -> str:
        """Take more text as `push` does, but stop behind the arguments' object."""
        for i, character in enumerate(text):
            if self.ended:
                return text[i:]
            self.push(character)
        return ""

    def _advance(self, c: str) -> None:
        if self._depth == 0:
            if c == "{":
                self._depth = 1
            elif not c.isspace():
                self.broken = True
            return
        if self._in_string:
            self._string(c)
        elif self._depth == 1 and not c.isspace() and not self._fits(c):
            self.broken = True
        elif c == '"':
            if self._next == "key":
                self._start = len(self._read) - 1
            self._in_string = True
            self._value(c)
        elif c in "{[":
            self._depth += 1
            self._value(c)
        elif c in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self.done, self.broken = True, self.broken or not self.name
                self.cut()
            else:
                self._value(c)
                self._next = "end" if self._depth == 1 else self._next
        elif c == "," and self._depth == 1:
            self._end_value()
            self._next = "key"
        elif self._next == "colon":
            if c == ":":
                self._next, self._in_value, self._begun, self._start = "value", True, False, len(self._read)
        else:
            self._value(c)
            if self._depth == 1 and not c.isspace():
                self._next = "scalar"

    def _fits(self, c: str) -> bool:
        """Whether a JSON object may go on with this character at depth 1."""
        match self._next:
            case "key":
                return c in '"}'
            case "colon":
                return c == ":"
            case "value":
                return True
            case "scalar":
                return c not in '"{[:'
        return c in ",}"

    def _string(self, c: str) -> None:
        self._value(c)
        if self._escaped:
            self._escaped = False
        elif c == "\\":
            self._escaped = True
        elif c == '"':
            self._in_string = False
            if self._depth > 1:
                return
            if self._next == "key":
                self._key, self._next = self._decoded(self._since(self._start)), "colon"
                return
            self._next = "end"
            if self._key == "name" and self.name is None:
                self._take_name(self._since(self._start))

    def _value(self, c: str) -> None:
        """Take a character of a value at depth 1 or deeper."""
        if not self._in_value or self._key not in _ARGUMENTS:
            return
        if not self._begun:
            self._begun, self._streams = not c.isspace(), c == "{" and not self._has_arguments
        if self._streams:
            self._add(c)

    def _end_value(self) -> None:
        if not self._in_value:
            return
        value = self._since(self._start)[:-1].strip()
        if self._key == "name" and self.name is None:
            self._take_name(value)
        elif self._key in _ARGUMENTS and not self._has_arguments:
            self._add(_told(value))
        self._in_value, self._streams, self._key = False, False, None

    def _take_name(self, value: str) -> None:
        self.name = self._decoded(value)
        self.broken |= not self.name

    def _add(self, text: str) -> None:
        self._arguments.append(text)
        self._has_arguments |= bool(text)

    def _since(self, start: int) -> str:
        """The object's text from a character on."""
        return "".join(self._read[start:])

    def _decoded(self, text: str) -> str | None:
        """The string of a JSON string; None, and `broken`, for another value and for half a surrogate pair."""
        try:
            value = json.loads(text, strict=False)
            str(value).encode()
        except ValueError:
            value = None
        if not isinstance(value, str):
            self.broken = True
            return None
        return value


def _told(value: str) -> str:
    """The arguments that a value which is no object tells, though it may be cut off: the text that a string holds, ""
    for null. Half a surrogate pair at a cut is left out."""
    if not value.startswith('"'):
        return "" if "null".startswith(value) else value
    for end in (value, *(value[: len(value) - n] + '"' for n in range(7))):  # an escape has six characters at most
        try:
            text = str(json.loads(end, strict=False)).strip()
            text.encode()
        except ValueError:
            continue
        return "" if text == "null" else text
    return value


class CallEmitter:
    """Turns what scanners have read into the deltas of a message's calls."""

    def __init__(self, parallel: bool):
        """Without `parallel`, calls after the first one are dropped."""
        self.n = 0  # calls begun, without dropped ones
        self._parallel = parallel
        self._current: CallScanner | None = None  # whose name has been emitted

    def emit(self, scanner: CallScanner, delta: MessageDelta) -> None:
        """Add what is new of the call that `scanner` reads."""
        if not scanner.is_call or self.drops(scanner):
            return
        if self._current is not scanner:
            self._current = scanner
            self.n += 1
            delta.calls.append(CallDelta(self.n - 1, scanner.name))
        if arguments := scanner.take():
            delta.calls.append(CallDelta(self.n - 1, None, arguments))

    def finish(self, scanner: CallScanner, delta: MessageDelta) -> None:
        """Add the rest of the call that `scanner` reads; the text ends here."""
        scanner.cut()
        self.emit(scanner, delta)

    def break_off(self, scanner: CallScanner, lead: str, delta: MessageDelta) -> str:
        """The text that `scanner` has read is broken. Adds the call if its name was known before; returns the text that
        is content, which begins with `lead` if there is no call."""
        if not scanner.is_call:
            return lead + scanner.raw
        self.finish(scanner, delta)
        return scanner.raw[-1:]

    def drops(self, scanner: CallScanner) -> bool:
        """Whether this call comes after the only one allowed."""
        return not self._parallel and self.n > 0 and self._current is not scanner


class MarkedCallParser(OutputParser):
    """Reads text in which a marker begins each call, or each list of calls. White space before and behind a call is not
    content."""

    def __init__(self, opening: str, parallel: bool):
        """`opening` is the marker."""
        self._opening = opening
        self._emitter = CallEmitter(parallel)
        self._scanner: CallScanner | None = None  # of the call that is being read
        self._state = "prose"  # then "opened", behind the marker
        self._held = ""  # text that more text decides about
        self._lead = ""  # the marker and what stands behind it: content unless a call follows
        self._after_call = False

    def push(self, text: str) -> MessageDelta:
        delta = MessageDelta()
        while text:
            text = self._prose(text, delta) if self._state == "prose" else self._call(text, delta)
        return delta

    @abstractmethod
    def _call(self, text: str, delta: MessageDelta) -> str:
        """Take text behind the marker; returns what is left of it. Sets the state to "prose" behind the last call."""

    def _prose(self, text: str, delta: MessageDelta) -> str:
        """Take text up to the marker; returns what is behind it."""
        before, behind, opened = split_marker(self._held + text, self._opening)
        content = before.rstrip()
        space = before[len(content) :]
        if self._after_call:
            content = content.lstrip()
            space = space if content else ""
        self._after_call = opened or (self._after_call and not content)
        delta.content += content
        self._held = "" if opened else space + behind
        if not opened:
            return ""
        self._state, self._lead = "opened", space + self._opening
        return behind

    def _object(self, scanner: CallScanner, text: str, delta: MessageDelta) -> str:
        """Take text of a call's object; returns what is behind it. Text that is no such object is content."""
        rest = scanner.push(text)
        if scanner.broken:
            self._lead = self._emitter.break_off(scanner, self._lead, delta)
            self._not_a_call(delta)
        else:
            self._emit(scanner, delta)
        return rest

    def _emit(self, scanner: CallScanner, delta: MessageDelta) -> None:
        self._emitter.emit(scanner, delta)
        if scanner.is_call:
            self._lead = ""

    def _not_a_call(self, delta: MessageDelta) -> None:
        """What stands since the marker is content."""
        delta.content += self._lead
        self._lead, self._held, self._scanner, self._state = "", "", None, "prose"
        self._after_call = False

    def finish(self, *, cut: bool = False) -> MessageDelta:
        delta = MessageDelta()
        if self._state == "prose":
            delta.content = rest_of(self._held.lstrip() if self._after_call else self._held, cut)
        elif self._scanner is not None and self._scanner.is_call:
            self._emitter.finish(self._scanner, delta)
        else:
            delta.content = rest_of(self._lead + (self._scanner.raw if self._scanner else "") + self._held, cut)
        return delta
