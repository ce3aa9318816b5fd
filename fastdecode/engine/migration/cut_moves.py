"""Moves of a sequence's cut: the oldest pages on the S-Part's device go to an R-node, or the newest pages there come
back.

K and V of a whole page do not change, so they are copied while the sequence decodes. The cut moves between two of its
steps, and only then are the pages free that are there twice. If anything breaks before, the sequence goes on as it was.

Steps use the old prefix until the cut moves, so a prefix that grows or shrinks is a FORK of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from fastdecode.engine.migration.migrator import MoveCancelled
from fastdecode.engine.migration.page_copies import copy_to_device, copy_to_r_node
from fastdecode.engine.state.prefixes import CachedSequence
from fastdecode.engine.state.sequence import SpilledPrefix
from fastdecode.region.contract import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastdecode.engine.scheduling.cluster import Cluster
    from fastdecode.engine.state.ledger import RNodeLedger
    from fastdecode.engine.state.sequence import Sequence
    from fastdecode.spart.resident.link import ResidentLink


class CutMove(ABC):
    """A sequence on the S-Part's device whose first tokens are those of `old` on an R-node, and are to be those of
    `new` there. None: the R-node has, or is to have, none."""

    def __init__(self, cluster: Cluster, seq: Sequence, r_node: RNodeLedger, new_cut: int):
        """Take pages of R-node `r_node` and of the device, which have enough, and an index of the R-node."""
        self.seq, self.r_node, self.old = seq, r_node, seq.prefix
        self.n_blocks = abs(new_cut - seq.cut) // PAGE_TOKENS
        self._cluster, self._device, self._handle = cluster, seq.placed_on, seq.handle
        self._link = cast("ResidentLink", self._device.link)
        self.new: SpilledPrefix | None = None
        if new_cut:
            shared = None if self.old is None else self.old.pages.share(min(new_cut, self.old.length))
            handle, pages = r_node.admit(new_cut, shared, new_cut, whole=True)
            self.new = SpilledPrefix(r_node, handle, pages, new_cut)

    def check(self) -> None:
        """Raise MoveCancelled if the sequence has left the device, or the R-node is lost."""
        seq = self.seq
        gone = seq.node is not self._device or seq.handle != self._handle or seq.mini_batch is None or seq.cancelled
        if gone or not self.r_node.alive:
            raise MoveCancelled

    async def copy(self, pause: Callable[[], Awaitable[None]]) -> None:
        """Bring the pages to where they are to be. `pause` is awaited between two pieces that come back. Raises
        MoveCancelled, CallRefused, LinkDown."""
        if self.old is not None and self.new is not None:
            shared = min(self.old.length, self.new.length)
            await self.r_node.link.fork(self.old.handle, self.new.handle, shared)
        await self._copy(pause)

    @abstractmethod
    async def _copy(self, pause: Callable[[], Awaitable[None]]) -> None:
        """Copy the pages between the device and the R-node."""

    @abstractmethod
    def switch(self) -> None:
        """Let the sequence, which is in no step, go on with the cut where it is to be."""

    def end(self, done: bool) -> None:
        """Give back what the move has taken; `done`: the cut has moved."""
        if not done and self.new is not None:
            self.new.release()


class Spill(CutMove):
    """The oldest pages on the device go to the R-node."""

    async def _copy(self, pause: Callable[[], Awaitable[None]]) -> None:
        assert self.new is not None, "a spill ends with tokens on the R-node"
        first = 0 if self.old is None else self.old.length // PAGE_TOKENS
        await copy_to_r_node(self._device, self._handle, first, self.r_node, self.new.handle, self.new.length)

    def switch(self) -> None:
        assert self.new is not None, "a spill ends with tokens on the R-node"
        given_back = self._cluster.spill(self.seq, self.new)
        self._link.drop_blocks(self._handle, self.new.length // PAGE_TOKENS)
        self._device.pages.freed(given_back)


class Refill(CutMove):
    """The newest pages on the R-node come back to the device, to pages of an index of its own: if the sequence leaves
    meanwhile, nothing is written to pages that another one has taken."""

    def __init__(self, cluster: Cluster, seq: Sequence, new_cut: int):
        assert seq.prefix is not None, "the sequence is cut"
        super().__init__(cluster, seq, seq.prefix.node, new_cut)
        self._tokens = self.n_blocks * PAGE_TOKENS
        self._own, self._pages = self._device.admit(self._tokens, None, self._tokens, whole=True)

    async def _copy(self, pause: Callable[[], Awaitable[None]]) -> None:
        assert self.old is not None, "a refill begins with tokens on the R-node"
        end = self.old.length // PAGE_TOKENS
        pages = range(end - self.n_blocks, end)
        await copy_to_device(self.r_node, self.old.handle, pages, self._device, self._own, self._tokens, pause)

    def switch(self) -> None:
        self._link.restore_blocks(self._own, self._handle)
        self._cluster.refill(self.seq, self.new, self._pages)

    def end(self, done: bool) -> None:
        super().end(done)
        self._device.end_running(self._tokens)
        self._device.release(CachedSequence(self._own, self._pages))
