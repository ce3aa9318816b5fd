from collections.abc import Buffer, Sequence
from typing import final

#: n_slots, max_rows, n_layers, n_q_heads, n_kv_heads, head_size, index of the activation dtype in ACT_DTYPES, v_size,
#: v_in_k, index_heads, index_size, index_topk
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
    """The S side of a link's data path; a StepGroup drives the steps in its slots.

    All methods are thread-safe. A waiter spins for `spin_us` microseconds before
    it sleeps. The Port keeps the region mapped until `close`.

    The caller gives exactly one of these, which selects the way that messages leave:

    - `wake_fd` (shared memory): the R-engine's eventfd, which stays open until `close` returns. With `stand_in`, the
      capsule of an R-engine of this process, a thread that waits also does the work of the R-engine's thread 0;
    - `data_fd` (any connected stream socket): the Port owns the socket, even if this raises OSError;
    - `verbs` (RDMA): a queue pair, which stays connected until `close` returns;
    - `loopback`: there is no R-node; every message is answered at once, and the O rows stay as they are.

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
        loopback: bool = False,
        stand_in: object | None = None,
    ) -> None: ...
    @property
    def down_fd(self) -> int:
        """An eventfd, readable once the port is down."""
    @property
    def reason(self) -> str | None:
        """Why the port is down; None while it is not."""
    def reap(self) -> None:
        """RDMA: take all completions from the queue. A completion with an error takes the port down."""
    def probe(self) -> None:
        """RDMA: let the peer's device acknowledge a write. If it does not, the port goes down within a second."""
    def kill(self, reason: str, /) -> None:
        """Take the port down and wake all waiters. The first reason stays."""
    def close(self) -> None:
        """Take the port down, join its threads and let go of the region. Idempotent."""

#: One link's part of a step: its port, its row table (an array of fd_row_t), and the ranges [from, to) of the step's
#: rows that attend and that are only appended. In the slot, appended rows follow attending rows. The last part is None
#: if the link takes whole rows; else an array of uint32 [n_layers, 4, 2], the columns that each layer exchanges with
#: the link: byte ranges [from, to) of Q, K, V and O within a row of the step's buffers. In the link's slot, Q, K and O
#: begin their rows, and V follows K.
_Member = tuple[Port, Buffer, int, int, int, int] | tuple[Port, Buffer, int, int, int, int, Buffer | None]

#: A failure of one member: its index, its fd_status_t or -1 if its link is down, and the reason. A member that has
#: failed takes no part in the rest of the step.
_Failures = list[tuple[int, int, str]] | None

@final
class StepGroup:
    """One step of a mini-batch over all links that have rows in it. Each method is one C call, however many links.

    `q` [attending rows, bytes of a row], `kv` [rows, bytes] and `o` [attending rows, bytes] are the step's row buffers
    on the CPU; without them the caller writes and reads the rows in the members' slots. One thread at a time
    may use a group. Raises ValueError if a member's rows or columns do not fit its slot or the buffers.
    """

    def __init__(
        self,
        slot: int,
        members: Sequence[_Member],
        q: Buffer | None = None,
        kv: Buffer | None = None,
        o: Buffer | None = None,
    ) -> None: ...
    def arm(self, n_layers: int = 0, /) -> _Failures:
        """Publish the step, which runs the first `n_layers` layers of the links, to every link; 0: all layers. Returns
        at once. Raises ValueError if a slot has a message in flight."""
    def ring(self, layer: int, kv: Buffer | None = None, /) -> _Failures:
        """Copy every member's rows into its slot and ask for the layer, the step's next one. Returns at once. `kv`: the
        layer's K and V rows, instead of those in the step's buffer. Raises ValueError if it is another layer, a slot
        has a message in flight, or `kv` is of another shape than the buffer."""
    def wait(self, timeout: float, rows: bool = True) -> _Failures:
        """Wait until every link has answered, and gather the O rows if `rows` is true. The O rows of a member that
        fails become zero.

        A link that does not answer within `timeout` seconds goes down. Members with nothing in flight are passed over.
        """
    def run_layers(self, layers: object, from_layer: int, to_layer: int, timeout: float, /) -> tuple[_Failures, bytes]:
        """`ring` and `wait` for each layer from `from_layer` to before `to_layer`, and the S-Part's share of each.
        Other Python threads run meanwhile.

        `layers` is a PyCapsule "fastdecode.spart_layers" (spart_layers.h). After a layer in which a link fails, nothing
        more is computed or asked for. Returns the failures, and of each layer two float64 in seconds of
        CLOCK_MONOTONIC: when the wait for it began, and when all links had answered. Raises ValueError like `ring`,
        MemoryError if there is none for the computation.
        """
    def disarm(self) -> list[tuple[int, int, int]]:
        """End the step on every link. Returns (member, busy_ns, kv_bytes) of each member that answered all layers."""

def wait_any(waits: Sequence[StepGroup | int | None], wake_fd: int, timeout: float, /) -> int | None:
    """Wait until one of `waits` is over, and return its index.

    A StepGroup is over once each of its links has answered or failed; its own `wait` then blocks no more. A descriptor
    is over once it is readable, and None at once. If several waits are over, the index is that of the first None, else
    of the first StepGroup, else of the first descriptor. Returns None if `wake_fd` is readable, or after `timeout`
    seconds. Raises TypeError for another kind of wait, ValueError for more than 32 waits.
    """

@final
class Proxy:
    """A thread that carries the layer words of slots which a device drives: it sends what a word announces, takes in
    the replies, takes down the link of an R-node that is late, and poisons the slots of a dead link again and again.
    The thread reads the words for `spin_us` microseconds without a nap.

    The object's buffer is a page of memory, which the device must be able to write. When a mini-batch's step has ended,
    the device stores a value that is not 0 in its completion word, the uint32 at 64 times the mini-batch's number.

    Raises OSError if no thread can be started. Every slot must have ended before the object goes away.
    """

    def __init__(self, spin_us: int = 50) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def expect(self, mini_batch: int, /) -> None:
        """Clear the completion word and the eventfd of a mini-batch, before the device is started."""
    def done(self, mini_batch: int, /) -> bool:
        """True if the device has written the mini-batch's completion word."""
    def done_fd(self, mini_batch: int, /) -> int:
        """An eventfd, readable once the device has written the completion word that `expect` has cleared."""
    def begin(self, port: Port, slot: int, timeout: float, /) -> None:
        """Let the device drive the slot's step, whose verdict has been waited for. The port stays open until `end`.

        The device writes the layer's rows, stores layer_request = layer + 1 and waits until layer_reply >= layer + 1.
        If a reply does not come within `timeout` seconds, the port goes down.
        Raises ConnectionError once the port is down, ValueError if no step is armed or a layer has been asked for.
        """
    def end(self, port: Port, slot: int, /) -> bool | tuple[int, str]:
        """End the step that `begin` began, after the device has passed its last gate.

        Returns whether all layers were answered; or, if the step was poisoned, (fd_status_t, message). Raises
        ConnectionError if the port is down: then the O rows mean nothing.
        """

@final
class RPort:
    """The R side of a link's data path over a stream socket, or with `rdma` through a queue pair. Keeps the region
    mapped until `close`."""

    def __init__(self, region: Buffer, geometry: _Geometry, *, rdma: bool = False) -> None: ...
    @property
    def carrier(self) -> object:
        """The PyCapsule "fastdecode.carrier" for LinkService.open_link. The capsule keeps the port alive."""
    @property
    def down_fd(self) -> int:
        """An eventfd, readable once the connection has ended or failed."""
    @property
    def reason(self) -> str | None:
        """Why the connection has ended; None while it has not."""
    def start(self, *, data_fd: int = -1, wake_fd: int = -1, verbs: _Verbs = ...) -> None:
        """Start to move messages.

        TCP: over `data_fd`, a connected stream socket that the port owns, even if this raises OSError. `wake_fd`, the
        R-engine's eventfd, stays open until `close` returns. RDMA: through a queue pair, which stays connected until
        `close` returns. Raises TypeError (not what the port was made for), ValueError, OSError.
        """
    def reap(self) -> None:
        """RDMA: take all completions from the queue. A completion with an error ends the connection."""
    def kill(self, reason: str, /) -> None:
        """Mark the connection as failed. The first reason stays."""
    def close(self) -> None:
        """End the connection, join the threads and let go of the region and the queue pair. Idempotent."""
