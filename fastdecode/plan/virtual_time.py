"""An asyncio event loop whose clock jumps: it does not wait for the next timer, but sets the clock to its time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at 0 seconds. Nothing may wait for threads, files or sockets."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything waits in virtual time, and no timer is set")
        self._loop.now += max(0.0, timeout)
        return []


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end in virtual time. Raises RuntimeError if nothing can move any more."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
