"""ResidentLink: the KV pages of the S-Part's own device as a place for sequences, like those of an R-node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fastdecode.kernels._native import page_sections
from fastdecode.region.contract import KV_DTYPES, Status
from fastdecode.region.geometry import geometry_tuple, region_layout
from fastdecode.spart.resident.arena import PageArena
from fastdecode.spart.resident.kernels import ResidentKernels
from fastdecode.transports.base import CallRefused, Hello, Lease, Link, LinkDown, Member


class ResidentLink(Link):
    """A link without a peer, a region or a port. Its control path is done at once, and it is down only when closed.

    An exchange gives the rows of its steps to the kernels of `arena`.
    """

    resident = True

    def __init__(
        self,
        hello: Hello,
        n_pages: int,
        device: torch.device,
        make_kernels: Callable[[PageArena], ResidentKernels] = ResidentKernels.on_gpu,
    ):
        """Take the memory of `n_pages` pages. Raises KernelError, ValueError, MemoryError, torch.OutOfMemoryError."""
        self.url = f"{device.type}:{device.index or 0}"
        self.geometry, self.layout = hello.geometry, region_layout(hello.geometry)
        self.arena = PageArena(hello, n_pages, device)
        self.kernels = make_kernels(self.arena)
        sections = page_sections(
            geometry_tuple(hello.geometry), KV_DTYPES.index(hello.kv_dtype), **hello.layers.stored(hello.windows)
        )
        page_bytes = self.arena.page_bytes
        self.lease = Lease(n_pages, n_pages, hello.max_seqs, page_bytes, device.type, 0, self.url, *sections)
        self._closed = asyncio.Event()

    @property
    def members(self) -> Sequence[Member]:
        return ()

    @property
    def region_bytes(self) -> int:
        return 0

    async def free(self, handles: Sequence[tuple[int, int]]) -> None:
        with refusals(self):
            for seq_index, tag in handles:
                self.arena.lists.free(seq_index, tag)

    async def trim(self, seq_index: int, tag: int, length: int) -> None:
        with refusals(self):
            self.arena.lists.trim(seq_index, tag, length)

    async def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None:
        with refusals(self):
            self.arena.lists.fork(*src, *dst, length)

    async def keep(self, sequences: Sequence[tuple[int, int, str | None]]) -> None:
        """The pages end with the S-node, so nobody could adopt them."""

    async def find(self, key: str, length: int) -> bool:
        return False

    async def adopt(self, seq: tuple[int, int], length: int, key: str) -> None:
        raise CallRefused(Status.BAD_CALL, "no sequence is adopted by the S-Part's device", self)

    async def admit_migration(self, seq: tuple[int, int], length: int, token: str) -> None:
        raise CallRefused(Status.BAD_CALL, "no sequence migrates to the S-Part's device", self)

    async def migrate(self, seq: tuple[int, int], pages: range, length: int, url: str, token: str) -> None:
        raise CallRefused(Status.BAD_CALL, "no sequence migrates from the S-Part's device", self)

    async def resize(self, n_pages: int) -> dict[str, int]:
        return await self.stats()

    async def stats(self) -> dict[str, int]:
        lists = self.arena.lists
        used = lists.n_pages - lists.n_free
        return {
            "pages_total": lists.n_pages,
            "pages_max": lists.n_pages,
            "pages_used": used,
            "seqs": lists.n_sequences,
            "region_bytes": 0,
            "kv_free": 0,
            "roofline": 0,
        }

    async def leaving(self) -> None:
        await self._closed.wait()
        await asyncio.get_running_loop().create_future()

    async def closed(self) -> LinkDown | None:
        await self._closed.wait()
        return None

    async def close(self) -> None:
        self._closed.set()


@contextmanager
def refusals(link: ResidentLink) -> Iterator[None]:
    """Let errors of the page lists be refusals, as those of an R-node."""
    try:
        yield
    except ValueError as error:
        raise CallRefused(Status.BAD_SEQUENCE, str(error), link) from None
    except MemoryError as error:
        raise CallRefused(Status.OUT_OF_PAGES, str(error), link) from None
