"""The R-node: grants links to S-nodes, over one R-engine and any number of transports.

This module opens and closes links. It is not on the data path: the R-engine's threads (kernels/engine/engine.h) serve
the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastdecode.daemon.kv_pages import KVPages
from fastdecode.daemon.machine import huge_pages as machine_huge_pages
from fastdecode.daemon.machine import numa_nodes
from fastdecode.daemon.migrations import Inbox, IncomingSequence, Migrations, OfferedSequence
from fastdecode.daemon.option_values import format_bytes
from fastdecode.daemon.orphans import KeyedLease, Orphans, page_format
from fastdecode.daemon.rnode_gpu import RNodeGpu
from fastdecode.daemon.tasks import wait_until
from fastdecode.kernels._native import REngine, REngineLink, bind_memory
from fastdecode.region.contract import MAX_PAGES, MAX_SEQS, PAGE_TOKENS, Status
from fastdecode.transports import registry
from fastdecode.transports.base import CallRefused, Hello, Lease, LinkRefused, Server, refusals

log = logging.getLogger(__name__)
_quiet_log = logging.getLogger(f"{__name__}.quiet")
_quiet_log.setLevel(logging.WARNING)

_SPIN_US = 100
_PROGRESS_SECONDS = 2.0
#: Leases in larger hugetlb pages do not grow: a lease that grows takes whole ones in every layer.
_MAX_GROWING_HUGETLB = 2 << 20
#: Layers of all leases that may grow. Each layer takes two memory mappings, and a process may have 65,530 of them.
_MAX_GROWING_LAYERS = 16384


def bind_to_node(number: int) -> None:
    """Bind this thread, and the threads that it starts from now on, to the cpus and the memory of a NUMA node.

    Raises ValueError if there is no such node or this process may use none of its cpus, OSError if the kernel refuses.
    """
    cpus = {node.number: node.cpus for node in numa_nodes()}
    if number not in cpus:
        raise ValueError(f"there is no NUMA node {number}, there are: {', '.join(map(str, cpus)) or 'none'}")
    usable = os.sched_getaffinity(0).intersection(cpus[number])
    if not usable:
        raise ValueError(f"this process may use none of the cpus of NUMA node {number}")
    os.sched_setaffinity(0, usable)
    try:
        bind_memory(number)
    except OSError as error:
        hint = "; in a container this needs CAP_SYS_NICE" if isinstance(error, PermissionError) else ""
        raise OSError(error.errno, f"cannot bind memory to NUMA node {number}: {error.strerror}{hint}") from None


class RNode:
    """Grants leases of one R-engine's KV-cache (a transports.base.LinkService)."""

    def __init__(
        self,
        *,
        threads: int,
        kv_bytes: int,
        cpus: Sequence[int] | None = None,
        spin_us: int | None = None,
        step_spin_us: int = 0,
        name: str | None = None,
        huge_pages: str = "madvise",
        prefault: bool = False,
        max_lease: int | None = None,
        stand_in: bool = False,
        quiet: bool = False,
        orphan_seconds: float = 0.0,
        gpu: RNodeGpu | None = None,
    ):
        """Start the R-engine.

        Args:
            kv_bytes: memory that all leases share, and the links' activation regions with them.
            cpus: the cpu of each thread, [threads]; None: threads are not pinned.
            spin_us: microseconds that an idle thread spins before it sleeps; None: 100.
            step_spin_us: the same while a step is under way, if it is longer.
            name: the R-node's name for S-nodes and logs; None: host name and process id.
            huge_pages, prefault: see kernels._native.REngine.
            max_lease: bytes of KV-cache that one link may have; None: all.
            stand_in: let waiters of this process, over shared memory, do the work of the R-engine's thread 0.
            quiet: log no more than warnings.
            orphan_seconds: how long sequences that have keys outlive their link; see orphans.py.
            gpu: the GPU whose memory `kv_bytes` are, and that attends; None: the host's memory, and its threads.

        Raises ValueError (a bad value), RuntimeError (threads cannot start, or too few hugetlb pages are free).
        """
        self.log = _quiet_log if quiet else log
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        spin_us = _SPIN_US if spin_us is None else spin_us
        self._gpu = gpu
        device = -1 if gpu is None else gpu.index
        self._engine = REngine(threads, kv_bytes, None, cpus, spin_us, huge_pages, prefault, step_spin_us, device)
        self.stand_in = self._engine.stand_in if stand_in else None
        self.kv_bytes = kv_bytes  # of all leases and activation regions
        self._max_lease = kv_bytes if max_lease is None else max_lease
        self._grows = gpu is None and (huge_pages != "hugetlb" or machine_huge_pages().size <= _MAX_GROWING_HUGETLB)
        self._regions: dict[REngineGrant, int] = {}  # bytes of each open link's activation region
        self._prefault = prefault
        self._prefault_logs: set[asyncio.Task[None]] = set()
        self._servers: list[Server] = []
        self._inbox = Inbox()
        self.orphans = Orphans(orphan_seconds)
        self._secret: bytes | None = None
        self.roofline = 0  # bytes a second at which the threads' cores can read memory; 0: not measured

    @property
    def on_gpu(self) -> bool:
        return self._gpu is not None

    @property
    def isa(self) -> str:
        return self._engine.isa if self._gpu is None else self._gpu.isa

    @property
    def kv_free(self) -> int:
        """Bytes of the KV-cache's memory that no lease and no activation region has."""
        regions = 0 if self._gpu else sum(self._regions.copy().values())  # beside a GPU they are in the host's memory
        return max(0, self._engine.kv_free - regions)

    async def serve(self, urls: Sequence[str], secret: bytes | None, *, insecure: bool = False) -> list[str]:
        """Serve links at all of `urls`. Returns the URLs with the ports that were assigned. Raises TransportError."""
        bound = []
        self._secret = secret
        for url in urls:
            server = await registry.serve(url, self, secret, insecure=insecure)
            self._servers.append(server)
            bound.append(server.url)
        return bound

    async def drain(self, seconds: float) -> None:
        """Open no more links, tell the S-nodes that this R-node is about to end, and wait until all of them have moved
        their sequences away and closed their links, but at most `seconds`."""
        for server in self._servers:
            server.leave()
        await wait_until(lambda: not self._regions, seconds)

    async def close(self) -> None:
        """Stop listening, end all links and join the R-engine's threads. Idempotent."""
        while self._servers:
            await self._servers.pop().close()
        for task in self._prefault_logs:
            task.cancel()
        await self.orphans.close()
        self._engine.close()

    async def prepare(self, hello: Hello) -> None:
        """Compile the GPU's kernels for a link. Raises LinkRefused."""
        if self._gpu is not None:
            _pages_of(hello)
            await self._gpu.prepare(hello)

    def open_link(self, hello: Hello, region: memoryview, carrier: object | None) -> REngineGrant:
        """Grant a lease with as many pages as `hello` asks for, or as there is memory for. Raises LinkRefused."""
        pages = _pages_of(hello)
        beside = 0 if self._gpu else region.nbytes
        self._make_room(pages, hello.kv_bytes, beside)
        n_pages, max_pages = self._size_lease(pages, hello.kv_bytes, beside)
        options: dict[str, Any] = hello.layers.used()
        if self._gpu is not None:
            options["gpu_kernels"] = self._gpu.kernels(hello)
        try:
            link = self._engine.add_link(
                region,
                pages.geometry,
                pages.kv_dtype,
                n_pages,
                hello.max_seqs,
                hello.softmax_scale,
                hello.windows,
                carrier,
                max_pages,
                **options,
            )
        except (ValueError, MemoryError) as error:
            raise LinkRefused(f"the R-engine refused the link: {error}") from None
        threads, size = self._engine.threads, pages.page_bytes
        lease = Lease(n_pages, max_pages, hello.max_seqs, size, self.isa, threads, self.name, *pages.sections)
        grant = REngineGrant(self, link, lease, pages, region.nbytes, KeyedLease(link, page_format(hello)))
        self._regions[grant] = region.nbytes
        self.log_prefault(link)
        sizes = (n_pages * size, max_pages * size, region.nbytes, self.kv_free, self.kv_bytes)
        text = "lease of %s granted, %s at most, and an activation region of %s; %s of %s are free"
        self.log.info(text, *map(format_bytes, sizes))
        return grant

    def _make_room(self, pages: KVPages, wanted: int | None, region_bytes: int) -> None:
        """Free orphans for a new lease of `wanted` bytes; None: for as large a one as can be."""
        needed = min(self._max_lease, self.kv_bytes) if wanted is None else max(wanted, pages.block_bytes)
        self.orphans.make_room(lambda: self.kv_free >= needed + region_bytes)

    def _size_lease(self, pages: KVPages, wanted: int | None, region_bytes: int) -> tuple[int, int]:
        """The pages that a lease of `wanted` bytes begins with, and the most that it may grow to, beside an activation
        region. None: all that one link may have. On a GPU a lease has the memory for all that it may grow to. Raises
        LinkRefused."""
        free = self.kv_free - region_bytes
        most = min(self._max_lease, self.kv_bytes - region_bytes)
        wanted = most if wanted is None else wanted
        max_pages = min(most // pages.page_bytes, MAX_PAGES)
        if self._gpu:
            max_pages = min(max_pages, self.pages_within(pages, free, grows=False))
        first_pages = min(wanted // pages.page_bytes, max_pages)
        growing_layers = sum(grant.growing_layers for grant in self._regions.copy())
        if self._grows and growing_layers + pages.n_layers <= _MAX_GROWING_LAYERS:
            n_pages = min(first_pages, self.pages_within(pages, free))
            if n_pages >= pages.block:
                return n_pages, max_pages
        # Without room for growth, a smaller piece of memory may do.
        n_pages = min(first_pages, self.pages_within(pages, free, grows=False))
        if n_pages >= pages.block:
            return n_pages, max_pages if self._gpu else n_pages
        raise LinkRefused(
            f"no memory for a KV-cache: {wanted} bytes wanted beside an activation region of {region_bytes}, "
            f"{self.kv_free} free of the {self.kv_bytes} that R-node {self.name} has for all its S-nodes; one of "
            f"them may lease {self._max_lease}, and {PAGE_TOKENS} tokens of this model take {pages.block_bytes}"
        )

    def migration_target(self, token: str, page_bytes: int) -> IncomingSequence | OfferedSequence:
        """The sequence that `token` admits a migration connection for. Raises LinkRefused."""
        return self._inbox.take(token, page_bytes)

    def migrations(self, lease: KeyedLease, page_bytes: int) -> Migrations:
        """The transfers of a link, whose blocks have `page_bytes`."""
        return Migrations(lease, page_bytes, self._inbox, self.orphans, self._secret)

    def pages_within(self, pages: KVPages, n_bytes: int, *, grows: bool = True) -> int:
        """The most pages that a lease of `n_bytes` can have; `grows`: it may grow."""
        return self._engine.pages_within(pages.geometry, pages.kv_dtype, max(0, n_bytes), grows, **pages.options)

    def log_prefault(self, link: REngineLink) -> None:
        """Log how prefaulting a new or larger lease goes on."""
        if self._prefault:
            task = asyncio.get_running_loop().create_task(_log_prefault(link))
            self._prefault_logs.add(task)
            task.add_done_callback(self._prefault_logs.discard)

    def link_closed(self, grant: REngineGrant) -> None:
        """Stop counting a link's activation region."""
        self._regions.pop(grant, None)


def _pages_of(hello: Hello) -> KVPages:
    """The KV pages that a HELLO asks for. Raises LinkRefused for one that no R-node grants."""
    if len(hello.windows) != hello.geometry.n_layers:
        raise LinkRefused(f"HELLO has {len(hello.windows)} attention windows for {hello.geometry.n_layers} layers")
    if not 1 <= hello.max_seqs <= MAX_SEQS:
        raise LinkRefused(f"{hello.max_seqs} sequences are not within 1..{MAX_SEQS}")
    try:
        return KVPages.from_hello(hello)
    except ValueError as error:
        raise LinkRefused(f"the R-engine refused the link: {error}") from None


async def _log_prefault(link: REngineLink) -> None:
    """Log how much of a lease's memory has been faulted in, until all of it has or the link is closed."""
    loop = asyncio.get_running_loop()
    logged_at = -math.inf
    with contextlib.suppress(RuntimeError):  # the link is closed
        while True:
            done, total, error = link.prefault
            if error:
                log.warning("prefault has stopped: %s; the rest is faulted in when it is used", os.strerror(error))
                return
            if done == total or loop.time() - logged_at >= _PROGRESS_SECONDS:
                log.info("prefault: %s of %s (%d %%)", format_bytes(done), format_bytes(total), 100 * done // total)
                logged_at = loop.time()
            if done == total:
                return
            await asyncio.sleep(0.1)


def _for_each(call: Callable[..., object], arguments: Iterable[Sequence[Any]]) -> None:
    """Make a call with each of the arguments. Raises CallRefused for the first call that failed, at the end."""
    first: CallRefused | None = None
    for each in arguments:
        try:
            with refusals():
                call(*each)
        except CallRefused as error:
            first = first or error
    if first:
        raise first


class REngineGrant:
    """A granted link over the R-engine (a transports.base.LinkGrant)."""

    def __init__(
        self, node: RNode, link: REngineLink, lease: Lease, pages: KVPages, region_bytes: int, keyed: KeyedLease
    ):
        self.lease = lease
        self.wake_fd = link.eventfd
        self.stand_in = node.stand_in
        self._node = node
        self._link = link
        self._pages = pages
        self._region_bytes = region_bytes
        self._keyed = keyed
        self._migrations = node.migrations(self._keyed, pages.block_bytes)
        self._loop = asyncio.get_running_loop()
        self.growing_layers = pages.n_layers if lease.max_pages > lease.n_pages else 0

    def free(self, handles: Sequence[tuple[int, int]]) -> None:
        """Free the sequences with these handles.

        Raises CallRefused for the first that could not be freed, at the end.
        """
        self._migrations.freed(handles)
        for seq_index, _ in handles:
            self._node.orphans.forget(self._keyed, seq_index)
        _for_each(self._link.free, handles)

    def trim(self, seq_index: int, tag: int, length: int) -> None:
        with refusals():
            self._link.trim(seq_index, tag, length)

    def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None:
        with refusals():
            self._link.fork(*src, *dst, length)

    def admit_migration(self, seq: tuple[int, int], length: int, token: str) -> None:
        self._migrations.receive(seq, length, token)

    async def migrate(self, seq: tuple[int, int], pages: range, length: int, url: str, token: str) -> None:
        await self._migrations.push(seq, pages, length, url, token)

    def offer(self, seq: tuple[int, int], token: str) -> None:
        self._migrations.offer(seq, token)

    def keep(self, sequences: Sequence[tuple[int, int, str | None]]) -> None:
        """Give sequences keys. Raises CallRefused for the first that could not get one, at the end."""

        def keep(seq_index: int, tag: int, key: str | None) -> None:
            if seq_index >= self.lease.max_seqs:
                raise CallRefused(Status.BAD_SEQUENCE, f"sequence {seq_index} is outside the lease")
            self._node.orphans.keep(self._keyed, seq_index, tag, key)

        _for_each(keep, sequences)

    def find(self, key: str, length: int) -> None:
        self._node.orphans.find(key, length, self._keyed.format)

    async def adopt(self, seq: tuple[int, int], length: int, key: str) -> None:
        await self._migrations.adopt(seq, length, key)

    def detach(self) -> None:
        self._migrations.close()

    def resize(self, n_pages: int) -> None:
        """Grow the lease to `n_pages`, or as near to that as there is memory for. A smaller number changes nothing."""
        with refusals():
            stats = self._link.stats()
            n_now = stats["pages_total"]
            most = min(n_pages, self.lease.max_pages)
            if self._pages_max(n_now) <= n_now < most:
                self._node.orphans.make_room(lambda: self._pages_max(n_now) >= most)
            target = min(n_pages, self._pages_max(n_now))
            if target <= n_now:
                return
            try:
                self._link.grow(target)
            except MemoryError as error:  # the OS has less than the budget says
                log.warning("a lease stays at %d pages: %s", n_now, error)
                return
        self._node.log_prefault(self._link)
        log.debug("a lease has grown from %d to %d pages", n_now, target)

    def _pages_max(self, n_pages: int) -> int:
        """How many pages a lease that has `n_pages` could have now."""
        if self._node.on_gpu:
            return self.lease.max_pages
        reachable = self._node.pages_within(self._pages, n_pages * self._pages.page_bytes + self._node.kv_free)
        return max(n_pages, min(self.lease.max_pages, reachable))

    def stats(self) -> dict[str, int]:
        with refusals():
            stats = self._link.stats()
        counters = {name: int(value) for name, value in stats.items() if isinstance(value, int)}
        return counters | {
            "pages_max": self._pages_max(stats["pages_total"]),
            "region_bytes": self._region_bytes,
            "kv_free": self._node.kv_free,
            "roofline": self._node.roofline,
            "prefault_left": self._prefault_left(),
        }

    def _prefault_left(self) -> int:
        """Bytes of the lease that --prefault has yet to fault in."""
        done, total, error = self._link.prefault
        return 0 if error else total - done

    def close(self) -> None:
        stats = self._link.stats()
        if self._node.orphans.outlives_link(self._keyed):
            self._link.retire([seq_index for seq_index in self._keyed.keys if self._keyed.length(seq_index)])
            self._link.shrink()
            self._loop.call_soon_threadsafe(self._node.orphans.add, self._keyed)
        else:
            self._link.close()
        self._node.link_closed(self)
        self._node.log.info(
            "lease of %d pages ended after %d calls with %d rows, %.1f s of attention over %s of KV-cache",
            stats["pages_total"],
            stats["calls"],
            stats["rows"],
            stats["busy_ns"] / 1e9,
            format_bytes(stats["kv_bytes"]),
        )
