"""Checks of the engine's inputs: requests, and links to R-nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastdecode.engine.state.request import InvalidParameter, InvalidPrompt, PromptTooLong, SamplingParams, check_length

if TYPE_CHECKING:
    from fastdecode.engine.scheduling.plan import SchedulerLimits
    from fastdecode.transports.base import Link


def check_prompt(prompt_ids: Sequence[int], vocabulary: int, max_model_len: int, capacity: int) -> None:
    """Check a prompt against the model's vocabulary, the longest context, and the tokens of one sequence that the
    KV-cache holds. Raises InvalidPrompt, PromptTooLong."""
    if not prompt_ids:
        raise InvalidPrompt("the prompt is empty")
    n = len(prompt_ids)
    check_length(n, max_model_len)
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
        raise InvalidPrompt(f"the prompt holds a token id outside the model's vocabulary (0 to {vocabulary - 1})")
    if n > capacity:
        raise PromptTooLong(f"the prompt has {n} tokens; the KV-cache holds at most {capacity} of one sequence")


def check_generated(past: Sequence[Sequence[int] | None], vocabulary: int, max_new: int) -> None:
    """Check the tokens that choices have from another S-node. Raises InvalidPrompt."""
    for before in past:
        if before and not (len(before) < max_new and 0 <= min(before) <= max(before) < vocabulary):
            raise InvalidPrompt(f"{len(before)} generated tokens cannot be continued: at most {max_new} may come")


def check_tokens(params: SamplingParams, vocabulary: int) -> None:
    """Check the tokens that parameters name. Raises InvalidParameter."""
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": [token for word in params.bad_words for token in word],
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise InvalidParameter(name, f"token {token} is outside the vocabulary (0 to {vocabulary - 1})")


def adapter_index(name: str | None, adapters: Sequence[str]) -> int | None:
    """The index of the adapter `name`; None for the base model. Raises InvalidParameter."""
    if name is not None and name not in adapters:
        raise InvalidParameter("model", f"there is no adapter {name!r} among {list(adapters)}")
    return None if name is None else adapters.index(name)


def check_link(link: Link, limits: SchedulerLimits) -> None:
    """Raises ValueError if a link has too few slots or rows."""
    slots, rows = link.geometry.n_slots, link.geometry.max_rows
    if slots < limits.slots:
        raise ValueError(f"{link.url} has {slots} slots for {limits.slots} steps at the same time")
    if rows < limits.max_batch_tokens:
        raise ValueError(f"{link.url} takes {rows} rows a call, fewer than max_batch_tokens {limits.max_batch_tokens}")
