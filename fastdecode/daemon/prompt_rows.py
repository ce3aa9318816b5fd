"""Finds --max-batch-tokens of a GPU by a measurement of about a second at start: prompts of several lengths, without
R-nodes."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastdecode.spart.step.batch import Chunk, SampleSpec, StepBatch
from fastdecode.transports.loopback import Loopback

if TYPE_CHECKING:
    from fastdecode.spart.backend import Backend
    from fastdecode.spart.decoder.weights import Model
    from fastdecode.spart.hf.model import HFModel

_ROUNDS = 2  # after a first step, which loads kernels
_LEAST_GAIN = 1.05  # in tokens a second, for which a step takes twice as many rows


def rows_by_speed(seconds_of: Callable[[int], float], least: int, most: int) -> int:
    """The rows of a step, from `least` to `most`: twice as many as long as that computes prompts faster.
    `seconds_of` tells how long a prompt of some tokens takes."""
    rows, speed = least, least / seconds_of(least)
    while rows < most:
        more = min(2 * rows, most)
        faster = more / seconds_of(more)
        if faster < _LEAST_GAIN * speed:
            break
        rows, speed = more, faster
    return rows


def prompt_seconds(backend: Backend, model: Model | HFModel, rows: int) -> float:
    """Seconds that the S-Part takes for a step of `rows` rows: a prompt, or several if the model's positions end
    before."""
    lengths = [min(model.config.max_positions, rows - i) for i in range(0, rows, model.config.max_positions)]
    greedy = SampleSpec(temperature=0.0)
    prompts = [Chunk(0, i, 1, 0, [0] * n, True, greedy, n, state=i) for i, n in enumerate(lengths)]
    geometry = model.config.hello_geometry(1, rows, model.act_dtype)
    with contextlib.closing(Loopback(geometry)) as link:
        spart = backend.make_spart(model, [link], state_slots=len(prompts))
        times = []
        for _ in range(1 + _ROUNDS):
            start = time.perf_counter()
            for pending in spart.step(StepBatch(0, prompts)):
                if isinstance(pending, int):  # a descriptor, at start a small one
                    select.select([pending], [], [])
            times.append(time.perf_counter() - start)
        return min(times[1:])
