"""Translates the engine's terms into the S-Part's: plans into step batches, sampling parameters into logit rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdecode.engine.scheduling.deadline import layer_deadline
from fastdecode.spart.step.batch import Chunk, RemotePrefix, SampleSpec, ScoreSpec, StepBatch
from fastdecode.spart.step.penalties import LogitRules

if TYPE_CHECKING:
    from fastdecode.engine.scheduling.plan import Plan
    from fastdecode.engine.state.request import SamplingParams
    from fastdecode.engine.state.sequence import PlannedChunk, Sequence


def step_batch(plan: Plan, n_layers: int, drafts: int = 0) -> StepBatch:
    """The step batch that the S-Part, which has `n_layers` layers, computes for `plan`. `drafts`: see StepBatch."""
    chunks = [_chunk(planned) for planned in plan.chunks]
    return StepBatch(plan.slot, chunks, layer_deadline(plan, n_layers), drafts)


def _chunk(planned: PlannedChunk) -> Chunk:
    seq, n_tokens, prefill, sample, guesses = planned
    slides = seq.given_back is not None
    decodes = n_tokens == 1 and sample and not (prefill or seq.overrun or slides)
    if decodes and seq.reusable is not None:
        # One chunk serves all steps in which a sequence decodes, because it has at most one step in flight.
        chunk, spec = seq.reusable
        chunk.pos, chunk.tokens = seq.cached, [seq.tokens[seq.cached]]
        chunk.state = _state(seq)
        spec.index = len(seq.tokens) - seq.n_prompt
        return chunk
    known = seq.tokens[seq.cached : seq.cached + n_tokens - len(guesses)]
    new_spec = _sample_spec(seq) if sample else None
    chunk = Chunk(
        link=seq.placed_on.position,
        seq_index=seq.handle.seq_index,
        tag=seq.handle.tag,
        pos=seq.cached,
        tokens=[*known, *guesses],
        prefill=prefill,
        sample=new_spec,
        prompt_length=seq.prefill_end,
        score=_score_spec(seq, n_tokens),
        adapter=seq.adapter,
        drafts=len(guesses),
        trim=seq.overrun,
        long=seq.long,
        slide=slides,
        following=None if sample else seq.tokens[seq.cached + n_tokens],
        state=_state(seq),
        states_after=() if seq.state is None else seq.state.after(seq.cached, n_tokens),
        prefix=_prefix(seq),
    )
    if decodes and not chunk.states_after and new_spec is not None and seq.constraints is None:
        seq.reusable = chunk, new_spec
    return chunk


def _prefix(seq: Sequence) -> RemotePrefix | None:
    if seq.prefix is None:
        return None
    return RemotePrefix(seq.prefix.node.position, *seq.prefix.handle, seq.prefix.length)


def _state(seq: Sequence) -> int:
    return 0 if seq.state is None else seq.state.index


def _sample_spec(seq: Sequence) -> SampleSpec:
    params, constraints = seq.params, seq.constraints
    return SampleSpec(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=seq.seed,
        index=seq.n_generated,
        logprobs=params.logprobs,
        rules=seq.rules,
        mask=constraints if constraints is not None and constraints.active else None,
    )


def _score_spec(seq: Sequence, n_tokens: int) -> ScoreSpec | None:
    """The prompt tokens that the sequence's next `n_tokens` rows score; None: no score is wanted."""
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
