"""The interfaces between a transport, the S-node and the R-node. docs/adding-a-transport.md says how to write one.

A *link* joins one S-node to one R-node. Both ends hold an activation region of the same layout (region/region.h): a
header page and `n_slots` slots. A carrier in C (region/carrier.h) makes the bytes written at one end appear at the
other end, the word that announces them last. It does not interpret these bytes; it reads only the counts in a step's
header, which say how many rows the step uses.

A link also has a control connection, which carries length-prefixed JSON frames (`frames.py`). The hand-shake
(`handshake.py`: version, shared secret, geometry) and the requests FREE, TRIM, FORK and RESIZE go over the control
connection. asyncio drives the control connection. The data path is C and memory, and never enters the event loop.

A waiter spins for `--spin-us`, yielding its core to other threads between two looks at the word, and then sleeps until
the other side wakes it. A thread of the S-Part waits in `DataPath.wait`, or for several links at once in a StepGroup;
the R-engine's threads wait for all links at once. A transport starts no thread that spins. If bytes must be received
before a word can change (TCP), the waiter receives them, through the carrier's `poll`. An idle node uses less than 1 %
of a core.

A transport is one module with three coroutines, registered by URL scheme in `registry.py`:

    async def connect(url, hello, secret, *, spin_us) -> Link                # S side
    async def dial_url(url) -> FrameSocket                                   # for something else than a link
    async def serve(url, service, secret, *, insecure) -> Server             # R side; `service` is a LinkService

The conformance suite of the transports is tests/transports: test_transports.py, test_link_faults.py, test_waiting.py.
"""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from fastdecode.region import wire
from fastdecode.region.contract import ROW_ATTEND, ROW_DTYPE, Status
from fastdecode.region.geometry import Geometry
from fastdecode.region.region import Region

from ._native import Port, StepGroup

#: What a step waits for while it does not compute: the answers of its links, a descriptor that becomes readable once
#: its device has computed it, or nothing (None). `_native.wait_any` waits for several.
Pending: TypeAlias = StepGroup | int | None


class TransportError(Exception):
    """Base class of the errors that transports raise; the message is a sentence for the user."""


class LinkRefused(TransportError):
    """The peer refused the hand-shake (version, secret, geometry, memory); the message is the peer's reason."""


class LinkDown(TransportError):
    """The link has ended (peer gone, connection lost, protocol broken); every later call on it raises LinkDown too.

    `link` is that link if the error comes from the data path; None on the control path or if no link was opened.
    """

    def __init__(self, message: str, link: DataPath | None = None):
        super().__init__(message)
        self.link = link


class CallRefused(TransportError):
    """The R-engine refused a call or a control request; the link stays usable.

    `status` is a region.contract.Status, or a number that only the peer knows. `link` is the link of a refused call;
    None for a control request.
    """

    def __init__(self, status: int, message: str, link: DataPath | None = None):
        super().__init__(message)
        self.status = status
        self.link = link


@contextmanager
def refusals(link: DataPath | None = None) -> Iterator[None]:
    """Turn the exceptions of the R-engine and of page lists into CallRefused."""
    try:
        yield
    except ValueError as error:
        raise CallRefused(Status.BAD_SEQUENCE, str(error), link) from None
    except MemoryError as error:
        raise CallRefused(Status.OUT_OF_PAGES, str(error), link) from None
    except RuntimeError as error:
        raise CallRefused(Status.LINK_CLOSED, str(error), link) from None


class HadamardHeads(enum.IntFlag):
    """The heads whose Hadamard transform the S-node computes in place of the R-node (kernels/cpu/hadamard.h)."""

    QK = 1  # Q and K
    VO = 2  # V, and O back


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options of the layers' attention that few models use (fd_layer_t of kernels/engine/layers.h). Empty: unused."""

    segments: wire.PerLayer = ()  # each layer's segment in tokens, chunked attention; 0: none
    kv_layers: wire.PerLayer = ()  # the layer whose K and V each layer attends to: itself, or an earlier one
    #: fd_selection_t of each layer: 0: it attends to all tokens, 1: to what its own indexer selects, 2: to what
    #: the last layer with an indexer has selected
    selections: wire.PerLayer = ()
    softcaps: wire.Softcaps = ()  # a score s of a layer becomes cap * tanh(s / cap); 0: the scores stay as they are
    sinks: bytes = b""  # fp32, little-endian, [n_layers, n_q_heads]: one more score of each head, without a V
    slopes: bytes = b""  # fp32, little-endian, [n_q_heads]: ALiBi's slopes
    heads: wire.HeadsPerLayer = ()  # if layers differ in them
    #: (i, n): the R-node keeps the i-th part of n of every sequence's tokens (kernels/engine/parts.h)
    part: wire.Part = (0, 1)
    #: HadamardHeads; the R-node transforms the others if kv_dtype needs it
    hadamard: Annotated[int, wire.integer(int(HadamardHeads.QK | HadamardHeads.VO))] = 0

    def used(self) -> dict[str, Any]:
        """The options that are used, as keyword arguments of kernels._native.REngine.add_link."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in options.items() if value}

    def stored(self, windows: tuple[int, ...]) -> dict[str, Any]:
        """What decides on the size of a KV page, `windows` (Hello.windows) included, as keyword arguments of
        kernels._native.page_bytes and page_sections and of REngine.pages_within."""
        names = ("segments", "kv_layers", "selections", "heads")
        stored = {name: value for name, value in self.used().items() if name in names}
        return stored | {"windows": windows or None}


@dataclass(frozen=True, slots=True)
class Hello:
    """The link that an S-node asks an R-node for."""

    geometry: Geometry
    kv_dtype: wire.KvDtype
    windows: wire.PerLayer  # each layer's sliding window in tokens; 0: full attention
    softmax_scale: wire.Positive
    kv_bytes: wire.Bytes | None  # KV-cache memory to lease at once; None: all free memory of the R-node
    max_seqs: wire.U32
    layers: LayerOptions = LayerOptions()


@dataclass(frozen=True, slots=True)
class Lease:
    """The share of an R-node's KV-cache that the R-node has granted to a link."""

    n_pages: wire.Count  # pages of PAGE_TOKENS tokens, for the layers of one section
    max_pages: wire.Count  # the most pages that RESIZE can make of it, while the R-node has them free
    max_seqs: wire.Count  # sequence indexes are 0 .. max_seqs - 1
    page_bytes: wire.PageBytes  # bytes of one page
    isa: wire.Isa  # the instruction set that the R-engine computes with
    threads: wire.Count  # of the R-engine
    node: wire.Name  # the R-node's name for logs and metrics
    full_sections: wire.Sections = 1  # pages that PAGE_TOKENS tokens take for the layers that see all tokens
    limited_sections: wire.Sections = 0  # and for the layers of limited reach (windows, segments)
    reach: wire.U32 = 0  # tokens that a token sees in those layers, at most

    @property
    def summary(self) -> str:
        """The lease in words, for logs."""
        pages = f"{self.n_pages} KV pages of {self.page_bytes / 2**20:.2f} MiB, at most {self.max_pages}"
        return f"{pages}, for up to {self.max_seqs} sequences; attention by {self.isa} in {self.threads} thread(s)"


class Member(NamedTuple):
    """The data path to one R-node, and its part of each row of a step."""

    link: DataPath
    #: None: whole rows. Else uint32 [n_layers, 4, 2]: byte ranges [from, to) of Q, K, V and O within a row.
    columns: np.ndarray | None


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one step, as the R-node reports it."""

    busy_ns: int  # time that the R-engine worked on the step's layers
    kv_bytes: int  # KV-cache bytes that it read

    @classmethod
    def of_members(cls, costs: Sequence[StepCost]) -> StepCost:
        """The cost of a step that several R-nodes work on at the same time."""
        return cls(max(cost.busy_ns for cost in costs), sum(cost.kv_bytes for cost in costs))


class DataPath:
    """The data path of a link at the S side: a region, and a port for each R-node that steps in the region go to.

    It may be used from any thread, one thread per slot at a time; `wait` releases the GIL. A step goes:

        1. `arm` its row table, then `wait` for the R-node's verdict;
        2. for each layer in order, write the Q and KV rows into `region` at the offsets of `layout`, `ring` the layer,
           do other work, `wait`, and read the O rows from `region`;
        3. `disarm`.

    The rows of a slot must not change between `ring` and the return of `wait`. A step may be abandoned after any layer:
    the next `arm` replaces it. A StepGroup does the same in one call for the ports of several links; `members` are the
    ports' links.
    """

    port: Port  # the data path in C; the members of a team have one each, the team has none
    resident = False  # True: the S-Part's own device has the KV-cache; no row crosses, and there is no region

    def __init__(self, url: str, region: Region, port: Port | None = None):
        """`url` is for errors; `port` is None for a team. The caller closes `region` and `port`."""
        self.url = url
        if port is not None:
            self.port = port
        self.geometry, self.layout = region.geometry, region.layout
        self.region = region.view  # the whole region as writable bytes
        self.steps: dict[int, StepGroup] = {}  # armed, by slot
        self._in_flight: set[int] = set()  # slots whose last message has not been waited for

    @property
    def members(self) -> Sequence[Member]:
        """The data paths to single R-nodes, and the columns of a step's rows that each takes."""
        return (Member(self, None),)

    @property
    def region_bytes(self) -> int:
        """The size of the activation region that the R-node, or all members of a team, have for this link."""
        return self.layout.region_bytes

    def arm(self, slot: int, entries: np.ndarray) -> None:
        """Publish a step: `entries` [n_entries] of ROW_DTYPE, entries with ROW_ATTEND first. Returns at once.

        Raises ValueError (wrong dtype, more entries or rows than the slot has room for, a message of this slot in
        flight), LinkDown, which names this link.
        """
        if entries.dtype != ROW_DTYPE:
            raise ValueError(f"a row table has dtype ROW_DTYPE, not {entries.dtype}")
        n_rows = int(entries["n_rows"].sum())
        n_attend = int(entries["n_rows"][entries["flags"] & ROW_ATTEND != 0].sum())
        table = np.ascontiguousarray(entries).view(np.uint8)
        members = [(m.link.port, table, 0, n_attend, n_attend, n_rows, m.columns) for m in self.members]
        step = StepGroup(slot, members, *self._rows(slot, n_attend, n_rows))
        if failures := step.arm():
            raise self._failed(slot, failures)
        self.steps[slot] = step
        self._in_flight.add(slot)

    def _rows(self, slot: int, n_attend: int, n_rows: int) -> Sequence[np.ndarray]:
        """The buffers of a step's Q, KV and O rows, from and to which members' slots are copied; none if the rows are
        written and read in a member's slot."""
        return ()

    def ring(self, slot: int, layer: int) -> None:
        """Ask for a layer of the step. The layers of a step come in order. Returns at once.

        Raises ValueError (a layer out of order, no step, a message of this slot in flight), LinkDown, which names this
        link.
        """
        step = self.steps.get(slot) or self._no_step(slot)
        if failures := step.ring(layer):
            raise self._failed(slot, failures)
        self._in_flight.add(slot)

    def wait(self, slot: int, timeout: float) -> None:
        """Block until the answer to the slot's last `arm` or `ring` has arrived.

        Raises CallRefused, LinkDown (also if no answer arrives within `timeout` seconds), ValueError (nothing is in
        flight). CallRefused and LinkDown name this link. After CallRefused the slot has no step.
        """
        step = self.steps.get(slot) or self._no_step(slot)
        if failures := step.wait(timeout):
            raise self._failed(slot, failures)
        if slot not in self._in_flight:
            raise ValueError("nothing in the slot is to be waited for")
        self._in_flight.discard(slot)

    def disarm(self, slot: int) -> StepCost | None:
        """End the step. Returns its cost if all of its layers were answered, else None."""
        step = self.steps.get(slot) or self._no_step(slot)
        costs = [StepCost(busy_ns, kv_bytes) for _, busy_ns, kv_bytes in step.disarm()]
        if slot not in self._in_flight:
            self.steps.pop(slot, None)
        return StepCost.of_members(costs) if len(costs) == len(self.members) else None

    def _no_step(self, slot: int) -> StepGroup:
        """A step without rows for a slot that has none: its functions tell misuse, and a link that is down."""
        return StepGroup(slot, [(m.link.port, b"", 0, 0, 0, 0) for m in self.members])

    def _failed(self, slot: int, failures: list[tuple[int, int, str]]) -> CallRefused | LinkDown:
        """Drop the slot's step, which has failed. Returns the error to raise."""
        self.steps.pop(slot, None)
        self._in_flight.discard(slot)
        i, status, message = min(failures, key=lambda failure: failure[1])  # a link that is down comes first
        error = self.members[i].link.failure(status, message)
        error.link = self
        return error

    def failure(self, status: int, message: str) -> CallRefused | LinkDown:
        """The error that a StepGroup's failure on this link stands for: CallRefused or LinkDown, which names this link.

        `status` is -1 for a link that is down. A link that the R-node has closed goes down.
        """
        if status == Status.LINK_CLOSED:
            self.port.kill(message)
        if status in (-1, Status.LINK_CLOSED):
            return LinkDown(f"link {self.url} is down: {message}", self)
        return CallRefused(status, message, self)


class Link(DataPath, ABC):
    """The S side of a link: the data path, and the control path.

    The control path consists of coroutines on the event loop that opened the link. The R-node acknowledges FREE: until
    `free` returns, the sequence's pages count as used and the S-node must not use its sequence index again.
    """

    peer_url: str | None = None  # at which other R-nodes reach this one, if that is not `url`
    bytes_per_second: float | None = None  # at which attention reads KV-cache there, if that was measured at start
    lease: Lease

    @property
    def links(self) -> Sequence[Link]:
        """The links to single R-nodes that this link consists of."""
        return (self,)

    @abstractmethod
    async def free(self, handles: Sequence[tuple[int, int]]) -> None:
        """Free the sequences with these handles, (sequence index, tag) pairs.

        Raises LinkDown, and CallRefused if the R-node does not know one of the handles; the other sequences are freed
        even then.
        """

    @abstractmethod
    async def trim(self, seq_index: int, tag: int, length: int) -> None:
        """Roll a sequence back to its first `length` tokens. Raises CallRefused, LinkDown."""

    @abstractmethod
    async def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None:
        """Let the empty sequence `dst` share the first `length` tokens of `src`; both are handles.

        Raises CallRefused, LinkDown.
        """

    # Only a link to a single R-node implements `admit_migration`, `migrate` and `offer`; the others refuse them.

    async def admit_migration(self, seq: tuple[int, int], length: int, token: str) -> None:
        """Let the empty sequence `seq`, a handle, hold `length` tokens that another R-node sends (RECEIVE).

        `token`, 64 hexadecimal digits drawn by the caller, admits one migration connection (migration.py). No step may
        name the sequence before `migrate` has completed it. Raises CallRefused, LinkDown.
        """
        raise self._no_migration()

    async def migrate(self, seq: tuple[int, int], pages: range, length: int, url: str, token: str) -> None:
        """Let the R-node send `pages` of a sequence to the R-node at `url`, which must have admitted `token` (PUSH).
        Returns once that R-node has them.

        `length` is 0 if more pages follow. Else it is the number of tokens that complete the sequence there. The pages
        must not change meanwhile; they stay here. Raises CallRefused (also if the other R-node cannot be reached),
        LinkDown.
        """
        raise self._no_migration()

    async def offer(self, seq: tuple[int, int], token: str) -> None:
        """Let this S-node fetch pages of a sequence, a handle, over a migration connection that presents `token`
        (OFFER), until the sequence is freed or offered again. Raises CallRefused, LinkDown."""
        raise self._no_migration()

    def _no_migration(self) -> CallRefused:
        return CallRefused(Status.BAD_CALL, f"the sequences of the link {self.url} do not migrate", self)

    @abstractmethod
    async def keep(self, sequences: Sequence[tuple[int, int, str | None]]) -> None:
        """Give sequences keys, 64 hexadecimal digits each, by which another link may adopt them (KEEP): triples of
        sequence index, tag and key. A key of None takes the key of a sequence away. Raises CallRefused, LinkDown."""

    @abstractmethod
    async def find(self, key: str, length: int) -> bool:
        """True if `adopt` would find `length` tokens at this key (FIND). Raises LinkDown."""

    @abstractmethod
    async def adopt(self, seq: tuple[int, int], length: int, key: str) -> None:
        """Let the empty sequence `seq`, a handle, have the first `length` tokens of the sequence that another link of
        this R-node has, or had, at `key` (ADOPT). No step may name the sequence before this returns. Raises CallRefused
        (also if the pages of the two links differ), LinkDown."""

    @abstractmethod
    async def resize(self, n_pages: int) -> dict[str, int]:
        """Ask for a lease of `n_pages` pages in all. Returns `stats`, in which pages_total is the lease's size now.

        The R-node comes as near to `n_pages` as it can. It grants no more, and none if it has none free, which is not
        an error. Pages that sequences use stay where they are. Raises CallRefused, LinkDown.
        """

    @abstractmethod
    async def stats(self) -> dict[str, int]:
        """The R-node's counters for this link by name. Raises LinkDown.

        They are the fields of fd_link_stats_t and: pages_max, the pages that the lease could have now; region_bytes,
        the size of the link's activation region; kv_free, the free bytes of the R-node's KV-cache memory;
        roofline, the bytes a second at which the R-node can read memory, 0 if it has not measured that.
        """

    @abstractmethod
    async def leaving(self) -> None:
        """Wait until the R-node has said that it is about to end. It then serves the link for a while, but opens no
        other. May never return."""

    @abstractmethod
    async def closed(self) -> LinkDown | None:
        """Wait until the link has ended, which does not wait until its resources are free. Returns the error that ended
        it, or None after `close`."""

    @abstractmethod
    async def close(self) -> None:
        """End the link, wait until the R-node has freed the lease, and free this end's resources. Idempotent."""


class MigrationTarget(Protocol):
    """What a migration connection is for (migration.py)."""

    async def run(self, conn: Any) -> None:
        """Serve `conn`, a FrameSocket, until the sequence is complete or fetched. Raises TransportError, OSError."""


class OfferedPages(Protocol):
    """A sequence whose pages may be fetched over a migration connection (migration.py)."""

    page_bytes: int

    def check(self, first: int, n_pages: int) -> None:
        """Raise CallRefused if the sequence has no such pages."""

    def send(self, fd: int, first: int, n_pages: int, offset: int) -> int:
        """Send what the socket `fd` takes of these pages from byte `offset` on. Returns the number of bytes. Raises
        CallRefused, OSError."""
        ...


class IncomingPages(Protocol):
    """A sequence that another R-node may send over a migration connection (migration.py)."""

    page_bytes: int

    def check(self, first: int, n_pages: int, length: int) -> None:
        """Raise CallRefused if the sequence has no such pages."""

    async def memory(self, first: int, end: int) -> None:
        """Wait until the OS has found memory for the bytes from page `first` on, up to byte `end` of these."""

    def receive(self, fd: int, first: int, n_pages: int, offset: int) -> int:
        """Receive what the socket `fd` has of these pages from byte `offset` on. Returns the number of bytes. Raises
        CallRefused, OSError."""
        ...

    def finish(self, length: int) -> None:
        """All pages have come: the sequence has `length` tokens. Raises CallRefused."""


class LinkService(Protocol):
    """The service of an R-node to the transports that it listens on (implemented by daemon.rnode.RNode)."""

    name: str  # the R-node's name, which CHALLENGE tells to every S-node
    log: logging.Logger  # for what happens to its links

    async def prepare(self, hello: Hello) -> None:
        """Do what `open_link` needs and what takes long. Raises LinkRefused."""

    def open_link(self, hello: Hello, region: memoryview, carrier: object | None) -> LinkGrant:
        """Grant a lease, and let the R-engine serve the steps that appear in `region`.

        The caller has written the region's header and keeps the region mapped until LinkGrant.close returns. `carrier`
        is a PyCapsule named "fastdecode.carrier" around an fd_carrier_t (region/carrier.h); None for shared memory.
        Raises LinkRefused.
        """

    def migration_target(self, token: str, page_bytes: int) -> MigrationTarget:
        """What `token` admits a migration connection for, once. Raises LinkRefused."""


class LinkGrant(Protocol):
    """A link that an R-node has granted: the lease, and the operations on it.

    `free`, `trim`, `fork`, `admit_migration`, `migrate`, `offer`, `keep`, `adopt`, `resize` and `stats` do what the
    methods of Link with these names do, and raise CallRefused; so does `find` if there is no such sequence.
    """

    lease: Lease
    wake_fd: int  # eventfd; a write to it wakes the R-engine
    #: The capsule with which waiters of this process stand in for the R-engine's thread 0; None if they should not.
    stand_in: object | None

    def free(self, handles: Sequence[tuple[int, int]]) -> None: ...
    def trim(self, seq_index: int, tag: int, length: int) -> None: ...
    def fork(self, src: tuple[int, int], dst: tuple[int, int], length: int) -> None: ...
    def admit_migration(self, seq: tuple[int, int], length: int, token: str) -> None: ...
    async def migrate(self, seq: tuple[int, int], pages: range, length: int, url: str, token: str) -> None: ...
    def offer(self, seq: tuple[int, int], token: str) -> None: ...
    def keep(self, sequences: Sequence[tuple[int, int, str | None]]) -> None: ...
    def find(self, key: str, length: int) -> None: ...
    async def adopt(self, seq: tuple[int, int], length: int, key: str) -> None: ...
    def detach(self) -> None:
        """End all migrations, because the link is ending. Runs on the event loop; `close` follows."""

    def resize(self, n_pages: int) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None:
        """Take the link from the R-engine and free the lease. Waits for a call in progress."""


class Server(ABC):
    """A transport that listens, on the R side."""

    url: str  # with the port that the operating system has assigned

    @abstractmethod
    def leave(self) -> None:
        """Refuse new links, and tell the S-nodes of the open ones that the R-node is about to end."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening and end all links of this server."""
