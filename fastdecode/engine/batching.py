"""Translates the engine's terms into the S-Part's: plans into step batches, sampling parameters into logit rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.deadline import layer_deadline
from fastdecode.spart.step.batch import Chunk, SampleSpec, ScoreSpec, StepBatch
from fastdecode.spart.step.penalties import LogitRules

if TYPE_CHECKING:
    from fastdecode.engine.scheduling.plan import Plan
    from fastdecode.engine.state.request import SamplingParams
    from fastdecode.engine.state.sequence import PlannedChunk, Sequence


def step_batch(plan: Plan, n_layers: int) -> StepBatch:
    """The step batch that the S-Part, which has `n_layers` layers, computes for `plan`."""
    return StepBatch(plan.mini_batch, list(map(_chunk, plan.chunks)), layer_deadline(plan, n_layers))


def _chunk(planned: PlannedChunk) -> Chunk:
    seq, n_tokens, prefill, sample, guesses = planned
    decodes = n_tokens == 1 and sample and not (prefill or seq.overrun or seq.slides)
    if decodes and (last := seq.decoded) is not None and last[0] is seq.handle:
        # One object serves all steps in which a sequence decodes, because one of them is in flight at a time.
        _, again, sampling = last
        tokens, cached = seq.tokens, seq.cached
        again.pos, again.tokens, sampling.index = cached, [tokens[cached]], len(tokens) - seq.n_prompt
        return again
    tokens = [*seq.tokens[seq.cached : seq.cached + n_tokens - len(guesses)], *guesses]
    spec = _sample_spec(seq) if sample else None
    score = _score_spec(seq, n_tokens)
    where = (seq.placed_on.position, *seq.handle, seq.cached)
    kind = (seq.adapter, len(guesses), seq.overrun, seq.long)
    chunk = Chunk(*where, tokens, prefill, spec, seq.prefill_end, score, *kind, slide=seq.slides)
    if decodes and spec is not None and seq.constraints is None:
        seq.decoded = seq.handle, chunk, spec
    return chunk


def _sample_spec(seq: Sequence) -> SampleSpec:
    p = seq.params
    mask = seq.constraints if seq.constraints is not None and seq.constraints.active else None
    return SampleSpec(p.temperature, p.top_k, p.top_p, p.min_p, seq.seed, seq.n_generated, p.logprobs, seq.rules, mask)


def _score_spec(seq: Sequence, n_tokens: int) -> ScoreSpec | None:
    """The tokens of the prompt that the sequence's next `n_tokens` rows score."""
    if seq.params.prompt_logprobs is None or seq.cached >= seq.n_prompt - 1:
        return None
    end = min(seq.cached + n_tokens + 1, seq.n_prompt)
    return ScoreSpec(seq.tokens[seq.cached + 1 : end], seq.params.prompt_logprobs)


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
