"""RankTeam: the links of all ranks of a tensor-parallel S-Part to one R-node, as one link of rank 0.

Each rank has a link of its own for its heads (see team.py), and rings it in its own process. The sequences have the
same indexes on all of these links, so rank 0 sends each request to every rank, which passes it on (RemoteLink).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .base import CallRefused, DataPath, Lease, Link, LinkDown, TransportError
from .team import Team


class LinkFailure(NamedTuple):
    """The failure of a link, for another process."""

    status: int | None  # of a CallRefused; None: a LinkDown
    message: str


def described(error: TransportError) -> LinkFailure:
    """A TransportError for another process."""
    return LinkFailure(error.status if isinstance(error, CallRefused) else None, str(error))


def restored(failure: LinkFailure, link: DataPath | None = None) -> CallRefused | LinkDown:
    """The error that another process has described; it is the failure of `link`."""
    if failure.status is None:
        return LinkDown(failure.message, link)
    return CallRefused(failure.status, failure.message, link)


class Opened(NamedTuple):
    """A link that another rank has opened."""

    url: str
    lease: Lease
    region_bytes: int


def _remote(method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A method of RemoteLink that calls this one of the link in the rank's process."""

    async def call(link: RemoteLink, *arguments: object) -> Any:
        return await link._call(link.number, method, *arguments)

    return call


class RemoteLink(Link):
    """A link of another rank, without a data path here."""

    def __init__(
        self,
        number: int,
        opened: Opened,
        n_ranks: int,
        call: Callable[..., Coroutine[Any, Any, Any]],
        ended: asyncio.Future[LinkDown | None],
    ):
        """`number`: by which the rank knows the link. `call(number, method, *arguments)` calls a method of the link in
        the rank's process; it raises CallRefused and LinkDown. `ended`: done when the link has ended there."""
        self.number, self.url, self.lease = number, opened.url, opened.lease
        self._region_bytes, self._n_ranks = opened.region_bytes, n_ranks
        self._call, self._ended = call, ended

    @property
    def region_bytes(self) -> int:
        return self._region_bytes

    free, trim, fork = _remote("free"), _remote("trim"), _remote("fork")
    keep, find, adopt = _remote("keep"), _remote("find"), _remote("adopt")
    close = _remote("close")

    async def resize(self, n_pages: int) -> dict[str, int]:
        return self._of_one(await self._call(self.number, "resize", n_pages))

    async def stats(self) -> dict[str, int]:
        return self._of_one(await self._call(self.number, "stats"))

    def _of_one(self, stats: dict[str, int]) -> dict[str, int]:
        """The R-node tells each rank how many pages its lease could have if the others stayed as they are."""
        if "pages_max" not in stats:
            return stats
        total = stats["pages_total"]
        return stats | {"pages_max": total + (stats["pages_max"] - total) // self._n_ranks}

    async def leaving(self) -> None:
        await asyncio.Future()  # rank 0 hears of it by its own link

    async def closed(self) -> LinkDown | None:
        return await asyncio.shield(self._ended)


class RankTeam(Team):
    """The links of all ranks to one R-node, of which rank 0 rings its own."""

    def __init__(self, own: Link, others: Sequence[RemoteLink]):
        """Owns the links, and starts on the running event loop."""
        self.url, self.geometry, self.layout, self.region = own.url, own.geometry, own.layout, own.region
        self.steps, self._in_flight = {}, set()
        self.numbers = tuple(link.number for link in others)
        self._begin([own, *others], own.members)
        lease, n = self.lease, len(self.links)
        shared = lease.n_pages + (lease.max_pages - lease.n_pages) // n  # the ranks take what the R-node has free
        self.lease = replace(lease, node=own.lease.node, max_pages=shared)

    def _end_region(self) -> None:
        """The region is that of rank 0's own link."""
