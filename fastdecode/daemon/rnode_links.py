"""The links of an S-node: opened at start, opened again when an R-node is lost, and opened and closed as R-nodes join
and leave the set (discovery.py)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastdecode.daemon.discovery import NodeSet, readings
from fastdecode.daemon.first_answers import first_answers
from fastdecode.daemon.kv_pages import KVPages
from fastdecode.daemon.option_values import format_bytes
from fastdecode.daemon.tasks import cancel, run_until
from fastdecode.region.contract import PAGE_TOKENS
from fastdecode.transports.base import Hello, Link, TransportError
from fastdecode.transports.partition import connect_team

if TYPE_CHECKING:
    from fastdecode.daemon.config import NodeConfig
    from fastdecode.daemon.embedded import EmbeddedRNode
    from fastdecode.daemon.ranks import Ranks
    from fastdecode.engine.engine import Engine

log = logging.getLogger(__name__)

#: Pauses before the first, second, ... attempt to reach a lost R-node. The last pause repeats. A link that has lasted
#: `_STABLE_SECONDS` starts the series anew.
_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
_STABLE_SECONDS = 60.0
#: The most that a lease that grows begins with.
_FIRST_LEASE_BYTES = 1 << 30


def first_lease(hello: Hello, longest: int) -> int:
    """Bytes with which a lease that grows begins: room for a sequence of `longest` tokens, but at most 1 GiB."""
    pages = KVPages.from_hello(hello)
    wanted = min(pages.groups(hello.geometry.max_rows).pages_for(longest), _FIRST_LEASE_BYTES // pages.page_bytes)
    return max(pages.block, wanted) * pages.page_bytes


#: What the members of a team share, by the name of the partition.
_SHARED = {"heads": "KV heads", "tokens": "tokens"}


@dataclass(slots=True, eq=False)
class _Member:
    """An R-node of the set, or one that is leaving it."""

    url: str
    link: Link | None = None  # the current link, alive or not; None: none has been opened yet
    position: int | None = None  # in the engine; None: the engine does not use it
    task: asyncio.Task[None] | None = None  # keeps it linked or, once it has left the set, empties it


class RNodeLinks:
    """All links of one S-node."""

    def __init__(
        self,
        r_nodes: NodeSet,
        hello: Hello,
        secret: bytes | None,
        config: NodeConfig,
        embedded: EmbeddedRNode | None = None,
        resident: Link | None = None,
        ranks: Ranks | None = None,
    ):
        """`embedded` is the R-node behind the only URL, which is started again when it is lost. `resident` is the link
        to KV pages on the S-Part's device. Each of the S-node's `ranks` gets links of its own."""
        self._r_nodes = r_nodes
        self._hello = hello
        self._secret = secret
        self._config = config
        self._embedded = embedded
        self._first: list[Link] = [] if resident is None else [resident]  # the engine's first links
        self._ranks = ranks
        self._members: list[_Member] = []
        self._leaving: dict[str, _Member] = {}
        self._following: asyncio.Task[None] | None = None

    # -- start ----------------------------------------------------------------------------------------------------

    async def open(self) -> list[Link]:
        """Open the links, and wait up to `connect_seconds` in all for R-nodes that cannot be reached yet. Of a set that
        may change, one R-node is enough; `watch` opens the links to the others. Returns the links, the resident one
        first. The S-Part changes the list; a copy would keep the regions of lost links mapped.

        Raises LinkDown after that time; LinkRefused and TransportError at once.
        """
        answers = await first_answers(
            self._r_nodes,
            self._open,
            0 if self._embedded else self._config.connect_seconds,
            is_up=self._embedded is not None,
        )
        self._members = [_Member(url, link) for url, link in answers.items()]
        links = [*self._first]
        for member in self._members:
            if member.link is not None:
                member.position = len(links)
                links.append(member.link)
        return links

    async def _open(self, url: str) -> Link:
        address, _, peer_url = url.partition("#")
        urls = self._config.r_node if self._config.parts > 1 else (address,)
        team, spin_us = self._config.team, self._config.spin_us
        link = await connect_team(urls, self._hello, self._secret, partition=team, spin_us=spin_us)
        link.peer_url = peer_url or None
        if self._embedded:
            self._embedded.remove_socket()
        if self._ranks is not None:
            link = await self._ranks.team(link, None if self._embedded else address, self._hello)
        for member in link.links:
            lease = member.lease
            block = lease.full_sections + lease.limited_sections
            room, most = (n_pages // block * PAGE_TOKENS for n_pages in (lease.n_pages, lease.max_pages))
            log.info(
                "R-node %s attends by %s in %d thread(s); its lease has room for %d tokens of %s KV-cache (%s)%s; "
                "the activation region takes %s%s",
                member.url,
                lease.isa,
                lease.threads,
                room,
                self._config.kv_dtype,
                format_bytes(lease.n_pages * lease.page_bytes),
                f", and for {most} once it has grown" if most > room else "",
                format_bytes(member.region_bytes),
                f"; sequences longer than their windows of {lease.reach} take less" if lease.limited_sections else "",
            )
        if len(urls) > 1:
            log.info("these %d R-nodes share the %s of every sequence", len(urls), _SHARED[team])
        return link

    # -- while the node runs --------------------------------------------------------------------------------------

    def watch(self, engine: Engine) -> None:
        """Keep a link to every R-node of the set: open a new one when an R-node is lost or joins, empty and close those
        of R-nodes that leave."""
        for member in self._members:
            self._start(member, self._keep(member, engine))
        if self._r_nodes.interval is not None:
            self._following = asyncio.create_task(self._follow(engine))
            self._following.add_done_callback(_log_failure)

    @staticmethod
    def _start(member: _Member, work: Coroutine[None, None, None]) -> None:
        member.task = asyncio.create_task(work)
        member.task.add_done_callback(_log_failure)

    async def _keep(self, member: _Member, engine: Engine) -> None:
        attempt, lost = 0, False
        while True:
            opened_at = time.monotonic()
            if member.link is not None:
                closing = await run_until(member.link.closed(), member.link.leaving())
                if closing.cancelled():
                    log.info("R-node %s is about to end; emptying it", member.url)
                    await self._give_up(member, engine)
                elif closing.result() is None:
                    return
                lost = True
            if time.monotonic() - opened_at > _STABLE_SECONDS:
                attempt = 0
            pause = lost  # an R-node that has just joined is connected to at once
            while (link := await self._connect(member.url, attempt if pause else None)) is None:
                attempt, pause = attempt + 1, True
            attempt += 1
            member.link = link
            if member.position is None:
                member.position = engine.add_link(link)
                log.info("R-node %s has joined", member.url)
            else:
                engine.replace_link(member.position, link)
                log.info("R-node %s is back", member.url)

    async def _connect(self, url: str, attempt: int | None) -> Link | None:
        """Try once to open a link, after a pause unless `attempt` is None. None: it has failed."""
        if attempt is not None:
            await asyncio.sleep(_PAUSES_SECONDS[min(attempt, len(_PAUSES_SECONDS) - 1)])
        try:
            if self._embedded:
                await self._embedded.restart()
            return await self._open(url)
        except (TransportError, OSError, RuntimeError, ValueError) as reason:
            loud = self._embedded or not attempt
            log.log(logging.WARNING if loud else logging.DEBUG, "R-node %s: %s", url, reason)
            return None

    async def _follow(self, engine: Engine) -> None:
        """Follow the changes of the set."""
        async for urls in readings(self._r_nodes, "R-nodes"):
            known = {member.url for member in self._members}
            for member in [m for m in self._members if m.url not in urls]:
                self._members.remove(member)
                await self._leave(member, engine)
            for url in urls:
                if url not in known:
                    await self._join(url, engine)

    async def _join(self, url: str, engine: Engine) -> None:
        member = self._leaving.pop(url, None) or _Member(url)
        if member.task is not None:  # it is being emptied: it may stay
            await cancel(member.task)
            if member.position is not None:
                engine.r_nodes.end_drain(member.position)
            elif member.link is not None:
                link, member.link = member.link, None
                await link.close()
        log.info("R-node %s joins the set", url)
        self._members.append(member)
        self._start(member, self._keep(member, engine))

    async def _leave(self, member: _Member, engine: Engine) -> None:
        log.info("R-node %s has left the set%s", member.url, "" if member.position is None else "; emptying it")
        if member.task is not None:
            await cancel(member.task)
        self._leaving[member.url] = member
        self._start(member, self._empty(member, engine))

    async def _empty(self, member: _Member, engine: Engine) -> None:
        """Empty an R-node that has left the set, and close its link."""
        await self._give_up(member, engine)
        if self._leaving.get(member.url) is member:
            del self._leaving[member.url]

    async def _give_up(self, member: _Member, engine: Engine) -> None:
        """Empty an R-node, and close its link."""
        if member.position is not None:
            await engine.r_nodes.drain(member.position)
            position, member.position = member.position, None
            await asyncio.shield(engine.r_nodes.retire(position))
        link, member.link = member.link, None
        if link is not None:
            await link.close()
        log.info("R-node %s is no longer used", member.url)

    def unwatch(self) -> None:
        """Stop what `watch` has started."""
        if self._following is not None:
            self._following.cancel()
        for member in [*self._members, *self._leaving.values()]:
            if member.task is not None:
                member.task.cancel()

    async def close(self) -> None:
        """Close all links."""
        members = [*self._members, *self._leaving.values()]
        await asyncio.gather(*(member.link.close() for member in members if member.link is not None))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("a task that keeps the links to R-nodes has failed", exc_info=error)
