from collections.abc import Buffer
from typing import final

PROTOCOL_VERSION: int

#: n_slots, max_rows, n_layers, n_q_heads, n_kv_heads, head_size, index of the activation dtype
_Geometry = tuple[int, int, int, int, int, int, int]

def region_layout(geometry: _Geometry) -> tuple[int, int, int, int, int, int, int, int, int]:
    """The fields of RegionLayout, in order. Raises ValueError with a sentence if the geometry is not sane."""

def init_region_header(region: Buffer, geometry: _Geometry) -> None:
    """Write a region's header page."""

def check_region_header(region: Buffer, geometry: _Geometry) -> None:
    """Raise ValueError with a sentence unless the region was made for this geometry and protocol version."""

def verbs_fds(qp_address: int, qp_number: int, /) -> tuple[int, int]:
    """Descriptors of a queue pair's completion channel and of its device's asynchronous events, both borrowed.

    Raises ValueError unless `qp_address` is that of the struct ibv_qp with that number, of a reliable connection, with
    a completion channel; any address is safe to ask about.
    """

#: For posting to a connected queue pair: address of its struct ibv_qp, its number, lkey of the region here, rkey and
#: address of the peer's, bytes that one message may have, depth of the send queue.
_Verbs = tuple[int, int, int, int, int, int, int]

@final
class Port:
    """The S side of a link's data path. Methods are thread-safe; one thread a slot at a time.

    Exactly one of `wake_fd` (shared memory: the R-engine's eventfd, borrowed), `data_fd` (TCP: a connected socket,
    owned from then on, also if this raises OSError) and `verbs` (RDMA: borrowed until `close` returns) is given. Keeps
    the region mapped while it lives.
    """

    def __init__(
        self,
        region: Buffer,
        geometry: _Geometry,
        spin_us: int,
        *,
        wake_fd: int = -1,
        data_fd: int = -1,
        verbs: _Verbs = ...,
    ) -> None: ...
    @property
    def down_fd(self) -> int:
        """An eventfd, readable once the port is down."""
    @property
    def reason(self) -> str | None:
        """Why the port is down; None while it is not."""
    def write_table(self, slot: int, rows: Buffer, /) -> None: ...
    def post(self, slot: int, layer: int, n_entries: int, n_rows: int, n_attend_rows: int, new_step: bool, /) -> None:
        """Raises ConnectionError once down, ValueError if the call is out of bounds or the slot has one in flight."""
    def wait(self, slot: int, timeout: float, /) -> tuple[int, int, int, str]:
        """(status, busy_ns, kv_bytes, message). Raises like `post`; a timeout (seconds) takes the port down."""
    def reap(self) -> None:
        """RDMA: take what completions there are; one that tells of an error takes the port down."""
    def kill(self, reason: str, /) -> None:
        """Take the port down, if it is not, and wake all who wait."""
    def close(self) -> None:
        """`kill`, then join the threads."""

@final
class Pump:
    """The R side of a TCP link's data path. Keeps the region mapped while it lives."""

    def __init__(self, region: Buffer, geometry: _Geometry) -> None: ...
    @property
    def notify(self) -> object:
        """PyCapsule "fastdecode.notify" for LinkService.open_link; keeps the pump alive."""
    @property
    def down_fd(self) -> int:
        """An eventfd, readable once the data connection has ended."""
    @property
    def reason(self) -> str | None:
        """Why the data connection ended; None while it has not."""
    def start(self, data_fd: int, wake_fd: int, /) -> None:
        """Serve a connected socket, owned from then on (also if this raises OSError). `wake_fd` is borrowed."""
    def close(self) -> None:
        """Cut the connection and join the threads. Idempotent."""

@final
class Poster:
    """The R side of an RDMA link's data path. Keeps the region mapped while it lives, and marks it as `no_wakeup`."""

    def __init__(self, region: Buffer, geometry: _Geometry) -> None: ...
    @property
    def notify(self) -> object:
        """PyCapsule "fastdecode.notify" for LinkService.open_link; keeps the poster alive."""
    @property
    def down_fd(self) -> int:
        """An eventfd, readable once the connection has failed."""
    @property
    def reason(self) -> str | None:
        """Why the connection failed; None while it has not."""
    def start(self, verbs: _Verbs, /) -> None:
        """Send replies through a queue pair, which is borrowed until `close` returns. Raises ValueError, OSError."""
    def reap(self) -> None:
        """Take what completions there are; one that tells of an error ends the connection."""
    def kill(self, reason: str, /) -> None:
        """The connection has failed."""
    def close(self) -> None:
        """Stop touching region and queue pair. Idempotent."""
