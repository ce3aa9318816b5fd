"""What the API hands to the engine and gets back from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from fastdecode.spart.step.batch import TokenScore as TokenScore  # the API imports it from here


class EngineError(Exception):
    """Base of the engine's errors. The message is a sentence for the client; each error names its HTTP status."""


class InvalidPrompt(EngineError):
    """The prompt is empty or holds a token id outside the vocabulary (400)."""


class PromptTooLong(InvalidPrompt):
    """The prompt and one generated token do not fit the model's context or the KV-cache (400)."""


def check_length(n_tokens: int, max_model_len: int) -> None:
    """Raise PromptTooLong if a prompt of `n_tokens` and one generated token do not fit the context."""
    if n_tokens + 1 > max_model_len:
        raise PromptTooLong(f"the prompt has {n_tokens} tokens; the context is {max_model_len}, output included")


class InvalidParameter(EngineError):
    """A sampling parameter does not fit the model; `name` is its name in the API (400)."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}: {message}")
        self.name = name


class InvalidGrammar(EngineError):
    """The grammar is not valid, or this server can follow none if `unavailable` is true (400)."""

    def __init__(self, message: str, unavailable: bool = False):
        super().__init__(message)
        self.unavailable = unavailable


class Overloaded(EngineError):
    """The queue is full (429). `retry_after` is the number of seconds in which it should have emptied."""

    def __init__(self, message: str, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class NotReady(EngineError):
    """No R-node is connected, or the S-node is starting, draining or broken (503)."""


class NothingAllowed(EngineError):
    """The grammar and the lists of tokens of a running request allow no next token (400)."""


class GenerationFailed(EngineError):
    """A request that was running cannot be finished, for example because its R-node was lost (500)."""


class GrammarState(Protocol):
    """The position of a text in its grammar."""

    def advance(self, token: int) -> None:
        """Take the next token of the text."""
        ...

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Clear the bits of tokens that may not come next; bit i % 32 of row[i // 32] is token i."""
        ...

    @property
    def fault(self) -> str | None:
        """Why the grammar cannot be followed any more; None: it can be."""
        ...

    @property
    def broken(self) -> bool:
        """Whether `fill` has cleared all bits because of a fault that is not the grammar's."""
        ...


class Grammar(Protocol):
    """A compiled grammar. It allows an end token where the text may end."""

    def start(self, past: Sequence[int] = ()) -> GrammarState:
        """The state of a text behind the tokens `past`."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. The API validates the values; OpenAI's API has the same defaults."""

    max_tokens: int | None = None  # None: up to the end of the context
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None  # None: the engine draws a seed
    logprobs: int | None = None  # alternatives to report for each token; 0: only the chosen token; None: nothing
    prompt_logprobs: int | None = None  # as `logprobs`, for all tokens of the prompt except the first
    client: str = ""  # the client that sent the request, e.g. a digest of its API key
    priority: int = 0  # requests with a lower number start first, and may pause others
    cache_salt: str = ""  # only requests with equal salts share cached prefixes
    adapter: str | None = None  # the name of a LoRA adapter; None: the base model
    # The formulas of these four stand in spart/step/penalties.py.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), each token at most once
    stop_token_ids: frozenset[int] = frozenset()  # besides the model's own end tokens
    ignore_eos: bool = False  # the model's own end tokens do not end the request, unless it has a grammar
    # These four forbid tokens (engine/state/constraints.py).
    grammar: Grammar | None = None
    min_tokens: int = 0  # no end token comes before this many tokens
    allowed_token_ids: frozenset[int] = frozenset()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not occur in the output, none empty

    @property
    def prefix_salt(self) -> str:
        """The salt of cached prefixes, which includes the adapter because K and V depend on it."""
        return f"{self.adapter!r} {self.cache_salt}"

    def for_choice(self, index: int) -> SamplingParams:
        """The parameters of a prompt's choice `index`. Choice i of a request with a seed gets seed + i."""
        return self if self.seed is None else replace(self, seed=(self.seed + index) % 2**63)


class TokenEvent(msgspec.Struct, array_like=True):
    """One generated token. The request's last one has a `finish_reason`: "stop" at an end token, else "length"."""

    token: int
    logprob: float | None = None  # nats
    top: list[tuple[int, float]] = []  # (token, logprob) of alternatives, best first
    finish_reason: str | None = None
    prompt_scores: list[TokenScore] = []  # of the prompt's tokens except the first; on a request's first token
    reused: int = 0  # prompt tokens that the prefix cache had; the same in all events of a request


class Outlet(Protocol):
    """Receives the output of many choices, each of which has a number.

    The methods must not block or raise, and ignore unknown numbers. The event loop calls them before the engine starts
    its next step, so an outlet only queues the tokens and processes them later.
    """

    def tokens(self, numbers: list[int], tokens: list[int]) -> None:
        """The choice `numbers[i]` has generated `tokens[i]`, which is not its last token and has no log-probability."""
        ...

    def event(self, number: int, event: TokenEvent | EngineError) -> None:
        """Any other token of a choice, such as its first or its last token, or the error that ends the choice."""
        ...


@dataclass(frozen=True, slots=True)
class OutletChoice:
    """A choice's number at an outlet; an Output."""

    outlet: Outlet
    number: int

    def __call__(self, event: TokenEvent | EngineError) -> None:
        self.outlet.event(self.number, event)


#: Receives the tokens of one choice as they are generated, or the error that ends it. It must not block or raise. An
#: OutletChoice receives the tokens of a step together with the other choices of its outlet.
Output = Callable[[TokenEvent | EngineError], None]
