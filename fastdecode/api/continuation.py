"""Streams that another S-node can continue, if a router has kept their tokens (fastdecode/router).

A router proves by the header X-Fastdecode-Router that it knows the S-node's secret, and gets marks in the stream, which
are comments of the event stream:

    : fd {"id": ..., "created": ..., "seed": ..., "key": ...}   first: what the answer takes from elsewhere than the
                                                    request, and the key of its K and V (engine/migration/adopter.py)
    : fd []                                         the events before it show that the answer has begun
    : fd [12, 13]                                   the events before it show the text of these tokens, and all before
    : fd [[1], 12, 13]                              likewise, of choice 1; without a number it is choice 0
    : fd [14, "stop"]                               likewise; the engine has ended the choice
    : fd "leaving"                                  this S-node is about to end

To continue the stream, the router sends the request to another S-node, with a field `fastdecode_resume` that has the
first mark's values and the tokens so far. That S-node feeds the tokens to the code that makes text of them, drops the
text, and adopts the K and V of the prompt and the tokens, or computes them. Draws depend on the seed and the token's
index alone, so the stream goes on as it would have.

Only streams of one prompt without log-probabilities are resumable.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import orjson

from fastdecode.api.errors import ApiError
from fastdecode.api.fields import invalid
from fastdecode.engine.state.request import TokenEvent

if TYPE_CHECKING:
    from fastdecode.api.answers import Answer
    from fastdecode.api.protocol import Generation

#: The header by which a router asks for marks, and the field by which it continues a stream.
HEADER, FIELD = "X-Fastdecode-Router", "fastdecode_resume"
_Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: What a mark begins with.
MARK = b": fd "
LEAVING = "leaving"


def router_proof(secret: bytes, body: bytes) -> str:
    """The value of HEADER beside a body: a MAC (HMAC-SHA256, RFC 2104) in hexadecimal digits."""
    return hmac.new(secret, b"fastdecode router\n" + hashlib.sha256(body).digest(), "sha256").hexdigest()


def is_from_router(secret: bytes | None, headers: Mapping[str, str], body: bytes) -> bool:
    """True if a router that knows the secret has sent this body."""
    given = headers.get(HEADER)
    return (
        secret is not None
        and given is not None
        and hmac.compare_digest(given.encode(errors="surrogateescape"), router_proof(secret, body).encode())
    )


def mark(value: Any) -> bytes:
    """A mark as an event of its own."""
    return MARK + orjson.dumps(value) + b"\n\n"


def token_mark(choice: int, tokens: Sequence[int | str]) -> bytes:
    """The mark behind the events that show the text of these tokens of a choice."""
    return mark([[choice], *tokens] if choice else list(tokens))


class Past(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a choice has had elsewhere."""

    tokens: tuple[_Number, ...]
    finish_reason: Literal["stop", "length"] | None  # why its last token was the last; None: it runs

    def events(self) -> list[TokenEvent]:
        """The tokens, as the engine gave them."""
        events = [TokenEvent(token) for token in self.tokens]
        if events:
            events[-1].finish_reason = self.finish_reason
        return events


@dataclass(slots=True)
class Progress:
    """How far a stream has come, by its marks: what a router keeps of it."""

    head: dict[str, Any] | None = None  # the first mark; None: the stream has no marks
    begun: bool = False  # the client has the events before the first token
    leaving: bool = False  # the S-node is about to end; the reader resets it
    n_tokens: int = 0  # of all choices
    _tokens: dict[int, list[int]] = field(default_factory=dict)  # by choice
    _order: list[list[int]] = field(default_factory=list)  # in which the tokens came: pairs of a choice and a number
    _finish_reasons: dict[int, str] = field(default_factory=dict)
    _key: str | None = None  # of the K and V of the last token

    def take(self, value: Any) -> None:
        """Record a mark."""
        match value:
            case dict():
                self.head = value
            case [[int(choice)], *tokens]:
                self._take_tokens(choice, tokens)
            case list():
                self._take_tokens(0, value)
            case "leaving":
                self.leaving = True

    def _take_tokens(self, choice: int, tokens: list[Any]) -> None:
        self.begun = True
        if not tokens:
            return
        if self.head is not None:
            self._key = self.head.get("key")  # an S-node that has sent none may not have adopted the K and V yet
        if isinstance(tokens[-1], str):
            self._finish_reasons[choice] = tokens.pop()
        self._tokens.setdefault(choice, []).extend(tokens)
        self.n_tokens += len(tokens)
        if self._order and self._order[-1][0] == choice:
            self._order[-1][1] += len(tokens)
        else:
            self._order.append([choice, len(tokens)])

    def resume(self) -> dict[str, Any]:
        """The value of FIELD with which another S-node continues the stream."""
        assert self.head is not None, "a stream without marks cannot be continued"
        numbers = range(1 + max(self._tokens, default=-1))
        choices = [[self._tokens.get(k, []), self._finish_reasons.get(k)] for k in numbers]
        resume = self.head | {"key": self._key, "begun": self.begun, "choices": choices}
        return resume | {"order": self._order} if len(choices) > 1 else resume


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a stream is to be continued."""

    id: str
    created: _Number
    seed: _Number
    begun: bool  # the client has the events before the first token
    choices: tuple[Past, ...]  # those without tokens may be missing at the end
    key: _Key | None = None  # of the stream's K and V
    order: tuple[tuple[_Number, _Number], ...] = ()  # of the tokens of several choices, as in `events`

    def events(self) -> Iterator[tuple[int, TokenEvent]]:
        """The tokens of all choices, each with its choice, in the order in which the client has had them: `order` has
        pairs of a choice and how many of its tokens come next. Raises LookupError for a choice that there is not."""
        left = [iter(choice.events()) for choice in self.choices]
        for choice, n in (*self.order, *((choice, None) for choice in range(len(left)))):
            for event in islice(left[choice], n):
                yield choice, event

    @classmethod
    def taken_from(cls, body: Any) -> Resume | None:
        """Take FIELD out of the decoded body of a request; None if it is not there. Raises ApiError (400)."""
        if not isinstance(body, dict) or (fields := body.pop(FIELD, None)) is None:
            return None
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise invalid(FIELD, str(error)) from None


def is_resumable(generation: Generation, n_prompts: int) -> bool:
    """True if a router can continue the stream that answers a request."""
    sampling = generation.sampling
    scored = generation.logprobs or sampling.logprobs is not None or sampling.prompt_logprobs is not None
    all_shown = n_prompts == 1 and generation.candidates == generation.n
    plain = not (scored or generation.text.prompt_only)
    return generation.stream and all_shown and plain


def resumable(generation: Generation, answer: Answer, resume: Resume | None) -> Generation:
    """`generation` with a seed; `answer` gets the id and the time of the one that is continued."""
    seed = generation.sampling.seed
    if resume is not None:
        answer.take_head(resume.id, resume.created)
        seed = resume.seed
    elif seed is None:
        seed = secrets.randbits(63)
    return replace(generation, sampling=replace(generation.sampling, seed=seed))


def not_resumable() -> ApiError:
    return invalid(FIELD, "this request cannot be continued")
