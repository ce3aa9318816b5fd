"""What coroutines of a node wait for: the first of two things, a condition, the end of tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

_POLL_SECONDS = 0.02
_T = TypeVar("_T")


async def run_until(work: Coroutine[Any, Any, _T], stop: Awaitable[object]) -> asyncio.Task[_T]:
    """Run `work` to its end, or cancel it once `stop` is done. Returns its task, which has ended: `cancelled()` says
    that `stop` came first. A future `stop` stays as it is; a coroutine begins before `work`, and is cancelled once
    `work` has ended."""
    stopping, task = asyncio.ensure_future(stop), asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(task, *([] if stopping is stop else [stopping]))
    return task


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until `condition()` is true, at most `seconds`. Returns whether it is true."""
    end = time.monotonic() + seconds
    while not (is_true := bool(condition())) and time.monotonic() < end:
        await asyncio.sleep(_POLL_SECONDS)
    return is_true
