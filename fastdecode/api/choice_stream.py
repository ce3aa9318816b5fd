"""The pieces of a request's choices as the events of a stream."""

from __future__ import annotations

from typing import Any

import orjson

from fastdecode.api.answers import Answer, usage
from fastdecode.api.continuation import token_mark
from fastdecode.api.delivery import Lane
from fastdecode.api.generation import Piece, Run
from fastdecode.api.protocol import Generation
from fastdecode.api.sse import Events, event
from fastdecode.text.detokenizer import ByteDetokenizer

#: Stands for the text in the event that a template is made from. JSON writes the NUL as an escape sequence, which the
#: rest of an event does not have.
_TEXT = "\0text"


class ChoiceStream:
    """Writes the pieces of a run's choices to a stream, and opens a lane to each choice that can take one.

    Most pieces are text and nothing else. Their events differ in the text alone, so they are made from a template,
    which is the event of a stand-in for the text.
    """

    def __init__(self, events: Events, answer: Answer, generation: Generation, run: Run, token_texts: dict[int, bytes]):
        """`token_texts`: see Lane."""
        self._events, self._answer, self._generation, self._run = events, answer, generation, run
        self._token_texts = token_texts
        self._templates: dict[int, tuple[bytes, bytes]] = {}  # by the choice's index: what stands around the text
        self._without_lane: dict[int, ByteDetokenizer] = {}
        if run.stream_key is None:  # else each event is followed by its token
            self._without_lane = {choice.index: direct for choice in run.choices if (direct := choice.direct)}

    async def write_all(self, keep_alive_seconds: float) -> None:
        """Write all pieces to come, and a comment after each `keep_alive_seconds` without one."""
        events, run = self._events, self._run
        run.offer_to(self._offer)
        while (ready := await run.pieces(keep_alive_seconds - events.quiet_seconds)) is not None:
            for index, pieces in ready.items():
                for piece in pieces:
                    self.write(index, piece)
            if events.quiet_seconds >= keep_alive_seconds:
                events.keep_alive()
            await events.drain()

    def _offer(self, index: int, piece: Piece) -> bool:
        """Write a piece at once, unless the client leaves too much unread: then this returns False."""
        if self._events.full:
            return False
        self.write(index, piece)
        # If its events differ in the text alone from now on, a choice gets a lane.
        steady = index in self._without_lane and not self._generation.continuous_usage
        if steady and self._answer.adds_text(index):
            around, detokenizer = self._template(index), self._without_lane.pop(index)
            lane = Lane(self._events, around, detokenizer, self._token_texts, lambda: self._run.is_read)
            self._run.open_lane(index, lane)
        return True

    def write(self, index: int, piece: Piece) -> None:
        """Write the events of a piece of a choice, and the mark behind them."""
        events = self._events_of(index, piece)
        self._events.write(events + token_mark(index, piece.tokens) if piece.tokens else events)

    def _events_of(self, index: int, piece: Piece) -> bytes:
        """The events of a piece of a choice; b"" if there are none."""
        deltas = self._answer.deltas(index, piece)
        if not isinstance(deltas, str):
            return b"".join([self._events.encode(self._chunk(delta)) for delta in deltas])
        if self._generation.continuous_usage:
            return event(self._chunk(self._answer.text_delta(index, deltas)))
        return orjson.dumps(deltas).join(self._template(index))

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the JSON of the text, in the event of a piece that is text alone."""
        if (template := self._templates.get(index)) is None:
            before, _, behind = event(self._chunk(self._answer.text_delta(index, _TEXT))).partition(orjson.dumps(_TEXT))
            template = self._templates[index] = before, behind
        return template

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        generation = self._generation
        so_far = usage(self._run.choices, generation.n) if generation.continuous_usage else None
        with_usage = generation.include_usage or generation.continuous_usage
        return self._answer.chunk(delta, so_far, with_usage=with_usage)
