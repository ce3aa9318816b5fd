"""first_answers: asks the R-nodes of a set at start, and waits for R-nodes that cannot be reached yet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from fastdecode.daemon.discovery import DiscoveryError, NodeSet
from fastdecode.transports.base import LinkDown

log = logging.getLogger(__name__)

_LEAST_SECONDS = 5.0  # for a hand-shake, however short the time is
_RETRY_SECONDS = 0.5  # pause between attempts
_T = TypeVar("_T")


async def first_answers(
    r_nodes: NodeSet, ask: Callable[[str], Awaitable[_T]], seconds: float, *, is_up: bool = False
) -> dict[str, _T | None]:
    """What `ask(url)` returns for every R-node of the set, in its order. R-nodes that cannot be reached are asked again
    for up to `seconds` in all. Of a set that may change, one answer is enough; the others are None then.

    `is_up`: the R-node was started a moment ago, so its hand-shake has no limit. Raises LinkDown after that time, and
    other TransportErrors of `ask` at once.
    """
    deadline = time.monotonic() + seconds

    async def answer(url: str) -> _T:
        last_message = None
        while True:
            try:
                async with asyncio.timeout(None if is_up else max(_LEAST_SECONDS, deadline - time.monotonic())):
                    return await ask(url)
            except TimeoutError:
                raise LinkDown(f"{url} did not finish the hand-shake within {seconds:g} s: is it an R-node?") from None
            except LinkDown as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkDown(f"{error} (is it running? --connect-seconds waits longer for it)") from None
                if str(error) != last_message:
                    last_message = str(error)
                    log.warning("%s; trying again for %.0f s", last_message, left)
            await asyncio.sleep(min(_RETRY_SECONDS, left))

    urls = await _first_set(r_nodes, deadline)
    if r_nodes.interval is None:
        return {url: await answer(url) for url in urls}
    asking = {url: asyncio.create_task(answer(url)) for url in urls}
    try:
        await _first_of(asking.values())
    finally:
        for task in asking.values():
            task.cancel()
        ended = await asyncio.gather(*asking.values(), return_exceptions=True)
    return {url: None if isinstance(end, BaseException) else end for url, end in zip(asking, ended, strict=True)}


async def _first_set(r_nodes: NodeSet, deadline: float) -> list[str]:
    last_message = None
    while True:
        try:
            return list(await r_nodes.read())
        except DiscoveryError as error:
            if time.monotonic() >= deadline:
                raise LinkDown(f"no R-nodes: {error}") from None
            if str(error) != last_message:
                last_message = str(error)
                log.warning("no R-nodes: %s; trying again", last_message)
        await asyncio.sleep(_RETRY_SECONDS)


async def _first_of(asking: Iterable[asyncio.Task[_T]]) -> None:
    """Wait for an answer, and a moment more for others. Raises TransportError if there is none."""
    pending, error = set(asking), None
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if any(task.exception() is None for task in done):
            if pending:
                await asyncio.wait(pending, timeout=_RETRY_SECONDS)
            return
        error = next(iter(done)).exception()
    assert error is not None, "the set is not empty"
    raise error
