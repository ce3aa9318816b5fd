"""What the scheduler hands to the S-Part: the chunks of one step of one mini-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fastdecode.spart.penalties import LogitRules


@dataclass(slots=True)
class Chunk:
    """What one sequence contributes to a step. Filled by the scheduler, read by the S-Part."""

    link: int  # index of the sequence's R-node in the S-Part's list of links
    seq_index: int  # index within that link's lease
    tag: int  # generation of that index
    pos: int  # tokens of the sequence already cached on the R-node
    tokens: list[int]  # new tokens, at positions pos, pos+1, ...
    prefill: bool  # True: prompt attention on the S-node, K/V only appended on the R-node. False: attend on the R-node
    sample: SampleSpec | None  # how to draw the next token after the chunk's last; None: more of the prompt follows


@dataclass(slots=True)
class SampleSpec:
    """Sampling of one row. `temperature` 0 is greedy.

    `seed` and `index` alone fix the random number, so a sequence draws the same tokens whatever batch it runs in and
    however often it is preempted.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0  # number of tokens generated before this one
    logprobs: int | None = None  # how many alternatives to report; 0: only the chosen token; None: nothing
    rules: LogitRules | None = None  # what comes before everything else


@dataclass(slots=True)
class StepBatch:
    """One step of one mini-batch. Chunks that attend on the R-node come first; each kind is in order of link."""

    slot: int  # the mini-batch's slot on every link
    chunks: list[Chunk]


@dataclass(slots=True)
class Sampled:
    """The next token of one chunk, or why there is none."""

    token: int  # -1 with an error
    logprob: float | None = None  # of the model's own distribution: no rules, temperature 1, no filters; nats
    top: list[tuple[int, float]] = field(default_factory=list)  # the best alternatives, best first
    error: str | None = None  # this row's logits are not finite; the other rows of the step are sound


@dataclass(slots=True)
class StepOutput:
    sampled: list[Sampled | None]  # one a chunk, None where `sample` was None
    s_seconds: float  # time the S-Part computed
    r_wait_seconds: float  # time it stood waiting for R-nodes
    kv_bytes: int  # KV-cache bytes read by the R-nodes
    logits: torch.Tensor | None = None  # [sampled chunks, vocab] fp32, only when asked for (tests, perplexity)
