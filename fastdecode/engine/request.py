"""What the API hands to the engine and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field


class EngineError(Exception):
    """Base; the message is a sentence for the client."""


class InvalidPrompt(EngineError):
    """The prompt is empty or holds a token id that is not in the vocabulary: the client's fault (400)."""


class PromptTooLong(InvalidPrompt):
    """Prompt (and at least one token) does not fit the model or the KV-cache: the client's fault (400)."""


class InvalidParameter(EngineError):
    """A sampling parameter does not suit the model: the client's fault (400)."""

    def __init__(self, name: str, message: str):
        super().__init__(f"{name}: {message}")
        self.name = name


class Overloaded(EngineError):
    """The queue is full (429)."""


class NotReady(EngineError):
    """No R-node is connected, or the node is draining (503)."""


class GenerationFailed(EngineError):
    """The request was running and cannot be finished, e.g. its R-node was lost (500)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate. Validated by the API; the defaults are OpenAI's."""

    max_tokens: int | None = None  # None: to the end of the context
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # None: drawn by the engine
    logprobs: int | None = None  # alternatives to report a token; 0: the chosen one only
    presence_penalty: float = 0.0  # these four: spart/penalties.py
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # each token once
    stop_token_ids: frozenset[int] = frozenset()  # beside the model's own end tokens
    ignore_eos: bool = False


@dataclass(slots=True)
class TokenEvent:
    """One generated token. The last has a `finish_reason`: "stop" (an end token: the token itself) or "length"."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    reused: int = 0  # prompt tokens that were found in the prefix cache; the same with every token
