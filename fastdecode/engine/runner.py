"""The worker thread in which the S-Part computes.

A step is a generator (`SPart.step`) that yields each time it has posted a layer's rows to the R-nodes. When it is
resumed, it waits for their reply, computes the next layer's projections and posts again. With two mini-batches in
flight the thread alternates between them, so that the S-Part of one runs while the R-nodes compute the R-Part of the
other:

    thread    S(A,1)  S(B,1)  S(A,2)  S(B,2)  ...
    R-nodes           R(A,1)  R(B,1)  R(A,2)  ...
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

StepGenerator = Generator[None, None, Any]


@dataclass(slots=True)
class _Job:
    step: StepGenerator
    future: asyncio.Future[Any]


class RunnerStopped(Exception):
    """The step was abandoned because the runner was stopped."""


class Runner:
    """Runs step generators, interleaved, in one thread of its own. Belongs to the event loop it was created in."""

    def __init__(self, name: str = "fastdecode-s-part"):
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()  # None asks the thread to end
        # A daemon thread: if it hangs in a dead transport, the process can end all the same.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, step: StepGenerator) -> asyncio.Future[Any]:
        """Run a generator to its end. The future gets its return value or exception; RunnerStopped if it was
        abandoned."""
        future = self._loop.create_future()
        self._inbox.put(_Job(step, future))
        return future

    def stop(self) -> None:
        """End the thread and wait for it. A step in progress is closed at the yield where it stands. Idempotent."""
        self._inbox.put(None)
        self._thread.join()

    # -- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        active: deque[_Job] = deque()  # the job that posted longest ago first
        try:
            while True:
                # A new step starts at once: its S-Part fills the time in which the R-nodes work for the other steps.
                try:
                    job = self._inbox.get(block=not active)
                except Empty:
                    job = active.popleft()
                if job is None:
                    break
                if self._advance(job):
                    active.append(job)
        finally:
            while not self._inbox.empty():
                if (job := self._inbox.get()) is not None:
                    active.append(job)
            for job in active:
                job.step.close()
                self._answer(job.future.set_exception, RunnerStopped("the runner was stopped"), job.future)

    def _advance(self, job: _Job) -> bool:
        """Resume a step up to its next yield; False if it has ended."""
        try:
            next(job.step)
        except StopIteration as end:
            self._answer(job.future.set_result, end.value, job.future)
        except BaseException as error:
            self._answer(job.future.set_exception, error, job.future)
        else:
            return True
        finally:
            # The future holds the error, whose traceback holds this frame: without this line that is a reference cycle
            # that keeps all tensors of the step alive.
            del job
        return False

    def _answer(self, setter: Callable[[Any], None], value: Any, future: asyncio.Future[Any]) -> None:
        def answer() -> None:
            if not future.done():  # the waiting coroutine may have been cancelled
                setter(value)

        try:
            self._loop.call_soon_threadsafe(answer)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
