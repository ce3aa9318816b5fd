"""How an S-node reaches its R-nodes: all of them at start, and each again when it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastdecode.transports.base import PAGE_TOKENS, Hello, Link, LinkDown, TransportError
from fastdecode.transports.registry import connect

if TYPE_CHECKING:
    from fastdecode.daemon.config import NodeConfig
    from fastdecode.daemon.embedded import EmbeddedRNode
    from fastdecode.engine.engine import Engine

log = logging.getLogger(__name__)

#: Before one more attempt to reach an R-node that was lost; from the first again once a link has lasted.
_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
_LASTED_SECONDS = 60.0
_RETRY_SECONDS = 0.5  # at start


class RNodeLinks:
    """The R-nodes of one S-node, each with the link it has now."""

    def __init__(
        self,
        urls: Sequence[str],
        hello: Hello,
        secret: bytes | None,
        config: NodeConfig,
        embedded: EmbeddedRNode | None = None,
    ):
        """`embedded`: the child that the only URL is of. It is started again when it is lost."""
        self.links: list[Link] = []
        self._urls = urls
        self._hello = hello
        self._secret = secret
        self._config = config
        self._embedded = embedded
        self._watches: list[asyncio.Task[None]] = []

    async def open(self) -> list[Link]:
        """Open a link to each; who cannot be reached yet is waited for, `connect_seconds` in all.

        Raises LinkDown after that, and LinkRefused, TransportError at once.
        """
        deadline = time.monotonic() + (0 if self._embedded else self._config.connect_seconds)
        for url in self._urls:
            self.links.append(await self._open_until(url, deadline))
        return list(self.links)

    async def _open_until(self, url: str, deadline: float) -> Link:
        told = None
        while True:
            try:
                return await self._open(url)
            except LinkDown as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                if str(error) != told:
                    told = str(error)
                    log.warning("%s; trying again for %.0f s", told, left)
            await asyncio.sleep(min(_RETRY_SECONDS, left))

    async def _open(self, url: str) -> Link:
        link = await connect(url, self._hello, self._secret, spin_us=self._config.spin_us)
        if self._embedded:
            self._embedded.hide()
        lease = link.lease
        log.info(
            "R-node %s: %s, %d thread(s), room for %d tokens of %s KV-cache",
            url,
            lease.isa,
            lease.threads,
            lease.n_pages * PAGE_TOKENS,
            self._config.kv_dtype,
        )
        return link

    def watch(self, engine: Engine) -> None:
        """From now on, reach each R-node that is lost again, and give the engine its new link."""
        for position in range(len(self.links)):
            watch = asyncio.create_task(self._watch(position, engine))
            watch.add_done_callback(_log_failure)
            self._watches.append(watch)

    async def _watch(self, position: int, engine: Engine) -> None:
        attempt = 0
        while True:
            opened = time.monotonic()
            if await self.links[position].closed() is None:
                return
            if time.monotonic() - opened > _LASTED_SECONDS:
                attempt = 0
            while not await self._again(position, attempt):
                attempt += 1
            attempt += 1
            engine.replace_link(position, self.links[position])
            log.info("R-node %s is back", self._urls[position])

    async def _again(self, position: int, attempt: int) -> bool:
        """Try to reach one that was lost."""
        await asyncio.sleep(_PAUSES_SECONDS[min(attempt, len(_PAUSES_SECONDS) - 1)])
        try:
            if self._embedded:
                await self._embedded.restart()
            self.links[position] = await self._open(self._urls[position])
        except (TransportError, OSError, RuntimeError) as reason:
            log.log(logging.WARNING if self._embedded else logging.DEBUG, "R-node %s: %s", self._urls[position], reason)
            return False
        return True

    def unwatch(self) -> None:
        for watch in self._watches:
            watch.cancel()

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self.links))


def _log_failure(task: asyncio.Task) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("an R-node is no longer watched", exc_info=error)
