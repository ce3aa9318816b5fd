"""ResidentLink: the KV pages of the S-Part's own device as a place for sequences, like those of an R-node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from fastdecode.kernels._native import page_sections
from fastdecode.region.contract import KV_DTYPES, ROW_DTYPE, Status
from fastdecode.region.geometry import geometry_tuple, region_layout
from fastdecode.spart.resident.arena import PageArena
from fastdecode.spart.resident.kernels import ResidentKernels
from fastdecode.transports.base import CallRefused, Hello, Lease, Link, LinkDown, Member, TransportError, refusals
from fastdecode.transports.migration import MigrationSender, PageFetcher, receive_bytes, send_bytes

#: Pinned memory that holds pages on their way to or from an R-node.
_PINNED_BYTES = 16 << 20


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
        self.secret: bytes | None = None  # of the R-nodes that pages are sent to
        self._block_bytes = page_bytes * self.arena.lists.n_sections
        self._pinned = PinnedPages(self.arena)
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
        try:
            sender = await MigrationSender.open(url, token, self._block_bytes, self.secret)
            try:
                for blocks in self._pinned.pieces(pages):
                    staged = await asyncio.to_thread(self._pinned.download, self._page_numbers(seq[0], blocks))
                    move = partial(send_bytes, staged)
                    await sender.send(blocks.start, len(blocks), length if blocks.stop == pages.stop else 0, move)
            finally:
                sender.close()
        except (TransportError, OSError, RuntimeError) as error:  # RuntimeError: of torch
            raise self._refused(error) from None

    def receive(self, seq: tuple[int, int], length: int) -> None:
        """Take pages for an empty sequence of `length` tokens. Raises CallRefused."""
        with refusals(self):
            self.arena.lists.receive(*seq, length)

    async def fetch(
        self, seq_index: int, pages: range, url: str, token: str, pause: Callable[[], Awaitable[None]], first: int = 0
    ) -> None:
        """Bring `pages` of the sequence that the R-node at `url` has offered with `token` to the pages of a sequence
        here, from page `first` on, at most _PINNED_BYTES at once. `pause` is awaited between two such pieces. Raises
        CallRefused, and what `pause` raises."""
        try:
            fetcher = await PageFetcher.open(url, token, self._block_bytes, self.secret)
            try:
                for blocks in self._pinned.pieces(pages):
                    if blocks.start > pages.start:
                        await pause()
                    staged = await asyncio.to_thread(self._pinned.memory, len(blocks) * self._block_bytes)
                    move = partial(receive_bytes, memoryview(staged.numpy()))
                    await fetcher.fetch(blocks.start, len(blocks), move)
                    own = range(first + blocks.start - pages.start, first + blocks.stop - pages.start)
                    await asyncio.to_thread(self._pinned.upload, staged, self._page_numbers(seq_index, own))
            finally:
                fetcher.close()
        except (TransportError, OSError, RuntimeError) as error:  # RuntimeError: of torch
            raise self._refused(error) from None

    def _refused(self, error: Exception) -> CallRefused:
        return error if isinstance(error, CallRefused) else CallRefused(Status.LINK_CLOSED, str(error), self)

    def _page_numbers(self, seq_index: int, blocks: range) -> list[int]:
        """The pages of some blocks of a sequence, in the order in which R-nodes send them."""
        entries, lists = np.zeros(1, ROW_DTYPE), self.arena.lists
        entries["seq_index"] = seq_index
        pages = np.zeros((lists.n_sections, blocks.stop), np.int32)
        lists.tables(entries.view(np.uint8), pages, blocks.stop)
        return [int(page) for page in pages[:, blocks.start :].T.ravel()]

    @property
    def may_cut(self) -> bool:
        """True if a sequence's first tokens may lie on an R-node: every layer attends to all tokens, without ALiBi."""
        layers = self.arena.hello.layers
        return not (any(self.arena.hello.windows) or any(layers.segments) or any(layers.selections) or layers.slopes)

    def drop_blocks(self, seq: tuple[int, int], n_blocks: int) -> None:
        """Give back the pages of a sequence's first blocks, whose tokens lie on an R-node. Raises CallRefused."""
        with refusals(self):
            self.arena.lists.drop_blocks(*seq, n_blocks)

    def restore_blocks(self, src: tuple[int, int], seq: tuple[int, int]) -> None:
        """Give the pages of `src` to a sequence, in the place of the last blocks that it has given back; `src` is empty
        then. Raises CallRefused."""
        with refusals(self):
            self.arena.lists.restore_blocks(*src, *seq)

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


class PinnedPages:
    """Pinned memory through which pages of an arena go to the host and come from it."""

    def __init__(self, arena: PageArena):
        self._arena = arena
        self._stream: torch.Stream | None = None

    def pieces(self, blocks: range) -> Iterator[range]:
        """Ranges of blocks that are copied at once."""
        lists = self._arena.lists
        n = max(1, _PINNED_BYTES // (self._arena.page_bytes * lists.n_sections))
        return (blocks[i : i + n] for i in range(0, len(blocks), n))

    def memory(self, n_bytes: int) -> torch.Tensor:
        """uint8 [n_bytes]. May block."""
        with self._on_stream():
            return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def download(self, pages: Sequence[int]) -> memoryview:
        """The bytes of whole pages, plane by plane. Blocks; on a stream of its own."""
        with self._copying():
            staged = self.memory(len(pages) * self._arena.page_bytes)
            for row, page in self._rows(staged, pages):
                row.copy_(page, non_blocking=True)
        return memoryview(staged.numpy())

    def upload(self, staged: torch.Tensor, pages: Sequence[int]) -> None:
        """Copy the bytes of whole pages, plane by plane, to the device. Blocks; on a stream of its own."""
        with self._copying():
            for row, page in self._rows(staged, pages):
                page.copy_(row, non_blocking=True)

    def _rows(self, staged: torch.Tensor, pages: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of each page in pinned memory and in the arena, [planes, bytes]."""
        memory = self._arena.memory
        rows = staged.view(len(pages), memory.shape[0], memory.shape[2])
        return ((row, memory[:, page]) for row, page in zip(rows, pages, strict=True))

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Start copies, and wait for them at the end."""
        with self._on_stream():
            yield
            copied = torch.Event(self._arena.memory.device)
            copied.record()
        copied.synchronize()

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            self._stream = torch.Stream(self._arena.memory.device)
        with torch.inference_mode(), self._stream:
            yield
