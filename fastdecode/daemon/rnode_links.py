"""The links of an S-node: opened at start, and opened again when an R-node is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastdecode.daemon.config import format_bytes
from fastdecode.kernels._native import page_bytes
from fastdecode.region.contract import KV_DTYPES, PAGE_TOKENS
from fastdecode.region.geometry import geometry_tuple
from fastdecode.transports.base import Hello, Link, LinkDown, TransportError
from fastdecode.transports.registry import connect

if TYPE_CHECKING:
    from fastdecode.daemon.config import NodeConfig
    from fastdecode.daemon.embedded import EmbeddedRNode
    from fastdecode.engine.engine import Engine

log = logging.getLogger(__name__)

#: Pauses before the first, second, ... attempt to reach a lost R-node. The last pause repeats. A link that has lasted
#: `_STABLE_SECONDS` starts the series anew.
_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
_STABLE_SECONDS = 60.0
_LEAST_SECONDS = 5.0  # for a hand-shake, however short --connect-seconds is
_RETRY_SECONDS = 0.5  # pause between attempts at start
#: The most that a lease that grows begins with.
_FIRST_LEASE_BYTES = 1 << 30


def first_lease(hello: Hello, longest: int) -> int:
    """Bytes with which a lease that grows begins: room for a sequence of `longest` tokens, but at most 1 GiB."""
    one_page = page_bytes(geometry_tuple(hello.geometry), KV_DTYPES.index(hello.kv_dtype), **hello.layers.stored)
    return max(1, min(-(-longest // PAGE_TOKENS), _FIRST_LEASE_BYTES // one_page)) * one_page


class RNodeLinks:
    """All links of one S-node. `links[i]` is the current link to the i-th R-node, alive or not."""

    def __init__(
        self,
        urls: Sequence[str],
        hello: Hello,
        secret: bytes | None,
        config: NodeConfig,
        embedded: EmbeddedRNode | None = None,
    ):
        """`embedded` is the child process behind the only URL, which is started again when it is lost."""
        self.links: list[Link] = []
        self._urls = urls
        self._hello = hello
        self._secret = secret
        self._config = config
        self._embedded = embedded
        self._watchers: list[asyncio.Task[None]] = []

    async def open(self) -> list[Link]:
        """Open a link to each R-node, and wait up to `connect_seconds` in all for R-nodes that cannot be reached yet.

        Raises LinkDown after that time; LinkRefused and TransportError at once.
        """
        deadline = time.monotonic() + (0 if self._embedded else self._config.connect_seconds)
        for url in self._urls:
            self.links.append(await self._open_until(url, deadline))
        return list(self.links)

    async def _open_until(self, url: str, deadline: float) -> Link:
        last_message = None
        while True:
            try:
                # An embedded R-node has no deadline of its own: it was started a moment ago.
                async with asyncio.timeout(
                    None if self._embedded else max(_LEAST_SECONDS, deadline - time.monotonic())
                ):
                    return await self._open(url)
            except TimeoutError:
                seconds = self._config.connect_seconds
                raise LinkDown(f"{url} did not finish the hand-shake within {seconds:g} s: is it an R-node?") from None
            except LinkDown as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                if str(error) != last_message:
                    last_message = str(error)
                    log.warning("%s; trying again for %.0f s", last_message, left)
            await asyncio.sleep(min(_RETRY_SECONDS, left))

    async def _open(self, url: str) -> Link:
        link = await connect(url, self._hello, self._secret, spin_us=self._config.spin_us)
        if self._embedded:
            self._embedded.remove_socket()
        lease = link.lease
        log.info(
            "R-node %s: %s, %d thread(s); leased: %d tokens of %s KV-cache (%s); at most %d; activation region %s",
            url,
            lease.isa,
            lease.threads,
            lease.n_pages * PAGE_TOKENS,
            self._config.kv_dtype,
            format_bytes(lease.n_pages * lease.page_bytes),
            lease.max_pages * PAGE_TOKENS,
            format_bytes(link.layout.region_bytes),
        )
        return link

    def watch(self, engine: Engine) -> None:
        """Start a task for each R-node that opens a new link when the R-node is lost, and gives it to the engine."""
        for index in range(len(self.links)):
            watch = asyncio.create_task(self._watch(index, engine))
            watch.add_done_callback(_log_failure)
            self._watchers.append(watch)

    async def _watch(self, index: int, engine: Engine) -> None:
        attempt = 0
        while True:
            opened_at = time.monotonic()
            if await self.links[index].closed() is None:
                return
            if time.monotonic() - opened_at > _STABLE_SECONDS:
                attempt = 0
            while not await self._reconnect(index, attempt):
                attempt += 1
            attempt += 1
            engine.replace_link(index, self.links[index])
            log.info("R-node %s is back", self._urls[index])

    async def _reconnect(self, index: int, attempt: int) -> bool:
        """Try once to open a new link to a lost R-node. Returns whether there is one."""
        await asyncio.sleep(_PAUSES_SECONDS[min(attempt, len(_PAUSES_SECONDS) - 1)])
        try:
            if self._embedded:
                await self._embedded.restart()
            self.links[index] = await self._open(self._urls[index])
        except (TransportError, OSError, RuntimeError) as reason:
            log.log(logging.WARNING if self._embedded else logging.DEBUG, "R-node %s: %s", self._urls[index], reason)
            return False
        return True

    def unwatch(self) -> None:
        """Stop the tasks of `watch`."""
        for watch in self._watchers:
            watch.cancel()

    async def close(self) -> None:
        """Close all links."""
        await asyncio.gather(*(link.close() for link in self.links))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("the task that reconnects an R-node has failed", exc_info=error)
