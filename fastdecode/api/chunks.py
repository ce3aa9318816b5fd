"""The events of a streamed answer as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from fastdecode.api.answers import Answer, usage
from fastdecode.api.generation import Choice, Piece
from fastdecode.api.protocol import Generation
from fastdecode.api.sse import event, named_event

#: Stands for the text in the event that a template is made from. JSON writes the NUL as an escape sequence, which the
#: rest of an event does not have.
_TEXT = "\0text"


class Chunks:
    """Makes the events of one stream.

    Most pieces are text and nothing else. Their events differ in the text alone, so they are made from a template,
    which is the event of a stand-in for the text.
    """

    def __init__(self, answer: Answer, generation: Generation, choices: Sequence[Choice]):
        self._answer, self._generation, self._choices = answer, generation, choices
        self._event = named_event if answer.named_events else event
        self._templates: dict[int, tuple[bytes, bytes]] = {}  # by the choice's index: what stands around the text

    def events(self, index: int, piece: Piece) -> bytes:
        """The events of a piece of a choice; b"" if there are none."""
        deltas = self._answer.deltas(index, piece)
        if not isinstance(deltas, str):
            return b"".join([self._event(self._chunk(delta)) for delta in deltas])
        if self._generation.continuous_usage:
            return event(self._chunk(self._answer.text_delta(index, deltas)))
        return orjson.dumps(deltas).join(self._template(index))

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands before and behind the JSON of the text, in the event of a piece of a choice that is text alone;
        None if such events may still differ in something else."""
        steady = self._answer.adds_text(index) and not self._generation.continuous_usage
        return self._template(index) if steady else None

    def _template(self, index: int) -> tuple[bytes, bytes]:
        if (template := self._templates.get(index)) is None:
            before, _, behind = event(self._chunk(self._answer.text_delta(index, _TEXT))).partition(orjson.dumps(_TEXT))
            template = self._templates[index] = before, behind
        return template

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        generation = self._generation
        so_far = usage(self._choices, generation.n) if generation.continuous_usage else None
        with_usage = generation.include_usage or generation.continuous_usage
        return self._answer.chunk(delta, so_far, with_usage=with_usage)
