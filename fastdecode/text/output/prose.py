"""The text of a message outside its tool calls."""

from __future__ import annotations

from fastdecode.text.output.deltas import split_marker, split_space


class Prose:
    """Content up to the marker that begins a call. White space before and behind a call is not content."""

    def __init__(self, marker: str):
        self._marker = marker
        self._held = ""  # white space, or the beginning of a marker
        self._after_call = False

    def push(self, text: str) -> tuple[str, str, bool]:
        """Take more text. Returns (content, the text behind the marker, whether the marker came)."""
        before, behind, opened = split_marker(self._held + text, self._marker)
        content, space = split_space(before)
        if self._after_call:
            content = content.lstrip()
            space = space if content else ""
        self._after_call = opened or (self._after_call and not content)
        self._held = "" if opened else space + behind
        return content, behind if opened else "", opened

    def finish(self) -> str:
        """The content that `push` has held back, at the end of the message."""
        held, self._held = self._held, ""
        return held.lstrip() if self._after_call else held
