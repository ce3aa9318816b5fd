"""Hands out the tokens of a step."""

from __future__ import annotations

from collections import Counter

from fastdecode.engine.scheduling.plan import Outcome
from fastdecode.engine.state.request import Outlet, TokenEvent
from fastdecode.engine.state.sequence import Sequence
from fastdecode.engine.stats import EngineObserver


def deliver(outcomes: list[Outcome], now: float, observer: EngineObserver) -> list[Sequence]:
    """Hand out the new tokens of a step that has ended at `now`. Returns the choices that have ended.

    Tokens without a log-probability that end no choice go to their outlet in one call, before all others: among the
    tokens that a choice gets in a step, only the last one can end it.
    """
    plain: dict[Outlet, tuple[list[int], list[int]]] = {}
    others: list[tuple[Sequence, TokenEvent]] = []
    last_tokens: list[float] = []
    outlet: Outlet | None = None
    numbers: list[int] = []
    tokens: list[int] = []
    for seq, sampled, reason in outcomes:
        last, seq.last_token = seq.last_token, now
        if last is None:
            observer.first_token(now - seq.arrived)
        else:
            last_tokens.append(last)
            if reason is None and seq.choice is not None and sampled.logprob is None:
                if seq.choice.outlet is not outlet:
                    outlet = seq.choice.outlet
                    numbers, tokens = plain.setdefault(outlet, ([], []))
                numbers.append(seq.choice.number)
                tokens.append(sampled.token)
                continue
        scores = seq.prompt_scores if last is None else []
        event = TokenEvent(sampled.token, sampled.logprob, [*sampled.top], reason, scores, seq.reused)
        others.append((seq, event))
    for last, n in Counter(last_tokens).items():  # nearly all streams had their last token in the same step
        observer.inter_token(now - last, n)
    for outlet, (numbers, tokens) in plain.items():
        outlet.tokens(numbers, tokens)
    for seq, event in others:
        seq.output(event)
    return [seq for seq, event in others if event.finish_reason is not None]
