"""Processes that sum over shared memory, as the ranks of an S-Part do."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fastdecode.spart.ranks.reduction import RankError, Reduction, create_segment

#: Processes are forked, because importing torch takes seconds.
_CONTEXT = multiprocessing.get_context("fork")


def make_reductions(n: int) -> list[Reduction]:
    """The ends of a segment's `n` ranks, all in this process: a sum leaves the GIL, so threads can be ranks."""
    segment = create_segment(n)
    try:
        return [Reduction(segment, rank, n) for rank in range(n)]
    finally:
        os.close(segment)


class RankProcesses:
    """`n` processes that call body(reduction, *args); they are killed at the end of the `with`."""

    def __init__(self, n: int, body: Callable[..., Any], *args: Any, limit_s: float = 100.0):
        self._stack = ExitStack()
        segment = create_segment(n)
        self._stack.callback(os.close, segment)
        self._pipes, self.processes = [], []
        for rank in range(n):
            ours, theirs = _CONTEXT.Pipe()
            self._stack.enter_context(ours)
            process = _CONTEXT.Process(target=_run, args=(theirs, segment, rank, n, limit_s, body, args))
            process.start()
            theirs.close()
            self._stack.callback(self._end, process)
            self._pipes.append(ours)
            self.processes.append(process)
        for pipe in self._pipes:
            assert pipe.recv() == "joined"

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @staticmethod
    def _end(process: Any) -> None:
        process.kill()
        process.join()

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def result(self, rank: int) -> Any:
        """What a rank's body has returned, or the text of its RankError."""
        return self._pipes[rank].recv()


def _run(pipe: Any, segment: int, rank: int, n: int, limit_s: float, body: Callable[..., Any], args: Any) -> None:
    reduction = Reduction(segment, rank, n, limit_s=limit_s)
    pipe.send("joined")
    try:
        pipe.send(body(reduction, *args))
    except RankError as error:
        pipe.send(str(error))
