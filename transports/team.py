"""Team: several R-nodes that share the heads of every layer, as one link (head-level partition; Lamina, arXiv
2405.01814).

Member i of n has the i-th n-th of each layer's KV heads, and the query heads that belong to them. All members have the
same sequences at the same indexes, so each request goes to every member. A member sees an ordinary link of a model with
fewer heads. The rows of a step are cut into columns by the StepGroup, which copies each member's columns to its slot
and the O columns back.

A team is as alive as its least member: when one link ends, the team ends the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from fastdecode.region.geometry import Geometry, region_layout
from fastdecode.region.region import Region

from .base import CallRefused, Hello, LayerOptions, Lease, Link, LinkDown, Member, TransportError

_T = TypeVar("_T")
#: Counters of Link.stats that are sums over the members.
_SUMS = ("kv_bytes", "region_bytes", "kv_free", "roofline")


def check_parts(heads: Iterable[tuple[int, ...]], n: int) -> None:
    """Raise TransportError if `n` R-nodes cannot share layers with these heads; see LayerOptions.heads."""
    for layer, (_, n_kv_heads, *_) in enumerate(heads):
        if n_kv_heads % n:
            raise TransportError(
                f"{n} R-nodes cannot share the {n_kv_heads} KV heads of layer {layer} evenly: the number of R-nodes "
                "must divide the KV heads of every layer"
            )


def part_of(hello: Hello, i: int, n: int) -> Hello:
    """The link that a team of `n` R-nodes asks its member `i` for, if one R-node would be asked for `hello`.

    Raises TransportError if the heads cannot be shared evenly.
    """
    g, options = hello.geometry, hello.layers
    heads = heads_of(hello)
    check_parts(heads, n)
    if options.slopes and any(n_q != g.n_q_heads for n_q, *_ in heads):
        raise TransportError("a model with ALiBi whose layers have different query heads cannot be split by heads")
    n_q = g.n_q_heads // n
    slopes = np.frombuffer(options.slopes, "<f4")[i * n_q : (i + 1) * n_q]
    return replace(
        hello,
        geometry=replace(g, n_q_heads=n_q, n_kv_heads=g.n_kv_heads // n),
        layers=replace(
            options,
            sinks=_sinks(options, heads, g, i, n),
            slopes=slopes.tobytes(),
            heads=tuple((q // n, kv // n, k_size, v_size) for q, kv, k_size, v_size in options.heads),
        ),
    )


def heads_of(hello: Hello) -> Sequence[tuple[int, int, int, int]]:
    """LayerOptions.heads of every layer."""
    g = hello.geometry
    return hello.layers.heads or ((g.n_q_heads, g.n_kv_heads, g.head_size, g.v_size),) * g.n_layers


def _sinks(options: LayerOptions, heads: Sequence[tuple[int, ...]], g: Geometry, i: int, n: int) -> bytes:
    """The sinks of a member's heads, fp32 [n_layers, n_q_heads / n]."""
    if not options.sinks:
        return b""
    sinks = np.zeros((g.n_layers, g.n_q_heads // n), "<f4")
    for part, whole, (n_q, *_) in zip(
        sinks, np.frombuffer(options.sinks, "<f4").reshape(g.n_layers, -1), heads, strict=True
    ):
        part[: n_q // n] = whole[i * n_q // n : (i + 1) * n_q // n]
    return sinks.tobytes()


def columns_of(hello: Hello, i: int, n: int) -> np.ndarray:
    """The columns of a step's rows that member `i` of `n` takes, as Member has them."""
    g, columns = hello.geometry, []
    element = region_layout(g).q_row_bytes // (g.n_q_heads * g.head_size)  # bytes
    for n_q, n_kv, k_size, v_size in heads_of(hello):
        # (where the heads begin, how many there are, elements of a head) in rows of Q, K, V and O
        v = (n_kv * k_size, n_kv, 0 if g.v_in_k else v_size)
        parts = ((0, n_q, k_size), (0, n_kv, k_size), v, (0, n_q, v_size))
        columns.append([[(at + j * heads // n * size) * element for j in (i, i + 1)] for at, heads, size in parts])
    return np.array(columns, np.uint32)


def member_key(key: str, i: int, n: int) -> str:
    """The key at which member `i` of `n` keeps its part of a sequence: another member cannot adopt that part."""
    return hashlib.blake2b(f"{i}/{n}".encode(), key=bytes.fromhex(key), digest_size=32).hexdigest()


class Team(Link):
    """A link whose heads are shared among the R-nodes of several links."""

    def __init__(self, links: Sequence[Link], hello: Hello):
        """Member i of n is `links[i]`, which was opened with part_of(hello, i, n). Owns the links, and starts on the
        running event loop. Raises RegionError."""
        self._region = Region.create(hello.geometry)
        super().__init__(" + ".join(link.url for link in links), self._region)
        self._begin(links, [Member(link, self._columns(hello, i, len(links))) for i, link in enumerate(links)])

    def _begin(self, links: Sequence[Link], members: Sequence[Member]) -> None:
        """Be the team of these links, whose data path are `members`."""
        self._links, self._members = tuple(links), tuple(members)
        self.lease = self._common_lease([link.lease for link in links])
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[LinkDown | None] = loop.create_future()
        self._task = loop.create_task(self._run(), name=f"team {self.url}")

    @property
    def links(self) -> Sequence[Link]:
        return self._links

    @property
    def members(self) -> Sequence[Member]:
        return self._members

    @property
    def region_bytes(self) -> int:
        return sum(link.region_bytes for link in self.links)

    def _columns(self, hello: Hello, i: int, n: int) -> np.ndarray:
        return columns_of(hello, i, n)

    # ---- data path ----

    def _rows(self, slot: int, n_attend: int, n_rows: int) -> Sequence[np.ndarray]:
        y = self.layout
        sizes = (y.q, n_attend, y.q_row_bytes), (y.kv, n_rows, y.kv_row_bytes), (y.o, n_attend, y.o_row_bytes)
        start = y.slot(slot)
        return [
            np.frombuffer(self.region, np.uint8, n * row_bytes, start + at).reshape(n, row_bytes)
            for at, n, row_bytes in sizes
        ]

    # ---- control path ----

    async def free(self, handles: Sequence[tuple[int, int]]) -> None:
        await self._each(lambda link: link.free(handles))

    async def trim(self, seq_index: int, tag: int, length: int) -> None:
        links = enumerate(self.links)
        await self._all(link.trim(seq_index, tag, self._part_length(length, i)) for i, link in links)

    async def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None:
        lengths = [self._part_length(length, i) for i in range(len(self.links))]
        try:
            await self._all(link.fork(src, dst, k) for link, k in zip(self.links, lengths, strict=True) if k)
        except CallRefused:
            with contextlib.suppress(CallRefused):  # of the members that have refused the fork
                await self.free([dst])
            raise

    async def keep(self, sequences: Sequence[tuple[int, int, str | None]]) -> None:
        n = len(self.links)
        await self._all(
            link.keep([(index, tag, key and member_key(key, i, n)) for index, tag, key in sequences])
            for i, link in enumerate(self.links)
        )

    async def find(self, key: str, length: int) -> bool:
        return all(await self._all(link.find(own, k) for link, own, k in self._parts_of(key, length)))

    async def adopt(self, seq: tuple[int, int], length: int, key: str) -> None:
        await self._all(link.adopt(seq, k, own) for link, own, k in self._parts_of(key, length))

    def _parts_of(self, key: str, length: int) -> list[tuple[Link, str, int]]:
        """The members that have some of the first `length` tokens of a sequence, each with its key and how many."""
        n = len(self.links)
        parts = [(link, member_key(key, i, n), self._part_length(length, i)) for i, link in enumerate(self.links)]
        return [part for part in parts if part[2]]

    def _part_length(self, length: int, i: int) -> int:
        """How many of the first `length` tokens of a sequence member `i` keeps."""
        return length

    async def resize(self, n_pages: int) -> dict[str, int]:
        return self._common_stats(await self._each(lambda link: link.resize(n_pages)))

    async def stats(self) -> dict[str, int]:
        return self._common_stats(await self._each(lambda link: link.stats()))

    async def _each(self, request: Callable[[Link], Awaitable[_T]]) -> list[_T]:
        """Send a request to all members at once, and wait for all answers. Raises as _all does."""
        return await self._all(request(link) for link in self.links)

    async def _all(self, requests: Iterable[Awaitable[_T]]) -> list[_T]:
        """Wait for all answers. Raises a LinkDown, else a CallRefused."""
        answers = await asyncio.gather(*requests, return_exceptions=True)
        try:
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            if errors:
                raise min(errors, key=lambda error: not isinstance(error, LinkDown))
            return [answer for answer in answers if not isinstance(answer, BaseException)]
        finally:
            # The traceback of an error holds this frame: a cycle that would keep the regions mapped.
            del answers, errors

    # ---- end ----

    async def _run(self) -> None:
        """Wait for the end of a member's link, and end the others."""
        ends = [asyncio.ensure_future(link.closed()) for link in self.links]
        error: LinkDown | None = None
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if lost := [down for end in done if (down := end.result())]:
                error = LinkDown(f"a member of the team was lost: {lost[0]}")
        finally:
            freeing = asyncio.gather(*(link.close() for link in self.links))
            await asyncio.gather(*ends)
            self.steps.clear()
            self._ended.set_result(error)
            await freeing
            self._end_region()

    def _end_region(self) -> None:
        self._region.close()

    async def leaving(self) -> None:
        waiting = [asyncio.ensure_future(link.leaving()) for link in self.links]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for member in waiting:
                member.cancel()

    async def closed(self) -> LinkDown | None:
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self.links))
        await asyncio.shield(self._task)

    # ---- lease and counters ----

    @staticmethod
    def _common_lease(leases: Sequence[Lease]) -> Lease:
        """The lease of a team: the pages and sequences that each member has at least, and pages of all heads."""
        return Lease(
            n_pages=min(lease.n_pages for lease in leases),
            max_pages=min(lease.max_pages for lease in leases),
            max_seqs=min(lease.max_seqs for lease in leases),
            page_bytes=sum(lease.page_bytes for lease in leases),
            isa=" + ".join(dict.fromkeys(lease.isa for lease in leases)),
            threads=sum(lease.threads for lease in leases),
            node=" + ".join(lease.node for lease in leases),
            # All members divide the layers alike, because each has the same share of every layer's heads.
            full_sections=leases[0].full_sections,
            limited_sections=leases[0].limited_sections,
            reach=leases[0].reach,
        )

    def _common_stats(self, members: Sequence[dict[str, int]]) -> dict[str, int]:
        """The counters of a team: sums of bytes, the longest time, and the least of everything else."""
        common = {name: min(counters.get(name, 0) for counters in members) for name in members[0]}
        common |= {name: sum(counters[name] for counters in members) for name in _SUMS if name in common}
        if "busy_ns" in common:
            common["busy_ns"] = max(counters["busy_ns"] for counters in members)
        return common
