"""What a transport is: the page to read before writing one.

A *link* joins one S-node to one R-node. Both ends hold an activation region of the same layout (region/region.h): a
header page and `n_slots` slots, each with a request half and a reply half. A transport only makes bytes written at one
end appear at the other, doorbell last. It never looks at what the bytes mean, beyond the counts in a call header that
say how many of them are used.

A link also has a control connection (length-prefixed JSON frames, `frames.py`) over which it is opened (`handshake.py`:
version, shared secret, geometry) and by which its sequences are freed, trimmed and forked. The control connection is
asyncio; the data path is C and memory and never enters the event loop.

Who waits spins for a while (`--spin-us`), offering its core to others between two looks, and then sleeps until it is
rung: a thread of the S side in `Link.wait`, the R-engine's threads for the calls of all links at once. No thread of a
transport's own spins. Where bytes must be taken in before a bell can be seen (TCP), who waits for them does so, the
R-engine's thread by fd_poll_fn of region/doorbell.h. An idle node uses well under 1 % of a core.

A transport is one module with two coroutines, registered by URL scheme in `registry.py`:

    async def connect(url, hello, secret) -> Link          # S side
    async def serve(url, service, secret) -> Server        # R side; `service` is a LinkService

and it passes test_transports.py, test_link_faults.py and test_waiting.py in tests/transports. Where a bell at the R
side cannot wake the R-engine (nobody there runs when it is written), the transport sets `no_wakeup` in the region's
header before LinkService.open_link.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

#: Version of the region's layout, the control frames and the hand-shake together. Both ends must have the same.
PROTOCOL_VERSION = 2

ACT_DTYPES = ("fp32", "fp16", "bf16")  # index == fd_act_dtype_t
KV_DTYPES = ("fp32", "fp16", "bf16", "int8", "int4", "int8-int4")  # index == fd_kv_dtype_t; K-V if they differ
PAGE_TOKENS = 128

#: One row table entry (fd_row_t of region/region.h).
ROW_DTYPE = np.dtype([(name, "<u4") for name in ("seq_index", "tag", "pos", "n_rows", "flags", "reserved")])
ROW_ATTEND = 1


class TransportError(Exception):
    """Base of everything a transport raises; the message is a sentence for the user."""


class LinkRefused(TransportError):
    """The peer said no at HELLO (version, secret, geometry, memory); its reason is the message."""


class LinkDown(TransportError):
    """The link is dead (peer gone, connection lost, protocol broken); every later call raises it too."""


class CallRefused(TransportError):
    """The R-engine refused a call; the link lives on.

    `status` is an fd_status_t of region/region.h.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Geometry:
    """What fixes a region's layout (fd_geometry_t). Sizes in elements and rows."""

    n_slots: int
    max_rows: int
    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_size: int
    act_dtype: str  # of ACT_DTYPES


@dataclass(frozen=True, slots=True)
class Hello:
    """What an S-node asks of an R-node."""

    geometry: Geometry
    kv_dtype: str  # of KV_DTYPES
    windows: tuple[int, ...]  # sliding window a layer, 0: full attention
    softmax_scale: float
    kv_bytes: int | None  # KV-cache memory wanted; None: all that is free
    max_seqs: int


@dataclass(frozen=True, slots=True)
class Lease:
    """What the R-node granted."""

    n_pages: int  # of PAGE_TOKENS tokens, all layers
    max_seqs: int
    page_bytes: int
    isa: str
    threads: int
    node: str  # the R-node's name for logs and metrics


class Link(ABC):
    """The S side of a link.

    Data path (any thread, GIL released while waiting; one thread a slot at a time):

        write rows into `region` at the offsets of `layout`, `write_table` once a step, then for each layer
        `post(slot, layer, ...)` and, once other work is done, `wait(slot)`; then the O rows stand in `region`.

    A slot's request half must not be touched between `post` and the `wait` that answers it.

    Control path (coroutines on the event loop that opened the link). FREE is acknowledged: until `free` returns, the
    sequence's pages count as used and its index must not be used again.
    """

    url: str
    geometry: Geometry
    lease: Lease
    layout: RegionLayout
    region: memoryview  # the whole region, writable bytes

    @abstractmethod
    def write_table(self, slot: int, entries: np.ndarray) -> None:
        """Put `entries` (ROW_DTYPE, attending ones first) into the slot's row table."""

    @abstractmethod
    def post(self, slot: int, layer: int, n_entries: int, n_rows: int, n_attend_rows: int, new_step: bool) -> None:
        """Publish the call: header, then doorbell. Returns at once. Raises LinkDown."""

    @abstractmethod
    def wait(self, slot: int, timeout: float) -> CallTimes:
        """Block until the reply to the last `post` is there.

        Raises CallRefused, LinkDown (also after `timeout` seconds).
        """

    @abstractmethod
    async def free(self, handles: Sequence[tuple[int, int]]) -> None:
        """Free sequences, given as (seq_index, tag).

        Raises LinkDown; CallRefused if the R-node does not know one of them, and then the others are free all the same.
        """

    @abstractmethod
    async def trim(self, seq_index: int, tag: int, length: int) -> None:
        """Roll a sequence back to its first `length` tokens."""

    @abstractmethod
    async def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None:
        """Let the empty `dst` share the first `length` tokens of `src`."""

    @abstractmethod
    async def stats(self) -> dict:
        """The R-node's counters for this link, see fd_link_stats_t."""

    @abstractmethod
    async def closed(self) -> LinkDown | None:
        """Return when the link has ended: the error, or None after `close`."""

    @abstractmethod
    async def close(self) -> None:
        """End the link; the R-node frees the lease. Idempotent."""


@dataclass(frozen=True, slots=True)
class CallTimes:
    """What the R-node said of a call it served."""

    busy_ns: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Byte offsets into a region (fd_layout_t); table, q, kv and o count from the start of a slot."""

    slot0: int
    slot_bytes: int
    region_bytes: int
    table: int
    q: int
    kv: int
    o: int
    q_row_bytes: int
    kv_row_bytes: int

    def slot(self, i: int) -> int:
        return self.slot0 + i * self.slot_bytes


class LinkService(Protocol):
    """What an R-node offers to the transports it listens on (implemented by fastdecode/rnode.py over the R-engine)."""

    name: str  # the R-node's, told to every caller

    def open_link(self, hello: Hello, region: memoryview, notify: object | None) -> LinkGrant:
        """Grant a lease and put the link's region under the R-engine's eyes.

        `region` is mapped, its header written, and stays mapped until LinkGrant.close returns. `notify` is None or a
        PyCapsule named "fastdecode.notify" around an fd_notify_t (region/doorbell.h), whose fn is called when a reply
        bell has been rung. Raises LinkRefused.
        """


class LinkGrant(Protocol):
    """One link as the R-node sees it."""

    lease: Lease
    wake_fd: int  # eventfd to write when the engine sleeps

    def free(self, handles: Sequence[tuple[int, int]]) -> None: ...
    def trim(self, seq_index: int, tag: int, length: int) -> None: ...
    def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None: ...
    def stats(self) -> dict: ...
    def close(self) -> None:
        """Take the link from the R-engine and free its lease; waits for a call in progress."""


class Server(ABC):
    """A listening transport on the R side."""

    url: str  # with the port actually bound

    @abstractmethod
    async def close(self) -> None:
        """Stop listening and end all links."""
