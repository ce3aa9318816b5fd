"""One request's state, from submit to its last token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastdecode.engine.request import EngineError, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from fastdecode.engine.cluster import RNodeLedger
    from fastdecode.engine.prefixes import PrefixEntry
    from fastdecode.spart.penalties import LogitRules


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and, while it runs, its place in the cluster. Compared and hashed by identity.

    The last token of `tokens` is never cached before the step that follows it, so a sequence that decodes has
    `cached == len(tokens) - 1`, and one that ends has asked for at most `pages_for(len(tokens) - 1)` pages.
    """

    request_id: str
    order: int  # number of arrival: the scheduler's only priority, the lowest goes first
    tokens: list[int]  # prompt, then what was generated
    n_prompt: int
    max_new: int  # tokens it may generate: its max_tokens, cut to what context and cache hold
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int]
    hashes: list[int] = field(default_factory=list)  # of the prompt's pages (prefixes.py); empty where nothing is kept
    rules: LogitRules | None = None  # None where the parameters have neither bias nor penalty

    # Placement: filled by the cluster in `admit`, taken back in `release`.
    node: RNodeLedger | None = None
    index: int = 0  # sequence index within the node's lease
    tag: int = 0  # generation of that index
    pages: int = 0  # pages counted for it on the node
    entry: PrefixEntry | None = None  # its own in the node's book of prefixes
    source: PrefixEntry | None = None  # whose first `shared` tokens it has taken over, and so need not compute
    shared: int = 0

    # Progress: kept by the scheduler.
    mini_batch: int | None = None  # None: waiting or ended
    in_flight: bool = False  # its rows are in a step that has not been completed, or it is being forked
    cancelled: bool = False  # to be released as soon as it is not in flight
    cached: int = 0  # tokens cached on the node
    prefill_end: int = 0  # tokens to prefill before it decodes: all that were known when it was placed

    # Output and timing: kept by the engine.
    output: asyncio.Queue[TokenEvent | EngineError | None] = field(default_factory=asyncio.Queue)
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None  # first scheduled
    last_token: float | None = None
    reused: int = 0  # prompt tokens that were found in the cache when it was first placed

    @property
    def prefilling(self) -> bool:
        return self.cached < self.prefill_end

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def final_length(self) -> int:
        """Tokens it will have if nothing ends it sooner."""
        return self.n_prompt + self.max_new

    def append(self, token: int) -> None:
        """Take a token that was generated."""
        self.tokens.append(token)
        if self.rules is not None:
            self.rules.generated(token)

    def finish_reason(self) -> str | None:
        """Whether the token just appended was the last, and why."""
        if self.tokens[-1] in self.end_tokens:
            return "stop"
        return "length" if self.n_generated >= self.max_new else None
