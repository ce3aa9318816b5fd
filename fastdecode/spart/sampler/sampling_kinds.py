"""Kind: what the sampling of a captured step can do for its rows.

A graph runs the same operations on arrays of the same sizes every time. So a captured step has a graph for each Kind,
and `kind_of` finds the Kind that covers all rows of a step. Some requests need arrays whose sizes nobody knows before,
or which come too late for the step's one upload; their steps draw behind the graph, by the sampler of all other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.spart.sampler.results import MIN_TEMPERATURE
from fastdecode.spart.step.batch import SampleSpec

#: Top-p looks at this many of the likeliest tokens. Rows for which they are not enough are drawn a second time.
TOP_P_PREFIX = 1024

GREEDY = SampleSpec(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """What the rows of a captured step may ask for, beside the likeliest token."""

    draws: bool = False  # a temperature
    filters: bool = False  # top-k, top-p, min-p


#: Every kind; the first one needs the most memory.
KINDS = (Kind(draws=True, filters=True), Kind(draws=True), Kind())


def kind_of(specs: Sequence[SampleSpec], vocab_size: int) -> Kind | str:
    """The least Kind that covers the rows of a captured step; or the name of what no Kind covers."""
    draws = filters = False
    for spec in specs:
        if spec.mask is not None:
            return "masks of tokens, which are made while the model runs"
        if spec.logprobs is not None:
            return "log-probabilities"
        if spec.rules is not None:
            return "biases and penalties"
        if spec.temperature < MIN_TEMPERATURE:
            continue
        draws = True
        if TOP_P_PREFIX < spec.top_k < vocab_size:
            return f"a top-k of more than {TOP_P_PREFIX}"
        filters = filters or spec.top_p < 1.0 or spec.min_p > 0.0 or 0 < spec.top_k < vocab_size
    return Kind(draws, filters)
