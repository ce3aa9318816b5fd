"""Totals: the counters of an engine. Each module counts what it does itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Counters since the engine's start."""

    requests: int = 0
    rejected: int = 0  # requests refused with Overloaded
    preemptions: int = 0
    recomputed: int = 0  # running sequences that lost their cache and were queued again
    migrated: int = 0  # running sequences that migrated from one R-node to another
    adopted: int = 0  # sequences of other S-nodes' streams that went on with their K and V
    not_adopted: int = 0  # sequences of other S-nodes' streams that were recomputed
    remote_prefills: int = 0  # prompts that a prefill S-node has computed
    prompt_tokens: int = 0  # of requests whose first step has begun
    generated_tokens: int = 0
    steps: int = 0
    s_seconds: float = 0.0  # time the S-Part computed
    r_wait_seconds: float = 0.0  # time the S-Part waited for R-nodes
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # the tokens found there
    kv_bytes: int = 0  # KV-cache bytes that the R-nodes have read
    spilled_bytes: int = 0  # of pages that have gone from the S-Part's device to R-nodes
    refilled_bytes: int = 0  # of pages that have come back
    steps_near: int = 0  # steps of sequences on the S-Part's GPU: alone (A)
    steps_together: int = 0  # with all sequences in them (B)
    steps_apart: int = 0  # while others had steps of their own (C)
    predicted_seconds: float = 0.0  # of the steps whose times were predicted
    measured_seconds: float = 0.0
    guessed: int = 0  # tokens guessed by speculation
    guessed_right: int = 0  # guesses that the model has drawn
