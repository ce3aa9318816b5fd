"""The worker thread in which the S-Part computes.

A step is a generator (`SPart.step`) that yields each time it has to wait: for the R-nodes, after it has posted a
layer's rows, or for a device that computes a whole step by itself. It yields the object that it waits for (see
transports.base.Pending), and is sent the time since which the thread has only waited. With two mini-batches in flight
the thread resumes the one whose answer has come, so that the S-Part of one runs while the R-nodes compute the R-Part of
the other:

    thread    S(A,1)  S(B,1)  S(A,2)  S(B,2)  ...
    R-nodes           R(A,1)  R(B,1)  R(A,2)  ...
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from fastdecode.transports._native import wait_any
from fastdecode.transports.base import Pending

StepGenerator = Generator[Pending, float | None, Any]

#: After this many seconds without an answer, the step that has waited longest is resumed: it checks its own deadline,
#: and whether its device has failed.
_PATIENCE_S = 1.0


@dataclass(slots=True)
class _Job:
    step: StepGenerator
    future: asyncio.Future[Any]
    pending: Pending = None  # what the step waits for
    idle_since: float | None = None  # the thread has had nothing else to do since then (time.perf_counter)


class StepRunner(Protocol):
    """Runs the engine's steps: Runner, or a replacement that takes virtual time."""

    def submit(self, step: StepGenerator) -> asyncio.Future[Any]:
        """Run a step; the future gets its StepOutput."""
        ...

    def stop(self) -> None:
        """End the runner's thread, if it has one. Idempotent."""
        ...


class RunnerStopped(Exception):
    """The step was abandoned because the runner was stopped."""


class Runner:
    """Runs step generators, interleaved, in one thread of its own. Belongs to the event loop it was created in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()  # None asks the thread to end
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # something was put into the inbox
        # A daemon thread: if it hangs in a dead transport, the process can end all the same.
        self._thread = threading.Thread(target=self._run, name="fastdecode-s-part", daemon=True)
        self._thread.start()

    def submit(self, step: StepGenerator) -> asyncio.Future[Any]:
        """Run a generator to its end. The future gets its return value or exception; RunnerStopped if it was
        abandoned."""
        future = self._loop.create_future()
        self._put(_Job(step, future))
        return future

    def stop(self) -> None:
        """End the thread and wait for it. A step in progress is closed at the yield where it stands. Idempotent."""
        if not self._thread.is_alive():
            return
        self._put(None)
        self._thread.join()
        os.close(self._wake)
        self._wake = -1

    def _put(self, job: _Job | None) -> None:
        self._inbox.put(job)
        os.eventfd_write(self._wake, 1)

    # -- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        active: deque[_Job] = deque()  # the job that was resumed longest ago first
        try:
            while (job := self._next(active)) is not None:
                if self._advance(job):
                    active.append(job)
        finally:
            while not self._inbox.empty():
                if (job := self._inbox.get()) is not None:
                    active.append(job)
            for job in active:
                job.step.close()
                self._answer(job.future.set_exception, RunnerStopped("the runner was stopped"), job.future)

    def _next(self, active: deque[_Job]) -> _Job | None:
        """The job to go on with, taken out of `active`; None if the thread is to end."""
        while True:
            # A new step starts at once: its S-Part fills the time in which the R-nodes work for the other steps.
            # An idle thread wakes up, too: other ranks watch it (kernels/decoder/rank_watch.h).
            with contextlib.suppress(Empty):
                return self._inbox.get(block=not active, timeout=_PATIENCE_S)
            if not active:
                continue
            if len(active) == 1 and not isinstance(active[0].pending, int):
                return active.popleft()  # the only step waits by itself: the thread has nothing else to do
            since = time.perf_counter()
            ready = wait_any([job.pending for job in active], self._wake, _PATIENCE_S)
            if ready is None and self._woken():
                continue
            job = active[ready or 0]
            job.idle_since = since
            del active[ready or 0]
            return job

    def _woken(self) -> bool:
        try:
            return os.eventfd_read(self._wake) > 0
        except BlockingIOError:
            return False

    def _advance(self, job: _Job) -> bool:
        """Resume a step up to its next yield; False if it has ended."""
        try:
            idle_since, job.idle_since = job.idle_since, None
            job.pending = job.step.send(idle_since)
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
