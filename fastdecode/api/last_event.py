"""Last-Event-ID: the header by which a client goes on with a stream that it has lost (WHATWG HTML, section 9.2.4).

A request with an empty Last-Event-ID begins a stream whose events have ids. The same request with the id of the last
event that the client has had goes on behind that event (stored.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from fastdecode.api.continuation import FIELD
from fastdecode.api.errors import ApiError

HEADER = "Last-Event-ID"
_ID = re.compile(r"([A-Za-z0-9_-]{1,80}):([0-9]{1,15})")


def event_id(stream: str, number: int) -> bytes:
    """The id of an event: the id of the stream's answer, and the event's number."""
    return b"%b:%d" % (stream.encode(), number)


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The last event that the client of a request has had."""

    stream: str  # the id of the stream's answer; "": the request begins a stream
    number: int  # of the event; -1: it has had none
    digest: bytes  # of the request
    continues: bool  # a router continues the stream with this request

    @classmethod
    def read(cls, value: str, path: str, body: Any) -> LastEvent:
        """From the header of a request to a path, and the JSON of its body. Raises ApiError (400)."""
        stream, number = "", -1
        if value:
            if (match := _ID.fullmatch(value)) is None:
                message = f"{HEADER} {value[:100]!r} is no id of an event of this server"
                raise ApiError(400, message, code="invalid_last_event_id")
            stream, number = match[1], int(match[2])
        own = {name: field for name, field in body.items() if name != FIELD} if isinstance(body, dict) else body
        digest = blake2b(path.encode() + orjson.dumps(own, option=orjson.OPT_SORT_KEYS)).digest()
        return cls(stream, number, digest, isinstance(body, dict) and FIELD in body)
