"""Streams that another S-node can continue, if a router has kept their tokens (fastdecode/router).

A router that sends the header X-Fastdecode-Resumable gets marks in the stream, which are comments of the event stream:

    : fd {"id": ..., "created": ..., "seed": ...}   first: what the answer takes from elsewhere than the request
    : fd [12, 13]                                   the events before it show the text of these tokens, and all before
    : fd [14, "stop"]                               likewise; the engine has ended the choice
    : fd "leaving"                                  this S-node is about to end
    : fd "leaving tcp://..."                        likewise; there its successor gets the K and V of the stream

To continue the stream, the router sends the request to another S-node, with a field `fastdecode_resume` that has the
first mark's values and the tokens so far. That S-node feeds the tokens to the code that makes text of them, drops the
text, and computes the prompt with the tokens. Draws depend on the seed and the token's index alone, so the stream goes
on as it would have.

Only streams of one choice without log-probabilities are resumable, of completions and chats.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from fastdecode.api.errors import ApiError
from fastdecode.api.fields import invalid, is_integer
from fastdecode.engine.request import TokenEvent

if TYPE_CHECKING:
    from fastdecode.api.answers import Answer
    from fastdecode.api.protocol import Generation

#: The header by which a router asks for marks, and the field by which it continues a stream.
HEADER, FIELD = "X-Fastdecode-Resumable", "fastdecode_resume"
#: What a mark begins with.
MARK = b": fd "
LEAVING = "leaving"


def mark(value: Any) -> bytes:
    """A mark as an event of its own."""
    return MARK + orjson.dumps(value) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a stream is to be continued."""

    id: str
    created: int
    seed: int
    tokens: tuple[int, ...]
    finish_reason: str | None  # why the engine ended the choice with the last token; None: it did not
    take_from: str | None = None  # the URL at which an S-node that is about to end has the K and V

    @classmethod
    def taken_from(cls, body: Any) -> Resume | None:
        """Take FIELD out of the decoded body of a request; None if it is not there. Raises ApiError (400)."""
        if not isinstance(body, dict) or (fields := body.pop(FIELD, None)) is None:
            return None
        try:
            resume = cls(**(fields | {"tokens": tuple(fields["tokens"])}))
        except (TypeError, KeyError):
            raise invalid(FIELD, "must be an object with id, created, seed, tokens and finish_reason") from None
        numbers = (resume.created, resume.seed, *resume.tokens)
        good = all(is_integer(n) and 0 <= n < 2**63 for n in numbers) and isinstance(resume.id, str)
        good = good and isinstance(resume.take_from, str | None)
        if not good or resume.finish_reason not in (None, "stop", "length"):
            raise invalid(FIELD, "a value is not of the right type")
        return resume

    def events(self) -> list[TokenEvent]:
        """The tokens so far, as the engine gave them."""
        events = [TokenEvent(token) for token in self.tokens]
        if events:
            events[-1].finish_reason = self.finish_reason
        return events


def is_resumable(headers: Mapping[str, str], generation: Generation, n_prompts: int, answer: Answer) -> bool:
    """True if the stream that answers a request is to have marks."""
    sampling = generation.sampling
    scored = generation.logprobs or sampling.logprobs is not None or sampling.prompt_logprobs is not None
    one = n_prompts == generation.candidates == 1
    plain = not (scored or answer.named_events or generation.text.prompt_only)
    return HEADER in headers and generation.stream and one and plain


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
