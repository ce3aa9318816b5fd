"""Translates the engine's terms into the S-Part's: plans into step batches, sampling parameters into logit rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdecode.spart.batch import Chunk, SampleSpec, StepBatch
from fastdecode.spart.penalties import LogitRules

if TYPE_CHECKING:
    from fastdecode.engine.request import SamplingParams
    from fastdecode.engine.scheduling.plan import Plan
    from fastdecode.engine.sequence import Sequence


def step_batch(plan: Plan) -> StepBatch:
    """The step batch that the S-Part computes for `plan`."""
    chunks = []
    for seq, n_tokens, prefill, sample in plan.chunks:
        tokens = seq.tokens[seq.cached : seq.cached + n_tokens]
        spec = _sample_spec(seq) if sample else None
        chunks.append(Chunk(seq.placed_on.position, *seq.handle, seq.cached, tokens, prefill, spec, seq.prefill_end))
    return StepBatch(plan.mini_batch, chunks)


def _sample_spec(seq: Sequence) -> SampleSpec:
    p = seq.params
    mask = seq.constraints if seq.constraints is not None and seq.constraints.active else None
    return SampleSpec(p.temperature, p.top_k, p.top_p, p.min_p, seq.seed, seq.n_generated, p.logprobs, seq.rules, mask)


def logit_rules(params: SamplingParams, prompt_ids: list[int]) -> LogitRules | None:
    """The bias and penalties of `params` as rules for the sampler; None if there are neither."""
    rules = LogitRules(
        bias=params.logit_bias,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        prompt=prompt_ids,
    )
    return rules if rules.penalises or params.logit_bias else None
