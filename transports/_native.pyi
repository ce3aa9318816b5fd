from collections.abc import Buffer, Sequence
from typing import final

#: n_slots, max_rows, n_layers, n_q_heads, n_kv_heads, head_size, index of the activation dtype in ACT_DTYPES
_Geometry = Sequence[int]

def verbs_fds(qp_address: int, qp_number: int, /) -> tuple[int, int]:
    """The descriptors of a queue pair's completion channel and of its device's asynchronous events.

    The queue pair keeps ownership of both. Any value of `qp_address` is safe. Raises ValueError unless it is the
    address of a struct ibv_qp with this number, of a reliable connection and with a completion channel.
    """

#: How to post to a connected queue pair: address of its struct ibv_qp, its number, lkey of this end's region, rkey and
#: address of the peer's region, largest message in bytes, depth of the send queue.
_Verbs = tuple[int, int, int, int, int, int, int]

@final
class Port:
    """The S side of a link's data path.

    All methods are thread-safe; one thread may use a slot at a time. A waiter spins for `spin_us` microseconds before
    it sleeps. The Port keeps the region mapped until `close`.

    The caller gives exactly one of these, which selects the way that calls leave:

    - `wake_fd` (shared memory): the R-engine's eventfd, which stays open until `close` returns;
    - `data_fd` (any connected stream socket): the Port owns the socket, even if this raises OSError;
    - `verbs` (RDMA): a queue pair, which stays connected until `close` returns.

    Raises TypeError, ValueError (the region's size does not match the geometry), OSError.
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
    def write_table(self, slot: int, rows: Buffer, /) -> None:
        """Copy `rows`, an array of fd_row_t, to the slot's row table. Raises like `post`."""
    def post(self, slot: int, layer: int, n_entries: int, n_rows: int, n_attend_rows: int, new_step: bool, /) -> None:
        """Publish a call, a layer of a step. Returns at once.

        Raises ConnectionError once the port is down, ValueError if a number is out of bounds or the slot has a call in
        flight.
        """
    def wait(self, slot: int, timeout: float, /) -> tuple[int, int, int, str]:
        """Wait for the reply to the slot's call. Returns (fd_status_t, busy_ns, kv_bytes, message).

        If no reply arrives within `timeout` seconds, the port goes down. Raises ConnectionError once the port is down,
        ValueError if the slot has no call in flight.
        """
    def reap(self) -> None:
        """RDMA: take all completions from the queue. A completion with an error takes the port down."""
    def kill(self, reason: str, /) -> None:
        """Take the port down and wake all waiters. The first reason stays."""
    def close(self) -> None:
        """Take the port down, join its threads and let go of the region. Idempotent."""

@final
class Pump:
    """The R side of a link's data path over a stream socket. Keeps the region mapped until `close`."""

    def __init__(self, region: Buffer, geometry: _Geometry) -> None: ...
    @property
    def notify(self) -> object:
        """The PyCapsule "fastdecode.notify" for LinkService.open_link. The capsule keeps the pump alive."""
    @property
    def down_fd(self) -> int:
        """An eventfd, readable once the data connection has ended."""
    @property
    def reason(self) -> str | None:
        """Why the data connection ended; None while it has not."""
    def start(self, data_fd: int, wake_fd: int, /) -> None:
        """Start to move calls and replies over a connected stream socket.

        The Pump owns `data_fd`, even if this raises OSError. `wake_fd`, the R-engine's eventfd, stays open until
        `close` returns.
        """
    def close(self) -> None:
        """Shut the connection down and join the threads. Idempotent."""

@final
class Poster:
    """The R side of an RDMA link's data path.

    Sets `no_wakeup` in the region's header, and keeps the region mapped until `close`.
    """

    def __init__(self, region: Buffer, geometry: _Geometry) -> None: ...
    @property
    def notify(self) -> object:
        """The PyCapsule "fastdecode.notify" for LinkService.open_link. The capsule keeps the poster alive."""
    @property
    def down_fd(self) -> int:
        """An eventfd, readable once the connection has failed."""
    @property
    def reason(self) -> str | None:
        """Why the connection failed; None while it has not."""
    def start(self, verbs: _Verbs, /) -> None:
        """Start to send replies through a queue pair, which stays connected until `close` returns.

        Raises ValueError, OSError.
        """
    def reap(self) -> None:
        """Take all completions from the queue. A completion with an error ends the connection."""
    def kill(self, reason: str, /) -> None:
        """Mark the connection as failed. The first reason stays."""
    def close(self) -> None:
        """Stop all access to the region and the queue pair. Idempotent."""
