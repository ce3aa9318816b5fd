"""The values that the engine hands to the S-Part for one step of a mini-batch, and the results that it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from fastdecode.spart.step.masks import TokenMask
    from fastdecode.spart.step.penalties import LogitRules
    from fastdecode.transports.base import DataPath, StepCost, TransportError


class RemotePrefix(NamedTuple):
    """The first tokens of a sequence whose other tokens lie on the S-Part's device: an R-node has their K and V. The
    device gets the R-node's answers to the sequence's queries, and merges them with its own."""

    link: int  # the R-node, as an index into the S-Part's list of links
    seq_index: int  # its handle within that link's lease
    tag: int
    length: int  # tokens, of whole pages


@dataclass(slots=True)
class Chunk:
    """One sequence's part of a step: the rows of some of its tokens."""

    link: int  # the sequence's R-node, as an index into the S-Part's list of links
    seq_index: int  # sequence index within that link's lease
    tag: int  # how often that index was given out
    pos: int  # how many tokens of the sequence are cached on the R-node
    tokens: list[int]  # the tokens at positions pos, pos + 1, ...
    prefill: bool  # True: the S-node attends, the R-node only appends K and V. False: the R-node attends
    sample: SampleSpec | None  # how to draw the token after the chunk; None: more of the prompt follows
    prompt_length: int = 0  # with `prefill`: tokens of the whole prompt, for which memory is taken; 0: not known
    score: ScoreSpec | None = None  # tokens of the prompt to score; None: none
    adapter: int | None = None  # the sequence's LoRA adapter, as an index into the model's; None: the base model
    drafts: int = 0  # with `sample`: this many of the last tokens are guesses; a token is drawn after each guess too
    trim: bool = False  # the R-node drops the tokens that it has beyond `pos` first: wrong guesses
    long: bool = False  # the sequence may grow beyond the positions that LongRoPE was trained on
    #: The slot of the S-Part's states that has the state of the tokens before `pos`; only of a model whose layers keep
    #: one. With `pos` 0, this state is zero.
    state: int = 0
    #: (n, slot) in ascending order: the state after the chunk's first n tokens goes to that slot. The last one is for
    #: all tokens. Empty: the state after all of them goes to `state`.
    states_after: tuple[tuple[int, int], ...] = ()
    following: int | None = None  # without `sample`: the token after the chunk, if it is known, for an MTP head
    slide: bool = False  # no row before `pos` will come: the R-node gives back the pages that no later row sees
    prefix: RemotePrefix | None = None  # of a chunk that attends on the S-Part's device, which has the other tokens


@dataclass(slots=True)
class ScoreSpec:
    """Tokens of a prompt whose log-probabilities are asked for."""

    tokens: list[int]  # the tokens after the chunk's first rows, in order, at most one for each row
    top: int  # alternatives to report


class TokenScore(NamedTuple):
    """The probability that the model gives a token of the prompt after the tokens before it."""

    logprob: float  # nats
    rank: int  # 1: no token is likelier
    top: list[tuple[int, float]]  # (token, logprob) of the likeliest tokens, likeliest first


@dataclass(slots=True)
class SampleSpec:
    """How to draw one token. `temperature` 0 is greedy.

    The random number depends on `seed` and `index` alone, so a sequence draws the same tokens in any batch and after
    any preemption.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0  # how many tokens the sequence has generated before this one
    logprobs: int | None = None  # alternatives to report; 0: only the chosen token; None: nothing
    rules: LogitRules | None = None  # bias and penalties, applied before anything but the mask
    mask: TokenMask | None = None  # the tokens that may be drawn; None: all

    def later(self, n: int) -> SampleSpec:
        """How to draw the token `n` tokens later."""
        return replace(self, index=self.index + n) if n else self


@dataclass(slots=True)
class StepBatch:
    """One step of one mini-batch. Chunks that the R-node attends come first; each of the two kinds is in order of
    link."""

    slot: int  # the mini-batch's slot on every link
    chunks: list[Chunk]
    layer_timeout: float = 60.0  # seconds that an R-node may take for a layer, and to accept the step
    drafts: int = 0  # the most tokens to draft after each drawn token, at most ModelConfig.mtp


@dataclass(slots=True)
class Sampled:
    """The token drawn after one chunk, or the reason why there is none."""

    token: int  # -1 with an error
    logprob: float | None = None  # nats; of the model's own distribution: without rules and filters, at temperature 1
    top: Sequence[tuple[int, float]] = ()  # (token, logprob) of the best alternatives, best first
    error: str | None = None  # the logits of this row are not finite; other rows of the step may be sound
    #: The tokens drawn after each of the chunk's guesses; such a token counts if the guesses up to it are right.
    after_drafts: Sequence[Sampled] = ()
    drafts: Sequence[int] = ()  # the tokens that the model's MTP head expects after this one; see StepBatch.drafts


@dataclass(slots=True)
class StepOutput:
    """The result of a step. Times are in seconds."""

    sampled: list[Sampled | None]  # one for each chunk; None if the chunk's `sample` is None
    s_seconds: float  # the S-Part computed
    r_wait_seconds: float  # the S-Part waited for R-nodes
    kv_bytes: int  # KV-cache bytes that the R-nodes read
    link_costs: dict[DataPath, StepCost] = field(default_factory=dict)  # of every R-node that took part
    failures: dict[DataPath, TransportError] = field(default_factory=dict)  # links whose chunks have no results
    scores: dict[int, list[TokenScore]] = field(default_factory=dict)  # of chunks with a `score`, by their index
    logits: torch.Tensor | None = None  # [sampled chunks, vocab_size] fp32; only if asked for (tests, perplexity)
