"""The three ways in which sequences on the S-Part's GPU and sequences on R-nodes can decode together.

The near batch has the rows whose K and V all lie on the GPU. The far batch has the rows that R-nodes attend to, in
whole or in part. Pure arithmetic, for the scheduler (way_choice.py) and for `fastdecode-plan`.
"""

from __future__ import annotations

from enum import Enum
from math import ceil
from typing import NamedTuple


class Way(Enum):
    """How the next steps are made up."""

    NEAR = "A"  # the near batch alone
    TOGETHER = "B"  # one step has all rows
    APART = "C"  # each batch has steps of its own, and near steps do not wait for far ones


class BatchTimes(NamedTuple):
    """The predicted times of a step of one batch by itself."""

    rows: float
    seconds: float
    gpu_seconds: float  # of `seconds`, those in which the GPU computes


class Rate(NamedTuple):
    """What a way brings."""

    way: Way
    tokens_per_second: float
    period: float  # seconds from one far step's beginning to the next one's; 0: there is none
    wait: int  # near steps from the end of a far step to the next one's beginning


#: By default, near steps may take this share longer because of far rows.
SLOWDOWN = 0.03

#: Near steps after which far rows are served whatever the rate.
LONGEST_WAIT = 8

#: NEAR is left only for a way that brings this many times its tokens a second.
_LEAST_GAIN = 1.02


def rates(near: BatchTimes, far: BatchTimes, together: float, slowdown: float) -> list[Rate]:
    """The ways that slow the steps of the near batch by no more than the share `slowdown`, NEAR first. `together`:
    seconds of a step of all rows. Both batches have rows.

    While a far step takes `gpu_seconds` of a period from the GPU, near steps have the rest. Far rows wait for no more
    than LONGEST_WAIT near steps, even if that slows these more.
    """
    alone = near.rows / near.seconds
    found = [Rate(Way.NEAR, alone, 0.0, LONGEST_WAIT)]
    if together <= (1 + slowdown) * near.seconds:
        found.append(Rate(Way.TOGETHER, (near.rows + far.rows) / together, together, 0))
    bearable = far.gpu_seconds * (1 + slowdown) / slowdown if slowdown else float("inf")
    wait = ceil(min(max(0.0, (bearable - far.seconds) / near.seconds), LONGEST_WAIT))
    period = far.seconds + wait * near.seconds
    left = 1 - far.gpu_seconds / period
    found.append(Rate(Way.APART, left * alone + far.rows / period, period, wait))
    return found


def best(found: list[Rate]) -> Rate:
    """The way of most tokens a second; NEAR, the first, if no other one brings enough more."""
    top = max(found, key=lambda rate: rate.tokens_per_second)
    return top if top.tokens_per_second >= _LEAST_GAIN * found[0].tokens_per_second else found[0]
