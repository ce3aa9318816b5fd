"""Steps of an S-Part that nothing else interleaves with."""

from __future__ import annotations

from collections.abc import Generator

from fastdecode.spart.step.batch import StepOutput
from fastdecode.transports.base import Pending


def run_step(step: Generator[Pending, float | None, StepOutput]) -> StepOutput:
    """Run a step of `SPart.step` to its end in this thread. Raises what the step raises."""
    while True:
        try:
            next(step)
        except StopIteration as end:
            output: StepOutput = end.value
            return output
